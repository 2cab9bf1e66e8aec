"""Captures the step of a model that is never allocated: no op runs, and no tensor has bytes.

The model is made, and called once, with torch's fake tensors. What torch compiles of it is lowered as for a model that
trains; instead of its graphs, results without bytes are returned, so that the code around them goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from lmswap.capture.aot import GraphHandler, compile_region, without_hooks
from lmswap.capture.caller_memory import assumed_bytes
from lmswap.capture.lower import lower
from lmswap.capture.merge_programs import merge
from lmswap.capture.numerics.checkpoint_regions import refuse_effects
from lmswap.capture.recompiles import CompiledCall, TraceFailed
from lmswap.capture.unsupported import refuse_numpy, refuse_streams
from lmswap.errors import CaptureError, LmswapError, OptionError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.program import LOSS, Program
from lmswap.progress import reported
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph
from lmswap.torch_compat.dynamo import describe_graph_break, describe_untraceable, graph_break_reasons, untraceable_code
from lmswap.torch_compat.modules import all_own_tensors, eager_call
from lmswap.torch_compat.pytree import tree_map_only
from lmswap.torch_compat.tensors import storage_id
from lmswap.torch_compat.tracing import FakeTensorMode, clear_fake_cache, convertible_modules, operator_of
from lmswap.user_frame import is_users

# What code outside of the graphs saves for the backward is not part of the program, where larger tensors would be
# missed.
_MAX_UNCAPTURED_BYTES = 2**20


def capture_step(
    make_model: Callable[[], nn.Module],
    inputs: Sequence[Any] | Callable[[nn.Module], Sequence[Any]],
    device: torch.device,
    *,
    forward_only: bool = False,
) -> Program:
    """Capture one step, as `lmswap.dry_run` describes it.

    Args:
        make_model: called with fake tensors.
        inputs: the model's positional arguments, or a function that makes them for the model.
        device: on which the model is made; its operators are traced.
        forward_only: in eval mode and without gradients.

    Raises:
        OptionError: the function returns no module, or torch cannot use the device.
        CaptureError: the code of the model needs values, or cannot be captured.
    """

    def without_bytes(given: Tensor) -> Tensor:
        return torch.empty_strided(
            given.shape, given.stride(), dtype=given.dtype, device=device, requires_grad=given.requires_grad
        )

    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "a GPU's operators can be traced only where torch can use a GPU, of any size: autograd selects a stream on "
            "it also for tensors without memory. Trace those of the CPU: device='cpu'"
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(not forward_only):
        with (
            _errors_named("the model cannot be made without its memory"),
            convertible_modules(mode),
            torch.device(device),
        ):
            model = make_model()
        if not isinstance(model, nn.Module):
            raise OptionError(f"what makes the model must return a torch.nn.Module, not {type(model).__name__}")
        if forward_only:
            model.eval()
        arguments = tree_map_only(Tensor, without_bytes, tuple(inputs(model) if callable(inputs) else inputs))
        name = type(model).__name__
        with reported(f"{name}, without its memory", "tracing"):
            programs = _capture(name, model, arguments)
        if not forward_only and not any(program.gradients for program in programs):
            raise CaptureError(
                f"{name} has no backward: no parameter that its outputs depend on requires a gradient. Plan it with "
                "forward_only=True or --forward-only"
            )
        clear_fake_cache()
        return _with_fixed_memory(merge(programs).program, programs, model)


def _capture(name: str, model: nn.Module, arguments: Sequence[Any]) -> list[Program]:
    recorder, outside, num_breaks = _Recorder(name), _Outside(model), len(graph_break_reasons)
    untraceable = untraceable_code()
    call = CompiledCall(model, recorder, takes_floats=True, at_limit=lambda: None)
    with _errors_named(f"{name} cannot be captured without its memory"), saved_tensors_hooks(outside.save, _identity):
        try:
            call(*arguments)
        except TraceFailed as error:
            eager_call(model)(*arguments)  # raises the error of torch at the user's line
            raise CaptureError(str(error)) from None
    breaks = "; ".join(dict.fromkeys(map(describe_graph_break, graph_break_reasons[num_breaks:])))
    if not recorder.programs:
        why = breaks or "; ".join(describe_untraceable(untraceable)) or "TORCH_LOGS=graph_breaks shows why"
        raise CaptureError(f"torch.compile captured nothing of {name}: {why}")
    if outside.nbytes > _MAX_UNCAPTURED_BYTES:
        raise CaptureError(
            f"code of {name} outside of captured graphs saves {format_bytes(outside.nbytes)} for the backward, which a "
            f"dry run cannot describe: {breaks}"
        )
    return recorder.programs


def _with_fixed_memory(program: Program, graphs: Sequence[Program], model: nn.Module) -> Program:
    """Return ``program`` with the memory assumed for its losses, and that of the model."""
    scratch_bytes = [
        assumed_bytes(graphs[program.segment_of(op.index).graph]) if op.target == LOSS else 0 for op in program.ops
    ]
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model_bytes = parameter_bytes + sum(buffer.nbytes for buffer in model.buffers())
    fixed = FixedMemory(before_bytes=model_bytes, parameter_bytes=parameter_bytes)
    return replace(program, fixed=fixed, scratch_bytes=tuple(scratch_bytes))


class _Recorder(GraphHandler):
    """Dynamo's backend, and the handler of its graphs: lowers them and leaves them as they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.programs: list[Program] = []  # of the graphs, in the order of their forwards

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one graph; return what runs instead of it."""
        with without_hooks():
            refuse_streams(module)
            refuse_effects(module)
            refuse_numpy(module)
            compiled = compile_region(module, inputs, self)

        def run(*arguments: Any) -> Any:
            with without_hooks():
                return compiled(*arguments)

        return run

    def output_metadata(self, node: fx.Node) -> None:
        """See `GraphHandler`: nothing runs, tensors are as torch traces them."""

    def note(self, text: str) -> None:
        """See `GraphHandler`: notes are on how graphs run."""

    def edit(self, graphs: Sequence[SegmentGraph], parameters: Mapping[int, str]) -> None:
        """See `GraphHandler`."""
        self.programs.append(lower(graphs, parameters=parameters, name=self._name).program)

    def compiled(self, module: fx.GraphModule, phase: str) -> BoxedFunction:
        """See `GraphHandler`: return a function that makes the graph's results without bytes."""
        (output,) = module.graph.find_nodes(op="output")
        results = fx.map_arg(output.args[0], lambda node: node.meta["val"])

        def without_bytes(made: Tensor) -> Tensor:
            return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device)

        def run(arguments: list[Any]) -> Any:
            arguments.clear()
            return tree_map_only(Tensor, without_bytes, list(results))

        return run


class _Outside:
    """Counts what code outside of graphs saves for the backward; the model's own tensors exist anyway."""

    def __init__(self, model: nn.Module) -> None:
        self.nbytes = 0
        self._known = {storage_id(own.untyped_storage()) for own in all_own_tensors(model) if own is not None}

    def save(self, tensor: Tensor) -> Tensor:
        """Count ``tensor``'s storage, once."""
        storage = tensor.untyped_storage()
        if storage_id(storage) not in self._known:
            self._known.add(storage_id(storage))
            self.nbytes += storage.nbytes()
        return tensor


def _identity(saved: Tensor) -> Tensor:
    return saved


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Raise errors of the user's code as CaptureError, with the operator and the user's line."""
    try:
        yield
    except LmswapError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} {frames[-1].line})" if frames else ""
        operator = operator_of(error)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        why = f"operator {operator} needs values, or has results of unknown shapes" if operator else reason
        raise CaptureError(f"{what}: {why}{where}") from error
