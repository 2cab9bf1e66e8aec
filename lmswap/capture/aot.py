"""Passes the graphs that AOTAutograd makes of a captured region to a handler, which edits and compiles them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import fx, nn

from lmswap.capture.aot_stages import Compiled, MakeVariant, Variant, trace_once, variant
from lmswap.capture.numerics.accumulation_order import VIEWS, AccumulationWatch, reorders_view_gradients
from lmswap.capture.numerics.correct_metadata import retrace
from lmswap.capture.numerics.double_backward import detect_double_backward
from lmswap.capture.numerics.gradient_gate import dispatch_gradients
from lmswap.capture.numerics.gradient_order import GradientOrder
from lmswap.capture.numerics.no_decompositions import no_python_kernels
from lmswap.capture.numerics.random_ops import functionalize_random_ops, insert_rng_reads, mark_random_saved
from lmswap.capture.numerics.tangents import TangentAdapter, refresh_tangent_strides, restore_layout_ops
from lmswap.capture.output_names import input_names
from lmswap.errors import CaptureError
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, without_backward
from lmswap.runtime.own_time import OwnTime
from lmswap.runtime.partial_backward import (
    Backward,
    PartialResults,
    Results,
    collect,
    results_by_part,
    single_part,
)
from lmswap.runtime.storage import parts
from lmswap.torch_compat import aot_autograd
from lmswap.torch_compat.autograd import (
    disable_autocast,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from lmswap.torch_compat.changing_floats import no_float_tensors
from lmswap.torch_compat.dynamo import is_compiled_autograd_enabled
from lmswap.torch_compat.sized_graphs import clone_meta, fix_sizes
from lmswap.torch_compat.symbolic_sizes import Sizes, is_symbolic
from lmswap.torch_compat.tensors import storage_id


class GraphHandler(Protocol):
    """What is done with the graphs of one compiled region, in this order."""

    own: OwnTime = OwnTime()  # one for all handlers that have none of their own, as in tests

    def output_metadata(self, node: fx.Node) -> Sequence[torch.Tensor] | None:
        """Return the tensors that an op really makes; see `lmswap.capture.numerics.correct_metadata`."""

    def note(self, text: str) -> None:
        """Report a sentence on how the graphs run."""

    def parameter_names(self) -> Mapping[int, str]:
        """Return the names of the model's parameters and swappable buffers, by `id`; empty for an unknown model."""
        return {}

    def differentiated_twice(self) -> str:
        """Return the error for differentiating the region's gradients once more."""
        return "gradients of a captured graph cannot be differentiated once more"

    def edit(self, graphs: Sequence[SegmentGraph], parameters: Mapping[int, str]) -> None:
        """Edit the graphs of the region in place; inputs and outputs of the two must continue to match.

        Args:
            graphs: forward and backward of a training step, or one without a backward; not lowered yet.
            parameters: names of inputs of the first that are parameters of the model, by position.
        """

    def compiled(self, module: fx.GraphModule, phase: str) -> BoxedFunction:
        """Compile a graph."""

    def compiled_backward(self, module: fx.GraphModule) -> Backward:
        """Compile a backward graph; it may yield gradients part by part."""
        return single_part(self.compiled(module, "backward"))

    def running(self, phase: str) -> AbstractContextManager[Any]:
        """Return the context in which a graph runs that another compiler compiled."""
        return nullcontext()

    def register_backward(self, parts: Generator[Results, None, None]) -> PartialResults:
        """Return what yields the results of a backward that another compiler compiled, and runs in parts."""
        return parts


def compile_region(
    module: fx.GraphModule, inputs: Sequence[Any], handler: GraphHandler, given: Sequence[Any] | None = None
) -> Compiled:
    """Run AOTAutograd over one region that Dynamo captured; ``handler`` gets its graphs.

    Args:
        module: Dynamo's graph; it is consumed.
        inputs: real or fake tensors, and symbolic sizes, in the order of its placeholders.
        handler: see `GraphHandler`.
        given: the real tensors where ``inputs`` are fake.

    Returns:
        The callable that replaces the region.

    Raises:
        CaptureError: something is enabled that would change the graphs after they are planned.
    """
    make_variant = variants_of(module, inputs if given is None else given, handler, _GraphVariant)
    shared = _shared_by_sizes(inputs, given or ())

    def first_variant(graph: fx.GraphModule) -> Any:
        if not shared.isdisjoint(aot_autograd.written_inputs()):
            raise CaptureError("inputs whose sizes vary share memory, which the region writes")
        return variant(graph)

    compiler = aot_autograd.aot_autograd(
        fw_compiler=lambda graph, _: first_variant(graph).forward(graph),
        bw_compiler=lambda graph, _: variant(graph).backward(graph),
        inference_compiler=lambda graph, _: first_variant(graph).inference(graph),
        partition_fn=partial(_partition, handler=handler),
    )
    with no_python_kernels(), no_float_tensors(), aot_autograd.backward_without_autocast():
        return trace_once(
            lambda: compiler(module, inputs),
            make_variant,
            handler,
            around=lambda _: no_float_tensors(),
        )


def _shared_by_sizes(inputs: Sequence[Any], given: Sequence[Any]) -> set[int]:
    """Return the positions of inputs that share memory as ``given``, and do not as fakes with symbolic sizes."""
    if not any(map(is_symbolic, inputs)):
        return set()
    tensors = [(position, one) for position, one in enumerate(given) if isinstance(one, torch.Tensor)]
    counts = Counter(storage_id(one.untyped_storage()) for _, one in tensors)
    return {position for position, one in tensors if counts[storage_id(one.untyped_storage())] > 1}


def _partition(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    handler: GraphHandler,
    sizes: Sizes | None = None,
    num_fwd_outputs: int,
    **others: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a region, the same for every plan of ``sizes``."""
    fix_sizes(joint.graph, sizes)
    if reorders_view_gradients(joint.graph, num_fwd_outputs):
        handler.note(VIEWS)
    restore_layout_ops(joint.graph)
    retrace(joint.graph, _copy_mutated_inputs(joint.graph), handler.output_metadata)
    retrace(joint.graph, refresh_tangent_strides(joint.graph), handler.output_metadata)
    functionalize_random_ops(joint.graph)
    mark_random_saved(joint.graph)
    forward, backward = aot_autograd.partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
    insert_rng_reads(forward.graph)
    return forward, backward


class RegionVariant(Variant):
    """A region as compiled for one plan of ``handler``; its backward yields gradients in the order of eager mode."""

    def __init__(
        self,
        handler: GraphHandler,
        gradient_order: GradientOrder,
        own_parameters: Callable[[fx.Graph], Mapping[int, str]],
        sizes: Sizes | None,
    ) -> None:
        """``sizes``: for which the graphs are lowered, if not for those of the trace."""
        self.handler, self.gradient_order, self.sizes = handler, gradient_order, sizes
        self._own_parameters, self._has_backward = own_parameters, False

    def edit(self, graphs: Sequence[SegmentGraph]) -> None:
        """See `Variant`."""
        self.handler.edit(graphs, self._own_parameters(graphs[0].fx_graph))
        for backward in graphs[1:]:
            self.gradient_order.set_parts(results_by_part(backward.fx_graph))
            self._has_backward = True

    def prepare_forward(self) -> None:
        """Prepare for compiling the forward graph of a region with a backward."""
        aot_autograd.allow_retain_graph()
        if aot_autograd.overwrites_differentiable_inputs():
            self.gradient_order.disable_parts()

    def run(self, compiled: BoxedFunction, arguments: Sequence[Any]) -> Any:
        """See `Variant`."""
        own = self.handler.own
        given = [*self.gradient_order.reorder_inputs(arguments)]
        own.seconds += perf_counter()
        outputs = compiled(given)
        own.seconds -= perf_counter()
        if self._has_backward:
            detect_double_backward(outputs, self.handler.differentiated_twice, self.note_arriving)
        return outputs

    def note_arriving(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients the backward that is about to run gets."""


def variants_of(
    module: fx.GraphModule, given: Sequence[Any], handler: GraphHandler, kind: type[RegionVariant]
) -> MakeVariant:
    """Return what makes variants of the region of ``module``, Dynamo's graph, which is prepared for its trace.

    Raises:
        CaptureError: something is enabled that would change the graphs after they are planned.
    """
    refuse_graph_rewriters()
    own_parameters = _parameters_of(module, given, handler.parameter_names())
    gradient_order = GradientOrder()
    gradient_order.instrument(module)
    return lambda handler, sizes: kind(handler, copy.copy(gradient_order), own_parameters, sizes)


class _GraphVariant(RegionVariant):
    """A region whose ops run one by one."""

    _tangents: TangentAdapter | None = None  # of the region's backward, if it has one

    def edit(self, graphs: Sequence[SegmentGraph]) -> None:
        """See `Variant`."""
        super().edit(graphs)
        for backward in graphs[1:]:
            self._tangents = TangentAdapter(backward.module, self.handler.output_metadata, self.handler.note)

    def note_arriving(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `RegionVariant`."""
        assert self._tangents is not None
        self._tangents.note_arriving(gradients)

    def forward(self, graph: fx.GraphModule) -> BoxedFunction:
        """Compile the forward graph; likewise the next two."""
        self.prepare_forward()
        aot_autograd.accept_tangent_layouts()
        return boxed(_keep_output_strides(self.handler.compiled(graph, "forward")))

    def backward(self, graph: fx.GraphModule) -> BoxedFunction:
        backward, tangents = self.handler.compiled_backward(graph), self._tangents
        assert tangents is not None
        num_results = len(graph.graph.find_nodes(op="output")[0].args[0])
        tensors, own = self.gradient_order.tensors, self.handler.own
        sums = AccumulationWatch(graph.graph, tensors, self.handler.note)
        has_parts = len(results_by_part(graph.graph)) > 1  # some gradients are ready before the others

        def run(arguments: list[Any]) -> Sequence[Any]:
            own.seconds -= perf_counter()
            partial_results = sums.watch(tangents.run(backward, arguments))
            own.seconds += perf_counter()
            if not has_parts:
                return collect(partial_results)
            return dispatch_gradients(partial_results, num_results, tensors)

        return boxed(run)

    def inference(self, graph: fx.GraphModule) -> BoxedFunction:
        fix_sizes(graph.graph, self.sizes)
        retrace(graph.graph, (), self.handler.output_metadata)
        functionalize_random_ops(graph.graph)
        self.edit((without_backward(graph),))
        return boxed(self.handler.compiled(graph, "inference"))


def _parameters_of(
    region: fx.GraphModule, inputs: Sequence[Any], known: Mapping[int, str]
) -> Callable[[fx.Graph], dict[int, str]]:
    """Return a function from a graph made of Dynamo's graph ``region`` to its parameters' names, by position.

    Tensors ``known`` by `id` have their names in the model, buffers among them; Dynamo's are those in the frame that it
    captured.
    """
    given = zip(region.graph.find_nodes(op="placeholder"), input_names(region.graph), inputs, strict=True)
    own = {
        aot_autograd.input_descriptor(position, path): known.get(id(part), name)
        for position, (node, name, tensor) in enumerate(given)
        for path, part in (parts(tensor) if isinstance(tensor, torch.Tensor) else ())
        if (isinstance(node.meta.get("example_value"), nn.Parameter) and not path) or id(part) in known
    }

    def names(graph: fx.Graph) -> dict[int, str]:
        inputs = enumerate(node.meta.get("desc") for node in graph.find_nodes(op="placeholder"))
        return {position: own[which] for position, which in inputs if which in own}

    return names


def _copy_mutated_inputs(joint: fx.Graph) -> set[fx.Node]:
    """Insert copies, as outputs, of the inputs that torch overwrites between forward and backward; return the copies.

    So ops that read running statistics can be recomputed in the backward; only the copies themselves cannot.
    """
    (output,) = joint.find_nodes(op="output")
    first = next(node for node in joint.nodes if node.op != "placeholder")
    copies = set()
    for node in aot_autograd.overwritten_inputs(joint):
        with joint.inserting_before(first):
            copy = joint.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta.update(clone_meta(node), is_repeatable=False)
        kept = (copy, output)
        for user in [user for user in node.users if user not in kept]:
            user.replace_input_with(node, copy)
        copies.add(copy)
    return copies


def boxed(function: BoxedFunction) -> BoxedFunction:
    """Mark ``function`` as one that takes a list and empties it; AOTAutograd then keeps no second reference.

    Its ops run as traced, without autocast: torch disables autocast only for a backward whose forward ran under it.
    """

    def run(arguments: list[Any]) -> Any:
        with disable_autocast():
            return function(arguments)

    return aot_autograd.boxed(run)


def _keep_output_strides(forward: BoxedFunction) -> BoxedFunction:
    """Return views of intermediates as outputs of their own, with the strides that they have in eager mode.

    With other strides a convolution after the region takes a channels-last image for a contiguous one, and rounds
    differently.
    """
    positions = aot_autograd.take_view_outputs()
    if not positions:
        return forward

    def run(arguments: list[Any]) -> list[Any]:
        outputs = [*forward(arguments)]
        for position in positions:
            view = outputs[position]
            own = torch.ops.aten._unsafe_view(view, view.shape)
            outputs[position] = own.as_strided_(view.shape, view.stride(), view.storage_offset())
        return outputs

    return run


def refuse_graph_rewriters() -> None:
    """Raise CaptureError if something is enabled that would change graphs after they are planned."""
    if is_compiled_autograd_enabled():
        raise CaptureError(
            "compiled autograd is on: it moves backward graphs elsewhere after they are planned; "
            "set torch._dynamo.config.compiled_autograd = False"
        )
    if top_saved_tensor_hooks() is not None:
        raise CaptureError(
            "saved-tensor hooks surround the model's call (torch.autograd.graph.saved_tensors_hooks or save_on_cpu, or "
            "torch.utils.checkpoint around it): they would move the same tensors; leave that context, lmswap "
            "replaces it"
        )


class without_hooks:  # noqa: N801 - a context
    """Removes the innermost saved-tensor hooks within: the plan covers what a compiled graph saves."""

    def __enter__(self) -> None:
        self._hooks = top_saved_tensor_hooks()
        if self._hooks is not None:
            pop_saved_tensor_hooks()

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            push_saved_tensor_hooks(*self._hooks)
