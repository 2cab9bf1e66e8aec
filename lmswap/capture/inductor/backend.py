"""Runs TorchInductor over the regions that Dynamo captures, and passes its graphs to a handler to edit.

Inductor decomposes operators and chooses what the forward saves, so its graphs differ from those of the fx path, and
are lowered, timed and planned separately. Graphs that need neither swaps nor recomputation are passed on unchanged.

Limits: with swaps the last bits may differ from Inductor's own, where a copy splits a fusion; the peak is planned for
the graph before fusion; random ops are never recomputed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx

from lmswap.capture.aot import GraphHandler, RegionVariant, boxed, variants_of
from lmswap.capture.aot_stages import Compiled, trace_once, variant
from lmswap.capture.inductor.kernel_order import chain_calls, check_order
from lmswap.capture.numerics.gradient_gate import dispatch_gradients
from lmswap.errors import CaptureError
from lmswap.progress import reported
from lmswap.runtime import ops
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, is_whole, without_backward
from lmswap.runtime.partial_backward import Results, compile_parts, results_by_part
from lmswap.torch_compat.inductor import (
    PRE_FUSION_PASS,
    CustomPartitionerFn,
    V,
    compile_fx,
    compile_fx_inner,
    config,
    ir,
    make_fallback,
    min_cut_rematerialization_partition,
    unlifted_effect_tokens,
)

# Swapped-in tensors have the strides that were traced; Inductor would choose others for what it saves.
# A replayed CUDA graph would copy to and from the addresses of its capture.
AS_TRACED = {"layout_optimization": False, "comprehensive_padding": False, "triton.cudagraphs": False}
# The key of a cached graph would have its metadata, which lead to the session, which cannot be pickled. Torch logs that
# failure with its traceback, whose frames hold tensors of the first step as long as a handler keeps the record (torch
# 2.13; no upstream issue known).
_UNCACHED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
# For graphs into which a plan has inserted ops: passes that move ops are off. They keep collectives in order, but no
# other operators (torch 2.13; pytorch#134874, pytorch#150074).
_AS_PLANNED = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    PRE_FUSION_PASS: chain_calls,
}
_IS_REWRITTEN = "lmswap_is_rewritten"
_STRIDES = "lmswap_strides"
_READ_BYTES = (ops.swap_out_start, ops.swap_out_wait, ops.view_bytes)


def compile_region(
    module: fx.GraphModule, inputs: Sequence[Any], handler: GraphHandler, given: Sequence[Any]
) -> Compiled:
    """Run Inductor over one region that Dynamo captured; ``handler`` gets its graphs.

    Args:
        module: Dynamo's graph; it is consumed.
        inputs: real or fake tensors in the order of its placeholders.
        handler: see `GraphHandler`; its ``compiled`` and ``compiled_backward`` are not called.
        given: the real tensors where ``inputs`` are fake.

    Returns:
        The callable that replaces the region.

    Raises:
        CaptureError: as in `lmswap.capture.aot.compile_region`, or Inductor reordered swap ops.
    """
    make_variant = variants_of(module, given, handler, _InductorVariant)
    patches = {**AS_TRACED, **_UNCACHED, "custom_partitioner_fn": _Partitioner()}
    return trace_once(
        lambda: compile_fx(module, inputs, inner_compile=_compile, config_patches=patches),  # type: ignore[arg-type]
        make_variant,
        handler,
        _inductors_own,
    )


@contextmanager
def _inductors_own(fake_mode: Any) -> Iterator[None]:
    """Return the context in which Inductor runs AOTAutograd."""
    with V.set_fake_mode(fake_mode), unlifted_effect_tokens():
        yield


def _compile(graph: fx.GraphModule, examples: Sequence[Any], **how: Any) -> BoxedFunction:
    phase = "inference" if how.get("is_inference") else "backward" if how.get("is_backward") else "forward"
    own: _InductorVariant = variant(graph)
    if phase == "forward":
        own.prepare_forward()
    if phase == "inference":
        own.edit((without_backward(graph),))
    if len(results_by_part(graph.graph)) > 1:
        return boxed(own.in_parts(graph, how))
    is_rewritten = graph.meta.get(_IS_REWRITTEN)
    with reported("a graph for Inductor", "compiling"):
        function = _as_planned(graph, examples, how) if is_rewritten else compile_fx_inner(graph, examples, **how)
    return boxed(own.recorded(function, phase))


def _as_planned(graph: fx.GraphModule, examples: Sequence[Any], how: dict[str, Any]) -> BoxedFunction:
    output = graph.graph.output_node()
    # Backward was planned for the traced strides of what forward saves: kept, as those of user outputs are.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    with config.patch(_AS_PLANNED):
        compiled = compile_fx_inner(graph, examples, **how)
    check_order(graph.graph, getattr(compiled, "source_code", ""))
    return compiled


class _InductorVariant(RegionVariant):
    """A region that Inductor compiles."""

    def recorded(self, function: BoxedFunction, phase: str) -> BoxedFunction:
        """Return ``function``, run in the handler's context."""
        running = self.handler.running

        def run(arguments: list[Any]) -> Any:
            with running(phase):
                return function(arguments)

        return run

    def in_parts(self, backward: fx.GraphModule, how: dict[str, Any]) -> BoxedFunction:
        """Compile each part of a backward that yields gradients before its end."""

        def compile_part(part: fx.GraphModule) -> BoxedFunction:
            examples = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
            return _as_planned(part, examples, {**how, "static_input_idxs": ()})

        handler, parts = self.handler, compile_parts(backward, compile_part)

        def run(arguments: list[Any]) -> Generator[Results, None, None]:
            with handler.running("backward"):
                yield from parts(arguments, nullcontext)

        num_results = len(backward.graph.output_node().args[0])  # type: ignore[arg-type]
        return lambda arguments: dispatch_gradients(
            handler.register_backward(run(arguments)), num_results, range(num_results)
        )

    def edit(self, graphs: Sequence[SegmentGraph]) -> None:
        """See `Variant`; mark the graphs if any has changed."""
        before = [len(graph.fx_graph.nodes) for graph in graphs]
        super().edit(graphs)
        is_rewritten = before != [len(graph.fx_graph.nodes) for graph in graphs]
        for graph in graphs:
            graph.module.meta[_IS_REWRITTEN] = is_rewritten
            _check_movable(graph.fx_graph)
            _keep_strides(graph.fx_graph)


class _Partitioner(CustomPartitionerFn):
    """Inductor's own partitioner."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return min_cut_rematerialization_partition(gm, joint_inputs, **given)

    def __deepcopy__(self, _: object) -> _Partitioner:
        return self  # torch copies its options

    def uuid(self) -> None:
        """Disable caching: another budget makes other graphs of the same model."""


def _check_movable(graph: fx.Graph) -> None:
    """Raise CaptureError for sources with hidden bytes: Inductor allocates no more than a tensor's elements."""
    for node in graph.nodes:
        if node.target not in (ops.swap_out_start, ops.view_bytes):
            continue
        source = node.args[0]
        if source.target not in (ops.swap_in_wait, ops.view_bytes) and not is_whole(source):
            raise CaptureError(
                f"'{source.name}' does not fill its storage, and Inductor may change its layout: lmswap cannot swap it "
                'or take views of it there; use compiler="fx"'
            )


def _keep_strides(graph: fx.Graph) -> None:
    """Store the strides of what is moved for `_lay_as_traced`: later passes may replace the sources."""
    for node in graph.nodes:
        if node.target in _READ_BYTES:
            node.meta[_STRIDES] = {
                position: given.meta["val"].stride()
                for position, given in enumerate(node.args)
                if isinstance(given, fx.Node)
            }


def _lay_as_traced(node: fx.Node, *arguments: Any, **others: Any) -> tuple[Any, Any]:
    """Realize what is moved in memory with its traced strides when it is lowered: its bytes are copied as they are.

    All later readers get the same memory; a ``swap_out_wait`` with a copy of its own would not keep the source alive.
    """
    laid = list(arguments)
    for position, strides in node.meta[_STRIDES].items():
        laid[position].realize()
        laid[position] = ir.ExternKernel.require_exact_strides(laid[position], strides)
        V.graph.env[node.args[position]] = laid[position]
    return tuple(laid), others


for _op in _READ_BYTES:
    make_fallback(_op, layout_constraint=_lay_as_traced)  # type: ignore[no-untyped-call]
