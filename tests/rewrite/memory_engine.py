"""An engine in plain Python that keeps swapped bytes in a dict and destroys what the plan says is released."""

from __future__ import annotations

import torch

from lmswap.runtime import ops


class MemoryEngine:
    """Behaves as `lmswap.runtime.engine.SwapEngine` does; released memory is overwritten at once."""

    def __init__(self) -> None:
        self.number = 10**9 + id(self) % 10**6
        self.stored: dict[int, torch.Tensor] = {}
        self.arriving: dict[int, torch.Tensor] = {}
        self.num_out = self.num_in = 0
        ops.ENGINES[self.number] = self  # type: ignore[assignment]

    def out_start(self, x: torch.Tensor, swap: int, tier: str, offset: int, is_whole: bool) -> torch.Tensor:
        self.num_out += 1
        self.stored[self.num_out] = _bytes(x).clone()
        return torch.tensor([self.num_out])

    def out_done(self, token: torch.Tensor, x: torch.Tensor) -> None:
        _bytes(x).fill_(0xFF)  # a later use of released memory reads NaN

    def in_start(self, token: torch.Tensor, buffer: int, device: torch.device) -> torch.Tensor:
        self.num_in += 1
        flat = torch.full_like(self.stored[int(token)], 0xFF)
        self.arriving[int(token)] = flat
        return flat

    def in_done(self, token: torch.Tensor, flat: torch.Tensor) -> None:
        self.arriving.pop(int(token)).copy_(self.stored[int(token)])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    storage = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
