"""On which stream does a model compute now, and how is what is done on another one ordered with that?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from lmswap.errors import OptionError

SEVERAL = (
    "it saves tensors on more than one CUDA stream: what several of them use stays on the device, and memory is used "
    "again when all of them have passed, so that more may be held than planned"
)
_HERE = nullcontext()


class Streams:
    """The streams of one model by their handles; on a CPU there is one, 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current = current_stream_of(device)
        self._named: dict[int, torch.cuda.Stream] = {}
        self.together: set[int] = set()  # those that tensors of one step were saved on, if they were several

    def at(self, stream: int) -> AbstractContextManager[object]:
        """What is done within is done on ``stream``; what is allocated belongs to it."""
        return _HERE if stream == self.current() else torch.cuda.stream(self._name(stream))

    def wait_for(self, stream: int) -> None:
        """The current stream waits for all that ``stream`` has been given so far."""
        self._name(self.current()).wait_stream(self._name(stream))

    def keep_from_reuse(self, tensor: torch.Tensor, stream: int) -> None:
        """``tensor`` dies: its memory is used again when ``stream``, and all that may read it, have come so far.

        It may belong to another stream; torch does nothing for that which it belongs to.
        """
        if self._device.type == "cuda":
            tensor.record_stream(self._name(stream))
            for other in self.together:
                tensor.record_stream(self._name(other))

    def refuse_capture(self, model: str) -> None:
        """Raises OptionError while the current stream is captured into a CUDA graph."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OptionError(
                f"{model} was called while a CUDA graph is captured: a replay would leave out what lmswap does on the "
                "host, and use memory that was given up; call lmswap.disable before the capture"
            )

    def _name(self, stream: int) -> torch.cuda.Stream:
        if stream == 0:  # of which torch 2.11 would make a new stream instead
            return torch.cuda.default_stream(self._device)
        if stream not in self._named:
            named = torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]
            self._named[stream] = named
        return self._named[stream]


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """What gives the handle of the stream that ``device`` computes on now; on a CPU 0."""
    # torch.cuda.current_stream makes an object first, which takes 7 µs.
    raw_stream = torch._C._cuda_getCurrentRawStream if device.type == "cuda" else _no_stream
    return partial(raw_stream, device.index or 0)


def _no_stream(_device_index: int) -> int:
    return 0
