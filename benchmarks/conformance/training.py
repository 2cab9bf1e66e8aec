"""A few training steps of a trial → bits, layouts, memory and time."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import lmswap.api
from benchmarks.conformance.memory import TensorMemory
from benchmarks.conformance.trial import Call, Trial
from lmswap.reporting import Report
from lmswap.torch_compat.pytree import tensors

STEPS = 3  # the first captures or records
_LEARNING_RATE = 1e-4

# By name of a result: a digest of its bytes, or how these lie in memory.
Bits = dict[str, str]


class NothingTrains(Exception):
    """No result of the model has a gradient."""


@dataclass(frozen=True)
class Way:
    """How a trial is trained: by lmswap with a policy and a compiler, by a backend of torch.compile, or plainly."""

    policy: str | None = None
    budget: int | str = "auto"
    compiler: str = "fx"
    backend: str | None = None


PLAIN = Way()
TRACED = Way(backend="aot_eager")  # what torch's own tracing makes of the step, run op by op as plain torch is


@dataclass(frozen=True)
class Training:
    """The bits of all steps; of all steps but the first, the most that tensors took on top, and the fastest's time.

    ``kept`` has the results of the step that was to be kept.
    """

    way: Way
    bits: tuple[Bits, ...]
    layouts: tuple[Bits, ...]
    activation_bytes: int
    step_seconds: float
    path: str
    report: Report | None
    kept: dict[str, Tensor]

    @property
    def has_moved(self) -> bool:
        """Whether the last step swapped or recomputed any bytes."""
        report = self.report
        return report is not None and bool(report.swapped_out_bytes or report.recomputed_bytes)


def train(trial: Trial, way: Way, memory: TensorMemory, kept_step: int | None = None) -> Training:
    """Trains the trial's model from its random state on; results of the ``kept_step``, counted from 0, are kept.

    Raises:
        NothingTrains: no output of the model depends on anything that has a gradient.
    """
    torch.manual_seed(0)
    model, call = trial.make_model(), trial.make_call()
    if any(is_lazy(parameter) for parameter in model.parameters()):
        model(*call[0], **call[1])  # gives them their shapes
    model.train(trial.is_training)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE)
    kept: dict[str, Tensor] = {}
    activation_bytes, seconds, found = 0, [], []
    torch.manual_seed(1)
    with _applied(way, model) as run:
        for step in range(STEPS):
            held_bytes = memory.used_tensor_bytes()
            memory.reset_tensor_peak()
            started = time.perf_counter()
            output = run(*call[0], **call[1])
            loss = _loss(output, weighted=step < STEPS - 1)
            loss.backward()
            seconds.append(time.perf_counter() - started)
            if step > 0:
                activation_bytes = max(activation_bytes, memory.peak_tensor_bytes() - held_bytes)
            results = _results(model, call, output, loss)
            if step == kept_step:
                kept = {name: result.clone() for name, result in results.items()}
            found.append(({n: _digest(r) for n, r in results.items()}, {n: _layout(r) for n, r in results.items()}))
            del output, loss, results
            _drop_infinite_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            for leaf in tensors(call):
                leaf.grad = None
        path, report = _path(model), lmswap.report(model) if way.policy else None
    bits, layouts = zip(*found, strict=True)
    return Training(way, bits, layouts, activation_bytes, min(seconds[1:]), path, report, kept)


@contextmanager
def _applied(way: Way, model: nn.Module) -> Iterator[Callable[..., Any]]:
    if way.policy is not None:
        lmswap.enable(model, way.budget, policy=way.policy, compiler=way.compiler, min_swap_bytes=1)
    try:
        yield torch.compile(model, backend=way.backend, dynamic=False) if way.backend else model
    finally:
        lmswap.disable(model)
        torch.compiler.reset()
        gc.collect()  # captured graphs refer to themselves, and hold constants


def _drop_infinite_gradients(model: nn.Module) -> None:
    """Drops gradients that are not finite, which would leave later steps without numbers to compare."""
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            parameter.grad = None


def _loss(output: Any, *, weighted: bool) -> Tensor:
    """A scalar that depends on every number that the model gives, and takes next to no memory of its own.

    The gradients of a plain sum are one number under strides of 0, for which kernels have other code.
    """
    given = [real_numbers(leaf) for leaf in tensors(output) if leaf.requires_grad]
    if not given:
        raise NothingTrains
    sums = (torch.dot(leaf.reshape(-1), _weights(leaf)) if weighted else leaf.sum() for leaf in given)
    return torch.stack([each.double() for each in sums]).sum()


def real_numbers(result: Tensor) -> Tensor:
    """The numbers of a result, whatever its layout; two for each complex one."""
    dense = result if result.layout is torch.strided else result.to_dense()
    if dense._is_zerotensor():
        return torch.zeros_like(dense)
    return torch.view_asreal_numbers(dense.resolve_conj()) if dense.is_complex() else dense


def _weights(result: Tensor) -> Tensor:
    # Cheap, the same in every run, of mean square 1/numel, and not symmetric.
    count = result.numel()
    return torch.linspace(-1.0, 2.0, count, dtype=result.dtype).div_(max(count, 1) ** 0.5)


def _results(model: nn.Module, call: Call, output: Any, loss: Tensor) -> dict[str, Tensor]:
    results = {"the loss": loss, "the generator's state": torch.get_rng_state()}
    results |= {f"output {number}": leaf for number, leaf in enumerate(tensors(output))}
    results |= {f"the gradient of input {number}": leaf.grad for number, leaf in enumerate(tensors(call))}
    results |= {f"the gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    results |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {name: result.detach() for name, result in results.items() if result is not None}


def _digest(result: Tensor) -> str:
    flat = real_numbers(result.resolve_neg()).reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return f"{tuple(result.shape)} {result.dtype} {hashlib.sha256(flat.numpy().data).hexdigest()[:16]}"


def _layout(result: Tensor) -> str:
    """Significant strides: not those along dimensions of one element, nor of no elements at all."""
    if result.layout is not torch.strided:
        return str(result.layout)
    return str(
        [stride for size, stride in zip(result.shape, result.stride(), strict=True) if size > 1 < result.numel()]
    )


def _path(model: nn.Module) -> str:
    """The path of the step: "graph", "3 graphs joined", the number of separate graphs, "hooks", or "torch"."""
    session = lmswap.api._sessions.get(model)
    if session is None:
        return "torch"
    if any(note.startswith("path: saved-tensor hooks") for note in session.notes):
        return "hooks"
    ended = session.recorder.ended
    ran = {graph for graph, _ in ended.sequence} if ended is not None else set()
    step = session.current_step()
    if step is not None and set(step.graphs) == ran:
        return "graph" if len(ran) == 1 else f"{len(ran)} graphs joined"
    return f"{len(ran)} graphs apart"
