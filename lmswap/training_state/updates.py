"""The updates of a model's optimizers under one budget: what streams of their state, and of the gradients they read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from lmswap.errors import TierError
from lmswap.ir.bytesize import format_bytes
from lmswap.runtime.host_copies import HostCopies
from lmswap.runtime.storage import has_plain_storage
from lmswap.training_state.cpu_updates import CpuUpdates
from lmswap.training_state.gradients import StreamedGradients
from lmswap.training_state.gradients import window_bytes as gradient_window_bytes
from lmswap.training_state.optimizer_state import ChunkedUpdates


class Updates:
    """The updates of several optimizers, which run one after the other; false without any."""

    def __init__(
        self, optimizers: Sequence[ChunkedUpdates], gradients: StreamedGradients, host_copies: HostCopies
    ) -> None:
        """``gradients`` are those that the optimizers read."""
        self.of_each, self.gradients, self._host_copies = tuple(optimizers), gradients, host_copies

    def __bool__(self) -> bool:
        return bool(self.of_each)

    def are_of(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is one of them."""
        return any(each.optimizer is optimizer for each in self.of_each)

    @property
    def on_cpu(self) -> tuple[CpuUpdates, ...]:
        """Those that run on the CPU, of a model on a GPU."""
        return tuple(each for each in self.of_each if isinstance(each, CpuUpdates))

    @property
    def run_in_chunks(self) -> bool:
        """Whether updates fetch what is non-resident, a chunk at a time."""
        return any(each.run_in_chunks for each in self.of_each)

    @property
    def limit_temporaries(self) -> bool:
        """Whether some run in chunks although all that they read is resident."""
        return any(each.limits_temporaries for each in self.of_each)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state; of what does not exist yet, as expected."""
        return sum(each.state_bytes for each in self.of_each)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the part of the state that streams."""
        return sum(each.streamed_bytes for each in self.of_each)

    @property
    def streamed(self) -> frozenset[int]:
        """The parameters whose state streams, by `id`."""
        return frozenset().union(*(each.streamed for each in self.of_each))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that stream."""
        sizes = (sum(each.gradient_sizes()) for each in self.of_each)
        return sum(sizes) if self.gradients.are_streamed else 0

    @property
    def rewritten_bytes(self) -> int:
        """Bytes of the gradients that stream and that updates copy out again, as they may have written them."""
        sizes = (sum(each.gradient_sizes()) for each in self.of_each if each.may_write_gradients)
        return sum(sizes) if self.gradients.are_streamed else 0

    @property
    def streams_any(self) -> bool:
        """Whether state or gradients stream; parameters move by plans."""
        return bool(self.streamed) or self.gradients.are_streamed

    def window_bytes(self, *, streams: bool = False, streams_gradients: bool = False) -> int:
        """Return what streaming takes of device memory: the largest update, or gradients that stream.

        Args:
            streams: as if state streamed.
            streams_gradients: as if gradients did.
        """
        streams_gradients |= self.gradients.are_streamed
        given = {"streams": streams, "streams_gradients": streams_gradients}
        update_bytes = max((each.window_bytes(**given) for each in self.of_each), default=0)
        sizes = [nbytes for each in self.of_each for nbytes in each.gradient_sizes()] if streams_gradients else []
        return max(update_bytes, gradient_window_bytes(sizes, self._host_copies))

    @property
    def update_bytes(self) -> int:
        """What an update takes of device memory now, without pages that the caller maps before it."""
        return max((each.window_bytes() for each in self.of_each), default=0)

    @property
    def whole_bytes(self) -> int:
        """What an update takes of device memory if all is resident."""
        return max((each.whole_bytes for each in self.of_each), default=0)

    def is_non_resident(self, tensor: Tensor) -> bool:
        """Whether a gradient, or a tensor of the state, is in its host copy now."""
        return has_plain_storage(tensor) and self._host_copies.find(tensor.untyped_storage()) is not None

    def fetch_parameters(self) -> None:
        """Let updates fetch non-resident parameters from now on."""
        for each in self.of_each:
            each.fetch_parameters()

    def stream_state(self, nbytes: int) -> None:
        """Let ``nbytes`` of the state stream from now on, those of the first optimizers.

        Raises:
            TierError: the tier has no room.
        """
        for each in self.of_each:
            each.stream(min(nbytes, each.state_bytes))
            nbytes -= min(nbytes, each.state_bytes)

    def stream_state_of(self, count: int) -> None:
        """Let the state of the first ``count`` parameters stream from now on, see `stream_state`."""
        for each in self.of_each:
            each.stream_first(count)
            count -= len(each.streamed)

    def keep_state_on_cpu(self, held_bytes: int) -> None:
        """Make all state non-resident, as updates run on the CPU, in a tier of ``held_bytes``.

        Raises:
            TierError: it has no room for the state, and for parameters and gradients while they are updated.
        """
        needed_bytes = self.state_bytes + 2 * sum(each.parameter_bytes for each in self.on_cpu)
        if needed_bytes > held_bytes:
            raise TierError(
                f"optimizer_device='cpu' needs {format_bytes(needed_bytes)} of host memory for optimizer state, and "
                f"for parameters and gradients while they are updated; {format_bytes(held_bytes)} are available: "
                "raise host_budget, or leave optimizer_device out"
            )
        self.stream_state(self.state_bytes)

    def restore(self) -> int:
        """Make state and gradients resident, and let updates run as torch's; return the bytes that are held elsewhere.

        Raises:
            TransferError: a copy failed.
        """
        left_bytes = sum(each.restore() for each in self.of_each)
        self.gradients.restore()
        return left_bytes

    def close(self) -> None:
        """Let updates run as torch's from now on, on state where it is; idempotent."""
        for each in self.of_each:
            each.close()
