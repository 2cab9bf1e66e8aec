"""What comes out of a few training steps of a trial? Bits, memory and time."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import lmswap
from benchmarks.conformance.memory import TensorMemory
from benchmarks.conformance.trial import Call, Trial
from lmswap.capture.lower import tensors
from lmswap.reporting import Report

STEPS = 3  # the first captures
_LEARNING_RATE = 1e-4

# By name of a result: a digest of its bytes.
Bits = dict[str, str]


class NothingTrains(Exception):
    """No result of the model has a gradient."""


@dataclass(frozen=True)
class Way:
    """How lmswap is asked to train; ``policy`` None stands for torch without it."""

    policy: str | None
    budget: int | str = "auto"


@dataclass(frozen=True)
class Training:
    """The bits of all steps; of all steps but the first, the most that tensors took on top, and the fastest's time."""

    bits: tuple[Bits, ...]
    activation_bytes: int
    step_seconds: float
    path: str
    report: Report | None


def train(trial: Trial, way: Way, memory: TensorMemory) -> Training:
    """Trains the trial's model from its random state on.

    Raises:
        NothingTrains: no output of the model depends on anything that has a gradient.
    """
    torch.manual_seed(0)
    model, call = trial.make_model(), trial.make_call()
    if any(is_lazy(parameter) for parameter in model.parameters()):
        model(*call[0], **call[1])  # gives them their shapes
    model.train(trial.is_training)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE)
    bits, activation_bytes, seconds = [], 0, []
    torch.manual_seed(1)
    with _applied(way, model):
        for step in range(STEPS):
            held_bytes = memory.used_tensor_bytes()
            memory.reset_tensor_peak()
            started = time.perf_counter()
            output = model(*call[0], **call[1])
            loss = _loss(output)
            loss.backward()
            seconds.append(time.perf_counter() - started)
            if step > 0:
                activation_bytes = max(activation_bytes, memory.peak_tensor_bytes() - held_bytes)
            bits.append(_bits(model, call, output, loss))
            del output, loss
            optimizer.step()
            optimizer.zero_grad()
            for leaf in tensors(call):
                leaf.grad = None
        path, report = _path(model), lmswap.report(model) if way.policy else None
    return Training(tuple(bits), activation_bytes, min(seconds[1:]), path, report)


@contextmanager
def _applied(way: Way, model: nn.Module) -> Iterator[None]:
    if way.policy is not None:
        lmswap.enable(model, way.budget, policy=way.policy, min_swap_bytes=1)
    try:
        yield
    finally:
        lmswap.disable(model)
        torch.compiler.reset()
        gc.collect()  # captured graphs refer to themselves, and hold constants


def _loss(output: Any) -> Tensor:
    """A scalar that depends on every number that the model gives, and takes next to no memory of its own."""
    given = [leaf for leaf in tensors(output) if leaf.requires_grad]
    if not given:
        raise NothingTrains
    return torch.stack([torch.dot(leaf.reshape(-1), _weights(leaf)) for leaf in given]).sum()


def _weights(result: Tensor) -> Tensor:
    # Cheap, the same in every run, of mean square 1/numel, and not symmetric.
    count = result.numel()
    return torch.linspace(-1.0, 2.0, count, dtype=result.dtype).div_(max(count, 1) ** 0.5)


def _bits(model: nn.Module, call: Call, output: Any, loss: Tensor) -> Bits:
    results = {"the loss": loss, "the generator's state": torch.get_rng_state()}
    results |= {f"output {number}": leaf for number, leaf in enumerate(tensors(output))}
    results |= {f"the gradient of input {number}": leaf.grad for number, leaf in enumerate(tensors(call))}
    results |= {f"the gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    results |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {name: _digest(result) for name, result in results.items() if result is not None}


def _digest(result: Tensor) -> str:
    content = result.detach().to_dense() if result.is_sparse else result.detach()
    flat = content.contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(result.shape)} {result.dtype} {hashlib.sha256(flat.numpy().data).hexdigest()[:16]}"


def _path(model: nn.Module) -> str:
    """Which way the step goes: "graph", "3 graphs joined", how many of them run apart, or "eager"."""
    session = lmswap.api._sessions.get(model)
    if session is None:
        return "torch"
    ran = {graph for graph, _ in session.recorder.last_sequence}
    step = session.current_step()
    if step is not None and set(step.graphs) == ran:
        return "graph" if len(ran) == 1 else f"{len(ran)} graphs joined"
    return f"{len(ran)} graphs apart" if ran else "eager"
