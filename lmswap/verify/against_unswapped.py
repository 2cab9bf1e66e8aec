"""Bitwise comparison of a graph with swaps and recomputation to the same graph without, both run in each step.

A region's graphs are copied before they are rewritten. Each call runs the copy first, on the same inputs and from the
same RNG state::

    forward:   inputs ──► copy ──► outputs, saved tensors ─┐            kept, by the number of the call
               inputs ──► with swaps ──► outputs, number ──┼─► backward's own arguments
    backward:  saved tensors, tangents ──► copy ──► gradients           must equal those of the graph with swaps

The number is passed from forward to backward as an additional saved tensor; when autograd drops it, the copy's saved
tensors are freed. Results that the copies do not repeat are excluded: this is tested in the first call, and whenever a
difference is found.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lmswap.errors import ResultDiffers
from lmswap.execute.codegen import BoxedFunction, SegmentGraph, compile_boxed
from lmswap.execute.recorder import Recorder
from lmswap.execute.rng import rng_states, set_rng_states
from lmswap.execute.storage import has_plain_storage
from lmswap.ir.program import Op, Program
from lmswap.verify.bitwise import difference
from lmswap.verify.summary import Result, Verified

REFERENCE = "lmswap_reference"  # in the meta of both modules of a region
_references: weakref.WeakValueDictionary[int, UnswappedReference] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@dataclass
class _Call:
    """One call of the region, from its forward on."""

    inputs: list[Any]
    generators: list[torch.Tensor]  # RNG states before it
    saved: list[Any]


class _Copy:
    """A graph without swaps or recomputation."""

    def __init__(
        self, graph: SegmentGraph, ops: Sequence[Op], results: tuple[Result, ...], device: torch.device
    ) -> None:
        inputs = graph.module.graph.find_nodes(op="placeholder")
        self.num_inputs, self.num_results, self._device = len(inputs), len(results), device
        written = {buffer for op in ops for buffer in op.writes}
        self._written = [position for position, node in enumerate(inputs) if graph.buffer_of.get(node) in written]
        named = [Result(f"input {position}, written in place", "its graph", "", ()) for position in self._written]
        generators = [Result("the random generator's state", "its graph", "", ())] * len(rng_states(device))
        self.results = (*results, *named, *generators)
        self._function = compile_boxed(graph.module)

    def run(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results, as `seen` orders them, and the tensors saved for backward; ``inputs`` are not written."""
        given = [value.clone() if i in self._written else value for i, value in enumerate(inputs)]
        outputs = list(self._function(list(given)))
        return self.seen(outputs, given), outputs[self.num_results :]

    def seen(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Return the values of ``results`` after a run: outputs, inputs written in place, and RNG states."""
        written = [inputs[position] for position in self._written]
        return [*outputs[: self.num_results], *written, *rng_states(self._device)]


class UnswappedReference:
    """The copies of one region's graphs: of forward and backward, or of inference."""

    def __init__(
        self,
        program: Program,
        graphs: Sequence[SegmentGraph],
        results: Sequence[tuple[Result, ...]],
        *,
        device: torch.device,
        verified: Verified,
        recorder: Recorder,
    ) -> None:
        """Take ``graphs``, copies of those of ``program``'s segments; ``results``: what each returns to its caller.

        Findings are counted in ``verified``; ``recorder`` gives the step number.
        """
        self._device, self._verified, self._recorder = device, verified, recorder
        self._copies = [
            _Copy(graph, program.ops[segment.start : segment.stop], made, device)
            for segment, graph, made in zip(program.segments, graphs, results, strict=True)
        ]
        self._calls: dict[int, _Call] = {}
        self._running = threading.local()  # .call: the call whose forward runs in this thread
        self._unrepeatable: list[set[int] | None] = [None] * len(graphs)  # positions; None until tested
        self._number = next(_numbers)
        _references[self._number] = self

    def __deepcopy__(self, _: object) -> UnswappedReference:
        return self  # torch copies backward graphs before it compiles them

    def join(self, graphs: Sequence[SegmentGraph]) -> None:
        """Link ``graphs``, those with swaps, to this reference, and pass the call's number through them."""
        for graph in graphs:
            graph.module.meta[REFERENCE] = self
        if len(graphs) == 2:
            _hand_on(graphs[0], graphs[1].module.graph, self._number)

    def wrap(self, swapped: BoxedFunction, phase: str) -> BoxedFunction:
        """Return a function that runs ``swapped`` and its copy, and returns the results of ``swapped``.

        Raises:
            ResultDiffers: raised by that function if results differ.
        """
        run = self._run_backward if phase == "backward" else self._run_forward
        return lambda arguments: run(swapped, arguments)

    def token(self) -> torch.Tensor:
        """Return the number of the call under way in this thread; the call is kept as long as this tensor lives."""
        number = next(_numbers)
        self._calls[number] = self._running.call
        token = torch.tensor([number])
        weakref.finalize(token, self._calls.pop, number, None).atexit = False
        return token

    def _run_forward(self, swapped: BoxedFunction, arguments: list[Any]) -> Any:
        generators = rng_states(self._device)
        inputs = list(arguments)
        expected, saved = self._copies[0].run(inputs)
        call = self._running.call = _Call(inputs, generators, saved)
        set_rng_states(generators, self._device)
        try:
            outputs = swapped(arguments)
        finally:
            del self._running.call
        self._verified.num_outputs += self._compare(0, call, (), expected, self._copies[0].seen(outputs, inputs))
        return outputs

    def _run_backward(self, swapped: BoxedFunction, arguments: list[Any]) -> Any:
        generators = rng_states(self._device)
        call = self._calls[int(arguments[0])]
        tangents = arguments[len(arguments) - (self._copies[1].num_inputs - len(call.saved)) :]
        if not all(map(has_plain_storage, tangents)):  # `lmswap.verify.against_eager` reports that nothing is compared
            return swapped(arguments)
        expected, _ = self._copies[1].run([*call.saved, *tangents])
        set_rng_states(generators, self._device)
        gradients = swapped(arguments)
        actual = self._copies[1].seen(gradients, [*call.saved, *tangents])
        self._verified.num_gradients += self._compare(1, call, tangents, expected, actual)
        return gradients

    def _compare(
        self, which: int, call: _Call, tangents: Sequence[Any], expected: Sequence[Any], actual: Sequence[Any]
    ) -> int:
        """Compare every result, and return the number of tensors among those returned to the caller."""
        found = {
            position: differs
            for position, (before, after) in enumerate(zip(expected, actual, strict=True))
            if (differs := difference(before, after)) is not None
        }
        excluded = self._unrepeatable[which]
        if excluded is None or found.keys() - excluded:
            excluded = (excluded or set()) | self._differ_by_themselves(which, call, tangents)
            self._unrepeatable[which] = excluded
        self._verified.num_runs += 1
        for position in sorted(found.keys() - excluded):
            self._verified.num_differences += 1
            result, differs = self._copies[which].results[position], found[position]
            raise ResultDiffers(
                step=self._recorder.num_steps + 1,
                result=result.name,
                made_by=result.op + (f" ({result.source})" if result.source else ""),
                num_differing=differs.num_differing,
                num_elements=differs.num_elements,
                first=differs.first,
                is_nan=differs.is_nan,
                moved=result.moved,
            )
        given = expected[: self._copies[which].num_results]
        return sum(isinstance(value, torch.Tensor) and i not in excluded for i, value in enumerate(given))

    def _differ_by_themselves(self, which: int, call: _Call, tangents: Sequence[Any]) -> set[int]:
        """Return the positions of results in which two runs of the copies alone, from the forward on, differ."""
        found = rng_states(self._device)
        first, second = self._run_copies(which, call, tangents), self._run_copies(which, call, tangents)
        set_rng_states(found, self._device)
        positions = {i for i, (a, b) in enumerate(zip(first, second, strict=True)) if difference(a, b) is not None}
        for position in sorted(positions):
            result = self._copies[which].results[position]
            name = f"{result.name}, made by {result.op}"
            if name not in self._verified.unrepeatable:
                self._verified.unrepeatable.append(name)
        return positions

    def _run_copies(self, which: int, call: _Call, tangents: Sequence[Any]) -> list[Any]:
        set_rng_states(call.generators, self._device)
        seen, saved = self._copies[0].run(call.inputs)
        return seen if which == 0 else self._copies[1].run([*saved, *tangents])[0]


def call_token(number: int) -> torch.Tensor:
    """In a forward graph: return the token of the call under way, see `UnswappedReference.token`."""
    return _references[number].token()


def _hand_on(forward: SegmentGraph, backward: fx.Graph, number: int) -> None:
    """Save the call's token in ``forward``, and take it in ``backward`` as its first saved value."""
    graph = forward.module.graph
    (output,) = graph.find_nodes(op="output")
    returned, descriptions = list(output.args[0]), output.meta.get("desc")
    with graph.inserting_before(output):
        token = graph.call_function(call_token, (number,))
    mode = next(node.meta["val"].fake_mode for node in graph.nodes if hasattr(node.meta.get("val"), "fake_mode"))
    with mode:
        token.meta["val"] = torch.empty(1, dtype=torch.int64)
    returned.insert(forward.num_user_outputs, token)
    output.args = (tuple(returned),)
    if descriptions is not None:
        output.meta["desc"] = [*descriptions]
        output.meta["desc"].insert(forward.num_user_outputs, None)
    with backward.inserting_before(next(iter(backward.nodes))):
        backward.placeholder("call_token").meta["val"] = token.meta["val"]
