"""Model and shapes → Program of a training step, without memory: no op runs and no tensor has bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lmswap.capture.aot import GraphHandler, compile_region
from lmswap.capture.lower import lower_training
from lmswap.errors import CaptureError
from lmswap.ir.program import Program
from lmswap.runtime.codegen import BoxedFunction, compile_boxed


def capture(
    name: str,
    make_model: Callable[[], nn.Module],
    make_inputs: Callable[[], tuple[Tensor, ...]],
    dtype: torch.dtype = torch.float32,
) -> Program:
    """Captures one training step of a model that is made, and called once, with fake tensors on the CPU.

    The program is the one that lmswap plans when the model trains on a CPU: forward up to the model's outputs,
    backward from their tangents; what comes after the model, such as a loss, is one op of unknown costs.

    Args:
        name: of the program.
        make_model: called with fake tensors on.
        make_inputs: called with fake tensors on.
        dtype: what new tensors of floating point get where neither of the two says more.

    Raises:
        CaptureError: the model has graph breaks, or nothing to train.
    """
    torch.compiler.reset()
    recorder = _Recorder(name)
    with FakeTensorMode(), _default_dtype(dtype):
        model = torch.compile(
            make_model(), backend=lambda module, inputs: compile_region(module, inputs, recorder), dynamic=False
        )
        model(*make_inputs())
    if (recorder.num_graphs, len(recorder.programs)) != (1, 1):
        raise CaptureError(
            f"'{name}' has {recorder.num_graphs} graphs, {len(recorder.programs)} of them with a backward; "
            "one that trains is needed"
        )
    return recorder.programs[0]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Recorder(GraphHandler):
    """A graph handler that lowers what it sees and leaves the graphs as they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.programs: list[Program] = []
        self.num_graphs = 0

    def output_metadata(self, node: fx.Node) -> None:
        """Nothing runs here: tensors are as torch traces them."""

    def note(self, text: str) -> None:
        """Programs are recorded, not run."""

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int, parameters: Collection[int]
    ) -> None:
        lowered = lower_training(
            forward, backward, num_user_outputs=num_user_outputs, parameters=parameters, name=self._name
        )
        self.programs.append(lowered.program)
        self.num_graphs += 1

    def inference(self, graph: fx.GraphModule, parameters: Collection[int]) -> None:
        self.num_graphs += 1

    def compiled(self, module: fx.GraphModule, phase: str) -> BoxedFunction:
        return compile_boxed(module)
