"""Lowers fx graphs to a Program: the ops of a step, and the storages that each reads and writes.

Aliases come from the storages of the graph's fake tensors, never from lists of operator names: two values share a
buffer exactly when their fakes share a storage. Forward and backward graphs of one partition share fakes, so a value
saved for backward is the same buffer in both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lmswap.capture.numerics.random_ops import is_random
from lmswap.errors import CaptureError
from lmswap.ir.program import LOSS, Buffer, BufferKind, Op, Program, Segment, Value
from lmswap.runtime.codegen import SegmentGraph, gather_projections, is_projection, value_of
from lmswap.runtime.rng import state_of
from lmswap.torch_compat.aot_autograd import gradients as gradient_outputs
from lmswap.torch_compat.aot_autograd import overwritten_inputs, tangents
from lmswap.torch_compat.operators import OpOverload, schema_of
from lmswap.torch_compat.pytree import tensors, tree_leaves
from lmswap.torch_compat.sized_graphs import symbolic_value
from lmswap.torch_compat.symbolic_sizes import is_size
from lmswap.torch_compat.tensors import storage_id
from lmswap.user_frame import is_users

_TRUSTED = {"aten", "prims", "torchvision", "lmswap"}  # namespaces of operators whose schemas their own projects test


@dataclass
class Lowered:
    """A Program and the fx graphs that it describes, one per segment, in the same order."""

    program: Program
    graphs: tuple[SegmentGraph, ...]
    written: Collection[str]  # names of the parameters and buffers that no plan may place: see `lower`
    symbolic_bytes: Mapping[int, torch.SymInt]  # of buffers whose size is no constant


def lower(
    graphs: Sequence[SegmentGraph],
    *,
    parameters: Mapping[int, str],
    name: str,
    weights: Collection[str] = (),
    trained: Collection[str] = (),
    is_deterministic: Callable[[fx.Node], bool] = lambda _: True,
) -> Lowered:
    """Lower the graphs of a region: forward and backward of one partition, or one graph without a backward.

    Args:
        graphs: edited in place: selections are moved to their ops.
        parameters: names of inputs of the first graph that are the model's own, by position.
        name: of the program.
        weights: names of parameters that the plan may place, unless the graphs write or differentiate them.
        trained: names of those that it may place although the graphs differentiate them.
        is_deterministic: whether an op's results are bitwise identical in each execution.

    Raises:
        CaptureError: a graph has a node that cannot be lowered.
    """
    # New ones, as the same are lowered again where a plan places weights, too.
    graphs = tuple(SegmentGraph(graph.module, graph.phase, graph.num_user_outputs) for graph in graphs)
    lowering = _Lowering(is_deterministic)
    for graph in graphs:
        gather_projections(graph.module.graph)
        lowering.add_graph(graph)
    kinds = _buffer_kinds(graphs, parameters, lowering)
    for buffer, kind in kinds.items():
        if kind is BufferKind.TANGENT:
            lowering.names[buffer] = "gradient of an output"
    inputs = graphs[0].module.graph.find_nodes(op="placeholder")
    for position, parameter in parameters.items():
        lowering.names[graphs[0].buffer_of[inputs[position]]] = parameter
    gradients = _gradients(graphs, parameters)
    own = {graphs[0].buffer_of[inputs[position]]: given for position, given in parameters.items()}
    overwritten = {graphs[0].buffer_of[node] for node in overwritten_inputs(graphs[0].module.graph)}
    written = overwritten.union(*(op.writes for op in lowering.ops))
    written |= {parameter for parameter, _ in gradients if own.get(parameter) not in trained}
    for buffer, given in own.items():
        if given in weights and buffer not in written:
            kinds[buffer] = BufferKind.WEIGHT
    segments, start = [], 0
    for graph in graphs:
        segments.append(Segment(0, graph.phase, start, start + len(graph.ops)))
        start += len(graph.ops)
    program = Program(
        name=name,
        ops=tuple(lowering.ops),
        buffers=tuple(Buffer(i, nbytes, kinds[i], lowering.names[i]) for i, nbytes in enumerate(lowering.nbytes)),
        values=tuple(lowering.values),
        segments=tuple(segments),
        gradients=gradients,
    )
    names = frozenset(given for buffer, given in own.items() if buffer in written)
    return Lowered(program, graphs, names, lowering.symbolic_bytes)


def source_line(node: fx.Node) -> str:
    """Return the innermost line of user code that made ``node``: "unet.py:88 y = self.conv(x)", or ""."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    frames = [frame for frame in frames if is_users(frame[0])]  # one may be that of `torch.device` as a context
    if not frames:
        return ""
    path, line, text = frames[-1]
    return sys.intern(f"{path.rsplit('/', 1)[-1]}:{line} {text.strip()}")  # many ops have one line, in each trace


def is_extension_op(node: fx.Node) -> bool:
    """Return whether ``node`` calls an operator registered by an extension, whose schema may be wrong."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in _TRUSTED


def module_path(node: fx.Node) -> str:
    """Return the innermost module whose forward made ``node`` or the node's forward: "encoder.0.conv", or ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    # "L['self'].encoder.0.conv", or "L['fn'].__self__.encoder.0.conv" of a bound method: the frame's names come first.
    return sys.intern(re.sub(r"^[LG]\['\w+'\](\.__self__)?\.?", "", path))


def result_name(node: fx.Node, phase: str) -> str:
    """Return the name of ``node``'s result for reports: "encoder.0.conv: convolution", or "add (unet.py:90)"."""
    packet = getattr(node.target, "overloadpacket", None)
    operator = str(packet or node.target).removeprefix("aten.")
    module, where = module_path(node), source_line(node).partition(" ")[0]
    is_backward = phase == "backward" and not operator.endswith("_backward")
    aside = ", ".join([where] * bool(where and not module) + ["backward"] * is_backward)
    return sys.intern(f"{module}: " * bool(module) + operator + f" ({aside})" * bool(aside))


class _Lowering:
    """Numbers buffers, values and ops in the order of their appearance in the graphs."""

    def __init__(self, is_deterministic: Callable[[fx.Node], bool]) -> None:
        self._is_deterministic = is_deterministic
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.nbytes: list[int] = []
        self.names: list[str] = []  # of buffers
        self.symbolic_bytes: dict[int, torch.SymInt] = {}
        self._storages: dict[int, int] = {}  # the fakes live in node.meta while this runs, so addresses are unique
        self._named: set[tuple[str, int]] = set()
        self._devices: list[str] = []  # their types, by buffer

    def add_graph(self, graph: SegmentGraph) -> None:
        for node in graph.module.graph.nodes:
            if is_size(node.meta.get("val")):
                continue  # a size, which is no op's result in the graphs of fixed sizes
            if node.op in ("placeholder", "get_attr") or is_projection(node):
                self._add_value(graph, node)
            elif node.op == "call_function":
                self._add_op(graph, node)
            elif node.op == "output":
                self._add_loss(graph, node)
            else:
                raise CaptureError(f"graph holds a node of kind '{node.op}' ({node.name}), which lmswap cannot lower")
            self._note_symbolic_bytes(node)

    def _note_symbolic_bytes(self, node: fx.Node) -> None:
        for fixed, symbolic in zip(tensors(node.meta.get("val")), tensors(symbolic_value(node)), strict=True):
            nbytes: int | torch.SymInt = symbolic.untyped_storage().nbytes()
            if isinstance(nbytes, torch.SymInt):
                self.symbolic_bytes.setdefault(self.buffer(fixed)[0], nbytes)

    def buffer(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Return the buffer of a fake tensor, and whether it is new."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage_id(storage))
        if known is not None:
            return known, False
        self._storages[storage_id(storage)] = len(self.nbytes)
        self.nbytes.append(storage.nbytes())
        self.names.append("")
        self._devices.append(tensor.device.type)
        return len(self.nbytes) - 1, True

    def off_device_buffers(self) -> list[int]:
        """Return the buffers on the CPU if others are on a GPU: masks, positions, RNG states."""
        if set(self._devices) <= {"cpu"}:
            return []
        return [buffer for buffer, device in enumerate(self._devices) if device == "cpu"]

    def _add_op(self, graph: SegmentGraph, node: fx.Node) -> None:
        reads = list(dict.fromkeys(self.buffer(t)[0] for t in tensors(_argument_values(node))))
        mutated = list(dict.fromkeys(self.buffer(t)[0] for t in tensors(_mutated_values(node))))
        given = {storage_id(tensor.untyped_storage()) for tensor in tensors(_argument_values(node))}
        made = []
        for tensor in tensors(node.meta.get("val")):
            storage = storage_id(tensor.untyped_storage())
            if storage not in given:
                given.add(storage)
                self._storages.pop(storage, None)  # torch's checkpointing repeats nodes with the same fake
            buffer, is_new = self.buffer(tensor)
            if is_new:
                made.append(buffer)
                self.names[buffer] = result_name(node, graph.phase)
        self._add_value(graph, node)
        index, is_view = len(self.ops), not (made or mutated) and bool(tensors(node.meta.get("val")))
        graph.ops.append(node)
        self.ops.append(
            Op(
                index=index,
                name=node.name,
                target=sys.intern(str(node.target)),
                source=source_line(node),
                reads=tuple(reads),
                writes=tuple(dict.fromkeys([*made, *mutated])),
                flops=_flops(node),
                is_view=is_view,
                is_repeatable=_is_repeatable(node) and (is_view or self._is_deterministic(node)),
                module=module_path(node),
            )
        )

    def _add_loss(self, graph: SegmentGraph, output: fx.Node) -> None:
        """Add the op of the caller's code after the forward, linked to the graph's ``output``."""
        if graph.phase == "forward":
            graph.ops.append(output)
            self.ops.append(Op(len(self.ops), "loss", LOSS, source="", reads=(), writes=(), is_repeatable=False))

    def _add_value(self, graph: SegmentGraph, node: fx.Node) -> None:
        tensor = value_of(node)
        if not isinstance(tensor, torch.Tensor):
            return
        buffer, _ = self.buffer(tensor)
        graph.buffer_of[node] = buffer
        if (node.name, buffer) in self._named:  # saved by the forward, read by the backward: one value
            return
        self._named.add((node.name, buffer))
        self.values.append(
            Value(
                id=len(self.values),
                name=node.name,
                buffer=buffer,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=int(tensor.storage_offset()),
            )
        )


def _buffer_kinds(
    graphs: Sequence[SegmentGraph], parameters: Collection[int], lowering: _Lowering
) -> dict[int, BufferKind]:
    """Return the kind of each buffer; of several, the one with the longest lifetime."""
    kinds = dict.fromkeys(range(len(lowering.nbytes)), BufferKind.ACTIVATION)
    for graph in reversed(graphs):
        is_backward = graph.phase == "backward"
        nodes = list(graph.module.graph.nodes)
        for output in _outputs(graph.module)[: None if is_backward else graph.num_user_outputs]:
            if isinstance(output, fx.Node) and output in graph.buffer_of:
                kinds[graph.buffer_of[output]] = BufferKind.GRADIENT if is_backward else BufferKind.OUTPUT
        placeholders = [node for node in nodes if node.op == "placeholder"]
        incoming = set(tangents(graph.module.graph))
        for position, node in enumerate(placeholders):
            if node not in graph.buffer_of:
                continue
            if not is_backward:
                kinds[graph.buffer_of[node]] = BufferKind.PARAMETER if position in parameters else BufferKind.INPUT
            elif node in incoming:
                kinds[graph.buffer_of[node]] = BufferKind.TANGENT
        for node in nodes:
            if node.op == "get_attr" and node in graph.buffer_of:
                kinds[graph.buffer_of[node]] = BufferKind.PARAMETER
    for buffer in lowering.off_device_buffers():
        kinds[buffer] = BufferKind.INPUT
    return kinds


def _gradients(graphs: Sequence[SegmentGraph], parameters: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Return the buffers of each trained parameter and of its gradient."""
    forward, *others = graphs
    inputs = {
        node.meta.get("desc"): forward.buffer_of[node]
        for position, node in enumerate(forward.module.graph.find_nodes(op="placeholder"))
        if position in parameters
    }
    return tuple(
        (inputs[differentiated], backward.buffer_of[node])
        for backward in others
        for node, differentiated in gradient_outputs(backward.module.graph)
        if differentiated in inputs and node in backward.buffer_of
    )


def _outputs(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _argument_values(node: fx.Node) -> Iterable[Any]:
    state = state_of(node)  # of the RNG: the op's result depends on it
    inputs = node.all_input_nodes if state is None else [*node.all_input_nodes, state]
    values = (argument.meta.get("val") for argument in inputs)
    return [value for value in values if not isinstance(value, (tuple, list))]


def _mutated_values(node: fx.Node) -> list[Any]:
    """Return the values of arguments that the schema declares as written in place, or that may be written."""
    if is_extension_op(node):  # their schemas are not checked here
        return [leaf.meta.get("val") for leaf in node.all_input_nodes]
    schema = schema_of(node.target)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written += [leaf.meta.get("val") for leaf in tree_leaves(given) if isinstance(leaf, fx.Node)]
    return written


def _is_repeatable(node: fx.Node) -> bool:
    # Graphs can pass tensors to each other, but no numbers; sizes are constants of a graph that repeats an op.
    given = (argument.meta.get("val") for argument in node.all_input_nodes)
    reads_tensors = all(isinstance(value, torch.Tensor) or is_size(value) for value in given)
    is_unseeded = is_random(node) and state_of(node) is None
    is_repeatable = bool(node.meta.get("is_repeatable", True)) and not _chooses_by_thread(node)
    return not is_unseeded and reads_tensors and is_repeatable


def _chooses_by_thread(node: fx.Node) -> bool:
    """Return whether recomputation may round differently: cuDNN's benchmark mode selects kernels in each thread.

    Backwards run in a thread of autograd's.
    """
    is_convolution = getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS
    on_gpu = any(made.device.type == "cuda" for made in tensors(node.meta.get("val")))
    return is_convolution and on_gpu and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


# The CPU's attention, missing from torch's table, has the products of the CUDA one.
_SAME_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def _flops(node: fx.Node) -> int:
    packet: Any = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return int(count(*args, **kwargs, out_val=node.meta.get("val")))
