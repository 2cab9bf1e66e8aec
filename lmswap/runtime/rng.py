"""RNG state: recomputation of random ops with the state of their first execution.

A state is a small CPU tensor: about 5 kB for a CPU generator, 16 bytes for a CUDA one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

STATE = "lmswap_rng_state"  # in the meta of a random op: the node that reads the RNG state before it


def state_of(node: fx.Node) -> fx.Node | None:
    """Return the node that reads the RNG state before ``node``; None if ``node`` is not random or no state is kept."""
    state: fx.Node | None = node.meta.get(STATE)
    return state


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of ``device``'s default generator, as uint8 on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def recompute_random(
    state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Return ``op(*args, **kwargs)`` as computed from RNG state ``state``; the current state is restored."""
    found = rng_state(device)
    set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        set_rng_state(found, device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of ``device``'s default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def rng_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the default generators that graphs on ``device`` may use."""
    return [rng_state(known) for known in _generator_devices(device)]


def set_rng_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Restore what `rng_states` returned."""
    for known, state in zip(_generator_devices(device), states, strict=True):
        set_rng_state(state, known)


@contextmanager
def restored_rng_states(device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Restore the states of `rng_states` at the exit, and yield them."""
    states = rng_states(device)
    try:
        yield states
    finally:
        set_rng_states(states, device)


def _generator_devices(device: torch.device) -> list[torch.device]:
    return [*{torch.device("cpu"): None, device: None}]


def bernoulli(
    size: Sequence[int],
    stride: Sequence[int],
    p: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return memory of that layout, or that of ``like`` if given, filled by ``bernoulli_(p)``.

    `torch.bernoulli` draws in the order of contiguous memory instead.
    """
    return memory_for(size, stride, dtype, device, like).bernoulli_(p)


def memory_for(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, like: torch.Tensor | None
) -> torch.Tensor:
    """Return uninitialized memory; see `bernoulli`."""
    if like is not None:
        return torch.empty_like(like)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
