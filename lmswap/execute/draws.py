"""How is an op that draws random numbers run again with the same draws? From the generator's state at its first run.

The state is an ordinary small tensor on the CPU: some 5 kB of a CPU generator, 16 bytes of a CUDA one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

STATE = "lmswap_rng_state"  # in the meta of a node that draws: the node that reads the generator's state before it


def state_of(node: fx.Node) -> fx.Node | None:
    """The node that reads the generator's state before ``node`` draws; None if it draws nothing or none was kept."""
    state: fx.Node | None = node.meta.get(STATE)
    return state


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of ``device``'s default generator now, as uint8 on the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def draw_again(state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What ``op(*args, **kwargs)`` gave when the generator was in ``state``; the generator is left as it was found."""
    found = rng_state(device)
    set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        set_rng_state(found, device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Puts ``device``'s default generator into ``state``."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """States of the default generators that graphs on ``device`` may draw from."""
    return [rng_state(known) for known in _drawn_from(device)]


def set_generator_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Puts generators back into what `generator_states` gave."""
    for known, state in zip(_drawn_from(device), states, strict=True):
        set_rng_state(state, known)


def _drawn_from(device: torch.device) -> list[torch.device]:
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
    """What ``bernoulli_(p)`` leaves in memory of that layout; `torch.bernoulli` draws for contiguous memory instead.

    Where a tensor ``like`` it is given, its layout counts.
    """
    return memory_for(size, stride, dtype, device, like).bernoulli_(p)


def memory_for(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, like: torch.Tensor | None
) -> torch.Tensor:
    """Memory that was not written yet; see `bernoulli`."""
    if like is not None:
        return torch.empty_like(like)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
