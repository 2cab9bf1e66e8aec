"""The CUDA streams that a model computes on, and the ordering of work between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from lmswap.errors import OptionError
from lmswap.torch_compat.caching_allocator import raw_stream_function

MULTIPLE_STREAMS = (
    "it saves tensors on more than one CUDA stream: what several of them use stays resident, and memory is reused when "
    "all of them have passed, so that more may be held than planned"
)
_HERE = nullcontext()


class Streams:
    """The streams of one model, by their handles; a CPU has one, 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current = current_stream_of(device)
        self._named: dict[int, torch.cuda.Stream] = {}
        self.are_multiple = False  # a step has saved tensors on more than one

    def at(self, stream: int) -> AbstractContextManager[object]:
        """Return a context that makes ``stream`` current; what is allocated within belongs to it."""
        return _HERE if stream == self.current() else torch.cuda.stream(self._name(stream))

    def wait_for(self, stream: int) -> None:
        """Make the current stream wait for all work queued on ``stream`` so far."""
        self._name(self.current()).wait_stream(self._name(stream))

    def delay_reuse(self, tensor: torch.Tensor, streams: Collection[int]) -> None:
        """Reuse the memory of ``tensor``, which dies, only after all ``streams`` that may read it reach this point.

        The tensor may belong to another stream; for its own stream torch needs no record.
        """
        if self._device.type == "cuda":
            for stream in streams:
                tensor.record_stream(self._name(stream))

    def refuse_graph_capture(self, model: str) -> None:
        """Raise OptionError while the current stream is captured into a CUDA graph."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OptionError(
                f"{model} was called while a CUDA graph is captured: a replay would omit what lmswap does on the "
                "host, and use released memory; call lmswap.disable before the capture"
            )

    def _name(self, stream: int) -> torch.cuda.Stream:
        if stream == 0:  # torch 2.11 would create a new stream for it
            return torch.cuda.default_stream(self._device)
        if stream not in self._named:
            named = torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]
            self._named[stream] = named
        return self._named[stream]


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the handle of ``device``'s current stream; on a CPU 0."""
    raw_stream = raw_stream_function() if device.type == "cuda" else lambda _: 0
    return partial(raw_stream, device.index or 0)
