"""Bitwise comparison of a graph with swaps and recomputation to the same graph without, both run in each step.

A region's graphs are copied before they are rewritten. Each call runs the copy first, on the same inputs and from the
same RNG state::

    forward:   inputs ──► copy ──► outputs, saved tensors ─┐            kept, by the number of the call
               inputs ──► with swaps ──► outputs, number ──┼─► backward's own arguments
    backward:  saved tensors, tangents ──► copy ──► gradients           must equal those of the graph with swaps

The number is passed from forward to backward as an additional saved tensor; when autograd drops it, the copy's saved
tensors are freed. Results that the copies do not repeat are excluded: this is tested whenever a difference is found.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lmswap.errors import ResultDiffers
from lmswap.ir.program import Op, Program
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, compile_boxed
from lmswap.runtime.recorder import Recorder
from lmswap.runtime.rng import restored_rng_states, set_rng_states
from lmswap.runtime.storage import has_plain_storage
from lmswap.verify.bitwise import Comparator, effect_results, effects
from lmswap.verify.summary import Result, Verified

REFERENCE = "lmswap_reference"  # in the meta of both modules of a region
_references: weakref.WeakValueDictionary[int, UnswappedReference] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@dataclass
class _Call:
    """One call of the region, from its forward on."""

    inputs: list[Any]
    rng_states: list[torch.Tensor]  # before it
    saved: list[Any]


class _UnswappedGraph:
    """A graph without swaps or recomputation, and the comparisons with its results."""

    def __init__(
        self,
        graph: SegmentGraph,
        ops: Sequence[Op],
        outputs: tuple[Result, ...],
        device: torch.device,
        verified: Verified,
    ) -> None:
        inputs = graph.module.graph.find_nodes(op="placeholder")
        self.num_inputs, self._num_outputs, self._device = len(inputs), len(outputs), device
        written = {buffer for op in ops for buffer in op.writes}
        self._written = [position for position, node in enumerate(inputs) if graph.buffer_of.get(node) in written]
        self.results = effect_results(outputs, [str(i) for i in range(len(inputs))], self._written, device)
        self.comparator = Comparator(verified, "{result.name}, made by {result.op}")
        self._function = compile_boxed(graph.module)

    def run(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the effects, and what is saved for backward in the order of its inputs; ``inputs`` are not written."""
        given = [value.clone() if i in self._written else value for i, value in enumerate(inputs)]
        outputs = list(self._function(list(given)))
        return self.effects(outputs, given), sorted(outputs[self._num_outputs :], key=_is_no_number)

    def effects(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Return the values of ``results`` after a run."""
        return effects(outputs[: self._num_outputs], inputs, self._written, self._device)

    def num_compared(self, values: Sequence[Any]) -> int:
        """Return how many tensors among the outputs in ``values`` are compared."""
        outputs = zip(self.results[: self._num_outputs], values, strict=False)
        excluded = self.comparator.unrepeatable
        return sum(isinstance(value, torch.Tensor) and result.name not in excluded for result, value in outputs)


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
        self._graphs = [
            _UnswappedGraph(graph, program.ops[segment.start : segment.stop], made, device, verified)
            for segment, graph, made in zip(program.segments, graphs, results, strict=True)
        ]
        self._calls: dict[int, _Call] = {}
        self._running = threading.local()  # .call: the call whose forward runs in this thread
        self._number = next(_numbers)
        _references[self._number] = self

    def __deepcopy__(self, _: object) -> UnswappedReference:
        return self  # torch copies backward graphs before it compiles them

    def join(self, graphs: Sequence[SegmentGraph]) -> None:
        """Link ``graphs``, those with swaps, to this reference, and pass the call's number through them."""
        for graph in graphs:
            graph.module.meta[REFERENCE] = self
        if len(graphs) == 2:
            _pass_token(graphs[0], graphs[1], self._number)

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
        inputs = list(arguments)
        with restored_rng_states(self._device) as states:
            expected, saved = self._graphs[0].run(inputs)
        call = self._running.call = _Call(inputs, states, saved)
        try:
            outputs = swapped(arguments)
        finally:
            del self._running.call
        actual = self._graphs[0].effects(outputs, inputs)
        self._verified.num_outputs += self._compare(0, call, (), expected, actual)
        return outputs

    def _run_backward(self, swapped: BoxedFunction, arguments: list[Any]) -> Any:
        call = self._calls[int(next(filter(_is_no_number, arguments)))]
        tangents = arguments[len(arguments) - (self._graphs[1].num_inputs - len(call.saved)) :]
        if not all(map(has_plain_storage, tangents)):  # `lmswap.verify.against_eager` reports that nothing is compared
            return swapped(arguments)
        inputs = [*call.saved, *tangents]
        with restored_rng_states(self._device):
            expected, _ = self._graphs[1].run(inputs)
        gradients = swapped(arguments)
        actual = self._graphs[1].effects(gradients, inputs)
        self._verified.num_gradients += self._compare(1, call, tangents, expected, actual)
        return gradients

    def _compare(
        self, which: int, call: _Call, tangents: Sequence[Any], expected: Sequence[Any], actual: Sequence[Any]
    ) -> int:
        """Compare all results, and return the number of tensors among those returned to the caller."""
        copy = self._graphs[which]
        found = copy.comparator.differences(copy.results, expected, actual, lambda: self._repeat(which, call, tangents))
        self._verified.num_runs += 1
        for result, differs in found.items():
            self._verified.num_differences += 1
            step = self._recorder.num_steps + 1
            raise ResultDiffers(step, result.name, result.made_by, **asdict(differs), moved=result.moved)
        return copy.num_compared(expected)

    def _repeat(self, which: int, call: _Call, tangents: Sequence[Any]) -> list[Any]:
        """Run the copies again, from the forward on."""
        with restored_rng_states(self._device):
            set_rng_states(call.rng_states, self._device)
            outputs, saved = self._graphs[0].run(call.inputs)
            return outputs if which == 0 else self._graphs[1].run([*saved, *tangents])[0]


def _is_no_number(value: Any) -> bool:
    """Whether ``value`` is none of the numbers, which a forward returns last and its backward takes first."""
    return not isinstance(value, (int, float))


def call_token(number: int) -> torch.Tensor:
    """In a forward graph: return the token of the call under way, see `UnswappedReference.token`."""
    return _references[number].token()


def _pass_token(forward: SegmentGraph, backward: SegmentGraph, number: int) -> None:
    """Save the call's token in ``forward``, and take it in ``backward`` as its first saved value."""
    with forward.fx_graph.inserting_before(forward.output):
        token = forward.fx_graph.call_function(call_token, (number,))
    token.meta["val"] = forward.fake((1,), torch.int64, torch.device("cpu"))
    forward.save([token, *forward.saved])
    backward.take_new("call_token", token.meta["val"])
