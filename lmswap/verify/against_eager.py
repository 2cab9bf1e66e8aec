"""Bitwise comparison of a captured region with its own module in eager mode, in the same step.

The module that Dynamo captured calls what the model calls, so torch runs it as it runs the model: eager kernels, its
own autograd. It gets copies of the inputs and the same RNG state, and its backward gets the gradients that the graphs'
got::

    inputs ──► copies ──► module of the region ──► outputs ─────────── must equal those of its graphs
    gradients of the outputs ──► torch.autograd.grad ──► gradients ─── must equal those of its graphs

Results that eager mode itself does not repeat are excluded: this is tested whenever a difference is found. So are the
gradients of outputs that are views made by torch outside the graphs: those of the views themselves cannot be observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from lmswap.errors import PlainTorchDiffers
from lmswap.runtime.codegen import captured_node
from lmswap.runtime.recorder import Recorder
from lmswap.runtime.rng import restored_rng_states, set_rng_states
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.autograd import is_any_autocast_enabled
from lmswap.torch_compat.tensors import storage_id, version_of
from lmswap.verify.bitwise import Comparator, effect_results, effects
from lmswap.verify.summary import Result, Verified

Region = Callable[..., Sequence[Any]]
Gradients = tuple[torch.Tensor | None, ...]

_VIEWS = "outputs are views that torch makes of the graphs' outputs"
_TWICE = "they are differentiated themselves"
_NOT_PLAIN = "they are not plain tensors, as in a batch of gradients, and are not compared without swaps either"
_CAST = "backward() ran under autocast, see the notes"
_NO_COPIES = "its inputs cannot be copied, because they share memory or are not plain tensors"


class _CopiedLeaf(torch.autograd.Function):
    """The value of a leaf in separate memory, which the model may write."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Modes:
    """The modes of a region's own code: gradients and autocast."""

    def __init__(self, device: torch.device) -> None:
        self._has_gradients = torch.is_grad_enabled()
        types = {"cpu", device.type}
        self._autocasts = [(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in types]

    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(torch.set_grad_enabled(self._has_gradients))
        for device_type, dtype, is_enabled in self._autocasts:
            self._entered.enter_context(torch.autocast(device_type, dtype, is_enabled))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


@dataclass
class _EagerRun:
    """One call of the module, on copies of the graphs' inputs."""

    given: list[Any]  # copies that are never written; those that require gradients are leaves
    outputs: list[Any]
    effects: list[Any]
    rng_states: list[torch.Tensor]  # before it
    modes: _Modes

    def gradients(self, of: dict[int, int], given: Gradients, into: Sequence[int]) -> list[Any]:
        """Return the gradients of inputs ``into``; ``of``: by output, which of ``given`` is its gradient."""
        pairs = [(self.outputs[position], given[number]) for number, position in of.items()]
        outputs, tangents = zip(*((output, tangent) for output, tangent in pairs if tangent is not None), strict=True)
        leaves = [self.given[position] for position in into]
        return list(torch.autograd.grad(outputs, leaves, tangents, retain_graph=True, allow_unused=True))


class EagerReference:
    """The comparison of one region with eager mode; results compared are counted in ``verified``."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[str],
        *,
        device: torch.device,
        verified: Verified,
        recorder: Recorder,
        may_round_otherwise: Callable[[], bool],
    ) -> None:
        """``inputs``: their names; see `lmswap.capture.numerics.no_decompositions` for ``may_round_otherwise``."""
        self._module, self._names, self._device = module, inputs, device
        self._verified, self._recorder, self._may_round_otherwise = verified, recorder, may_round_otherwise
        self._comparator = Comparator(verified, "{result.name} of plain torch")
        self._written: set[int] | None = None  # positions of inputs; None until it has been seen

    def wrap(self, graphs: Region) -> Region:
        """Return a function that runs ``graphs`` and eager mode, and returns the results of ``graphs``.

        Raises:
            PlainTorchDiffers: raised by that function, and by its backward, if results differ.
        """
        return lambda *arguments: self._run(graphs, arguments)

    def _run(self, graphs: Region, arguments: Sequence[Any]) -> Sequence[Any]:
        if not _can_be_copied(arguments):
            self._skip("outputs and gradients", range(len(arguments)), _NO_COPIES)
            return graphs(*arguments)
        with restored_rng_states(self._device) as states:
            run = self._run_eager(arguments, states)
        edges = [_edge(argument) for argument in arguments]  # taken before the graphs run: writes change them
        outputs = graphs(*arguments)
        written = sorted(self._written or ())
        results = effect_results(_named("output {}", range(len(outputs))), self._names, written, self._device)
        actual = effects(outputs, arguments, written, self._device)
        self._compare(results, run.effects, actual, lambda: self._repeat(run).effects)
        self._verified.num_plain_outputs += len(outputs)
        self._compare_gradients(run, edges, outputs)
        return outputs

    def _run_eager(self, arguments: Sequence[Any], states: list[torch.Tensor]) -> _EagerRun:
        """Run the module on copies of ``arguments``; inputs that it writes, or may write, get second copies."""
        set_rng_states(states, self._device)
        given, spare = _copies(arguments), _copies(arguments) if self._written != set() else []
        is_written = [self._written is None or position in self._written for position in range(len(given))]
        inputs = [
            _input(copy, argument, spare[position] if is_written[position] else copy)
            for position, (copy, argument) in enumerate(zip(given, arguments, strict=True))
        ]
        versions = [_version(value) for value in inputs]
        outputs = list(self._module(*inputs))
        self._written = {position for position, value in enumerate(inputs) if _version(value) != versions[position]}
        changed = effects(outputs, inputs, sorted(self._written), self._device)
        return _EagerRun(given, outputs, changed, states, _Modes(self._device))

    def _repeat(self, run: _EagerRun) -> _EagerRun:
        """Repeat a run; the current RNG states are restored."""
        with restored_rng_states(self._device), run.modes:
            return self._run_eager(run.given, run.rng_states)

    def _compare_gradients(self, run: _EagerRun, edges: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Compare the gradients that the graphs' backward will return."""
        ends = [edge[0] for edge in edges if edge is not None]
        node = next(filter(None, (captured_node(output, ends) for output in outputs)), None)
        if node is None:
            return
        of: dict[int, int] = {}  # of outputs that are the same tensor, one gets the gradient
        for position, output in enumerate(outputs):
            if _function(output) is node:
                of.setdefault(output.output_nr, position)
        numbers = {edge: number for number, edge in enumerate(node.next_functions) if edge[0] is not None}
        into = {position: numbers[edge] for position, edge in enumerate(edges) if edge in numbers}

        has_views = any(captured_node(output, ends) is node is not _function(output) for output in outputs)

        def ran(made: Gradients, given: Gradients) -> None:
            if all(gradient is None for gradient in given):
                return
            if not all(gradient is None or has_plain_storage(gradient) for gradient in given):
                self._skip("gradients", into, _NOT_PLAIN)
                return
            if is_any_autocast_enabled():
                self._skip("gradients", into, _CAST)
                return
            is_unseen = any(gradient is not None and number not in of for number, gradient in enumerate(given))
            if torch.is_grad_enabled() or is_unseen:
                self._skip("gradients", into, _VIEWS if is_unseen else _TWICE)
                return
            if has_views:  # their gradients are included in those of another output
                self._skip("gradients of views that are outputs", into, _VIEWS)
            with restored_rng_states(self._device):
                expected = run.gradients(of, given, list(into))
            results = _named("the gradient of {}", (self._names[position] for position in into))
            actual = [made[number] for number in into.values()]
            self._compare(results, expected, actual, lambda: self._repeat(run).gradients(of, given, list(into)))
            self._verified.num_plain_gradients += len(into)

        disable: Callable[..., Any] = torch.compiler.disable  # as in `lmswap.capture.numerics.double_backward`
        node.register_hook(disable(ran))

    def _skip(self, what: str, inputs: Iterable[int], why: str) -> None:
        """Record that ``what`` of the graph with those ``inputs`` is not compared."""
        names = [self._names[position] for position in inputs]
        others = f" and {len(names) - 1} other inputs" if len(names) > 1 else ""
        text = f"{what} of the graph of {names[0] if names else 'no inputs'}{others} ({why})"
        if text not in self._verified.not_beside_plain:
            self._verified.not_beside_plain.append(text)

    def _compare(
        self,
        results: Sequence[Result],
        expected: Sequence[Any],
        actual: Sequence[Any],
        repeat: Callable[[], Sequence[Any]],
    ) -> None:
        """Compare all results; ``repeat`` repeats the run in eager mode."""
        for result, differs in self._comparator.differences(results, expected, actual, repeat).items():
            if self._may_round_otherwise():
                if result.name not in self._verified.rounded_otherwise:
                    self._verified.rounded_otherwise.append(result.name)
                continue
            self._verified.num_differences += 1
            raise PlainTorchDiffers(self._recorder.num_steps + 1, result.name, **asdict(differs))


def _named(text: str, which: Iterable[Any]) -> list[Result]:
    return [Result(text.format(one)) for one in which]


def _can_be_copied(arguments: Sequence[Any]) -> bool:
    """Return whether ``arguments`` can be replaced by copies: not if two that require gradients share memory."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) and has_plain_storage(t) for t in tensors):
        return False
    storages = [storage_id(tensor.untyped_storage()) for tensor in tensors if tensor.requires_grad]
    return len(set(storages)) == len(storages)


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """Return copies with the strides and memory sharing of ``arguments``."""
    memory: dict[int, torch.UntypedStorage] = {}
    copies: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            copies.append(argument)
            continue
        storage = argument.untyped_storage()
        number = storage_id(storage)
        if number not in memory:
            memory[number] = storage.clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=argument.dtype, device=argument.device)
        copy.set_(memory[number], argument.storage_offset(), argument.shape, argument.stride())
        copies.append(copy)
    return copies


def _input(copy: Any, argument: Any, memory: Any) -> Any:
    """Return the replacement of ``argument`` in ``memory``, whose gradient goes to ``copy``."""
    if not isinstance(argument, torch.Tensor) or not argument.requires_grad:
        return memory
    copy.requires_grad_()
    if memory is copy:
        return copy
    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _CopiedLeaf.apply
    return apply(copy, memory)


def _version(argument: Any) -> int:
    is_counted = isinstance(argument, torch.Tensor) and not argument.is_inference()
    return version_of(argument) if is_counted else 0


def _function(output: Any) -> Any:
    return output.grad_fn if isinstance(output, torch.Tensor) else None


def _edge(argument: Any) -> Any:
    """Return the gradient edge of ``argument``, if it requires a gradient."""
    if not isinstance(argument, torch.Tensor) or not argument.requires_grad:
        return None
    edge = torch.autograd.graph.get_gradient_edge(argument)
    return (edge.node, edge.output_nr)
