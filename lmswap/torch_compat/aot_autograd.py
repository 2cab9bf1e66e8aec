"""AOTAutograd, which traces a captured region forward and backward, partitions it and makes an autograd function of it.

Its work has two stages: `intercepted_second_stage` separates them, so that the second can run for other graphs, too.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._inductor.debug  # torch imports it as it first traces: 4 MiB of code that are no growth of a model
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import aot_autograd as stages
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd.descriptors import AOTInput, PlainAOTInput, SubclassGetAttrAOTInput
from torch._functorch._aot_autograd.graph_compile import aot_graphs_log, aot_joint_log, aot_stage2_compile
from torch._functorch._aot_autograd.schemas import (
    AOTGraphCapture,
    AOTState,
    MemoryFormatMeta,
    PlainTensorMeta,
    SubclassCreationMeta,
    SubclassMeta,
    ViewAndMutationMeta,
)
from torch._logging._internal import trace_log

from lmswap.torch_compat.autograd import is_any_autocast_enabled
from lmswap.torch_compat.tracing import TracingContext, tracing

__all__ = ["aot_autograd"]

Boxed = Callable[[list[Any]], Any]
_MODIFIED = (ViewAndMutationMeta, SubclassMeta, SubclassCreationMeta)  # by the second stage


def input_descriptor(position: int, path: Sequence[str]) -> AOTInput:
    """Return the "desc" of the graph input for a region's input, or for the part of it at a ``path`` of attributes."""
    described: AOTInput = PlainAOTInput(position)
    for name in path:
        described = SubclassGetAttrAOTInput(described, name)
    return described


def boxed(function: Boxed) -> Boxed:
    """Return ``function`` marked as one that empties its list, of which AOTAutograd then keeps no second reference."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def backward_without_autocast() -> AbstractContextManager[None]:
    """Trace backwards without autocast, as eager autograd runs them.

    torch 2.13 traces them under the autocast that is enabled around the forward (pytorch#153044; pytorch#177287 is to
    change the default).
    """
    off: AbstractContextManager[None] = config.patch(backward_pass_autocast="off")
    return off


class FirstStage:
    """What the first stage, tracing, returned for a region: input of the second stage, which modifies copies of it.

    Of its tensors only constants of the code are real.
    """

    def __init__(self, state: AOTState, capture: AOTGraphCapture, compilers: Sequence[Any]) -> None:
        self._state, self._capture = state, capture
        self.partition, *self._compilers = compilers
        self.fake_mode: Any = TracingContext.get().fake_mode
        self._is_cast = is_any_autocast_enabled()

    @property
    def graph(self) -> fx.GraphModule:
        """The traced graph: forward and backward in one if `needs_autograd`."""
        graph: fx.GraphModule = self._capture.graph_module
        return graph

    @property
    def needs_autograd(self) -> bool:
        """Whether the region has a backward."""
        return bool(self._state.needs_autograd)

    def drop_graph(self) -> None:
        """Replace the graph, which a partitioner has consumed, by an empty one."""
        self._capture = replace(self._capture, graph_module=fx.GraphModule({}, fx.Graph()))

    def run_second_stage(self, graph: fx.GraphModule, partition: Callable[..., tuple[fx.GraphModule, ...]]) -> Boxed:
        """Run the second stage on ``graph``, which it partitions by ``partition`` if there is a backward.

        It compiles the backward, too. Torch 2.13 would do that, on another copy, where the first one begins: at the
        peak of a step, with 15 KiB per op.
        """
        config = replace(self._state.aot_config, enable_log=_are_graphs_logged(), force_non_lazy_backward_lowering=True)
        state = replace(self._state, aot_config=config, fw_metadata=_own(self._state.fw_metadata))
        capture = replace(
            self._capture,
            graph_module=graph,
            updated_flat_args=_own(self._capture.updated_flat_args),
            maybe_subclass_meta=_own(self._capture.maybe_subclass_meta),
        )
        compiled, _ = aot_stage2_compile(state, capture, partition, *self._compilers)
        made: Boxed = compiled
        return made

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Restore the context of the second stage after torch has left AOTAutograd.

        It reads whether autocast is enabled, so that results are not cast twice; another graph may be about to run.
        """
        autocast = torch.autocast("cpu", enabled=self._is_cast)
        with autocast, tracing(TracingContext(self.fake_mode)), self.fake_mode:
            yield


def _are_graphs_logged() -> bool:
    """Whether anyone logs AOTAutograd's graphs; torch writes them out as text in any case (torch 2.13).

    That takes a twentieth of the time of a trace. No upstream issue known.
    """
    are_enabled = (log.isEnabledFor(logging.INFO) for log in (aot_joint_log, aot_graphs_log))
    return bool(trace_log.handlers) or any(are_enabled)


@contextmanager
def intercepted_second_stage(instead: Callable[[FirstStage], Any]) -> Iterator[None]:
    """Have the next second stage of this thread return ``instead`` of what the first stage returned.

    Other threads may use AOTAutograd themselves meanwhile.
    """
    thread = threading.get_ident()

    def second_stage(state: AOTState, capture: AOTGraphCapture, *compilers: Any) -> tuple[Any, Any]:
        if threading.get_ident() != thread:  # Dynamo lets one thread compile
            return aot_stage2_compile(state, capture, *compilers)
        catching.stop()  # Inductor's compilers trace patterns in two stages, too
        return instead(FirstStage(state, capture, compilers)), state.fw_metadata

    catching = mock.patch.object(stages, "aot_stage2_compile", second_stage)
    catching.start()
    try:
        yield
    finally:
        catching.stop()


def partition(joint: fx.GraphModule, joint_inputs: Any, **given: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward by torch's default partitioner; random ops must be marked as saved.

    It takes fused attention for random also without dropout, and in checkpoints would pass an RNG state of unknown size
    from the forward to the backward (torch 2.13; no upstream issue known).
    """
    with mock.patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False):
        halves: tuple[fx.GraphModule, fx.GraphModule] = partitioners.default_partition(joint, joint_inputs, **given)
    return halves


def forward_metadata() -> Any:
    """Return the metadata of the region being compiled, or None."""
    return getattr(TracingContext.try_get(), "fw_metadata", None)


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint or backward graph that are gradients of the forward's outputs.

    By torch's descriptions of inputs: names are no proof, as a saved value has that of the operator that made it.
    """
    inputs = [(node, node.meta.get("desc")) for node in graph.find_nodes(op="placeholder")]
    return [node for node, description in inputs if description is not None and description.is_tangent()]


def overwritten_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of ``graph`` that torch overwrites with one of its outputs."""
    (output,) = graph.find_nodes(op="output")
    written = [getattr(description, "mutated_input", None) for description in output.meta.get("desc") or ()]
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if node.meta.get("desc") is not None and node.meta["desc"] in written]


def gradients(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Return the outputs of a backward graph that are gradients, each with the description of the forward's input."""
    (output,) = graph.find_nodes(op="output")
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)
    return [(made, description.grad_of) for made, description in described if hasattr(description, "grad_of")]


def allow_retain_graph() -> None:
    """Do not donate saved tensors to the backward being compiled: for those torch refuses ``retain_graph=True``.

    Here, since setting donated_buffer to False around the compilation has no effect (torch 2.13). The refusal is by
    design (pytorch#130580).
    """
    metadata = forward_metadata()
    if getattr(metadata, "bw_donated_idxs", None):
        metadata.bw_donated_idxs = []


class _EqualToAll:
    """Equals every size, and all strides."""

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = object.__hash__


def accept_tangent_layouts() -> None:
    """Do not copy gradients into the layouts of outputs before the backward being compiled runs.

    torch guesses these layouts, and copies what differs, by which kernels may round differently (torch 2.13;
    pytorch#144579 introduced the guess).
    """
    as_it_is: Any = _EqualToAll()
    for tangent in getattr(forward_metadata(), "subclass_tangent_meta", None) or ():
        if isinstance(tangent, PlainTensorMeta):
            tangent.memory_format = MemoryFormatMeta(size=as_it_is, stride=as_it_is)


def take_view_outputs() -> list[int]:
    """Return the positions of outputs that are views of intermediates, and have torch return them unchanged.

    torch would call ``aten._unsafe_view`` on them, which recomputes the strides of dimensions of size 1 (torch 2.13; no
    upstream issue known).
    """
    metadata = forward_metadata()
    positions = [metadata.num_mutated_inp_runtime_indices + index for index in metadata.unsafe_view_out_indices]
    metadata.unsafe_view_out_indices, metadata.num_unsafe_view_outputs = [], 0
    return positions


def written_inputs() -> list[int]:
    """Return the positions of the inputs that the region writes."""
    infos = getattr(forward_metadata(), "input_info", None) or ()
    return [position for position, one in enumerate(infos) if one.mutates_data or one.mutates_metadata]


def overwrites_differentiable_inputs() -> bool:
    """Return whether the region writes inputs that get gradients: torch copies the written values into them."""
    infos = getattr(forward_metadata(), "input_info", None) or ()
    return any(one.requires_grad and (one.mutates_data or one.mutates_metadata) for one in infos)


def _own(part: Any) -> Any:
    """Return a copy of ``part`` down to what the second stage does not modify; fakes cannot be copied."""
    if type(part) in (list, tuple):
        return type(part)(map(_own, part))
    if type(part) is dict:
        return {name: _own(value) for name, value in part.items()}
    if not isinstance(part, _MODIFIED):
        return part
    own = copy.copy(part)
    vars(own).update(_own(vars(part)))
    return own
