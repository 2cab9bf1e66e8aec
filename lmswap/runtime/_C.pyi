"""The C++ runtime (csrc/bind.cpp). Pointers, streams and sizes are plain integers; nothing here uses torch.

Errors of C++ are raised as the classes of `lmswap.errors` with the same names. Blocking calls release the GIL. Times
are seconds of CLOCK_MONOTONIC, the clock of `time.perf_counter`. The full contract is in csrc/include/lmswap/engine.h.
"""

from collections.abc import Callable
from typing import NamedTuple

class TransferRecord(NamedTuple):
    """A finished copy. Compute waited for it in [wait_start, wait_end); both are 0 if it did not."""

    swap: int  # as passed to out_start or in_start
    is_in: bool
    nbytes: int
    queued_seconds: float
    start_seconds: float
    end_seconds: float
    wait_start_seconds: float
    wait_end_seconds: float

class TierStats(NamedTuple):
    capacity_bytes: int  # reserved now
    used_bytes: int  # held by live tokens now
    peak_used_bytes: int
    reserve_seconds: float  # total time spent on allocating storage
    resident_bytes: int  # memory in use now: as much as is reserved, or less if bytes are compressed
    peak_resident_bytes: int

class Engine:
    """Owner of the tiers and copies of one device. Thread-safe; freed by `close`, never by a static destructor."""

    def __init__(
        self,
        *,
        driver: str,  # "cuda" or "host"
        device: int = 0,
        library: str = "libcuda.so.1",
        out_bytes_per_second: float = 0.0,  # bandwidth of an emulated link; 0: no limit
        in_bytes_per_second: float = 0.0,
        shared_link: str = "",  # a file through which engines of several processes share one emulated link
        faults: str = "",  # host driver and disk only, for tests: see csrc/include/lmswap/faults.h
        audits: bool = False,  # checksums of the tier's bytes after each copy; released blocks are filled with 0xff
        wipes: bool = False,  # released blocks and slabs are overwritten with zeros, at the latest by `close`
    ) -> None: ...
    def open_host_tier(self, limit_bytes: int) -> None: ...
    def open_device_tier(self, limit_bytes: int) -> None:
        """Spare memory of the device, outside torch's allocator: emulates a host behind a faster link."""

    def open_peer_tier(self, device: int, limit_bytes: int) -> None:
        """Memory of another GPU, by its number: directly where the two have peer access, else through the host.

        Raises OptionError for the GPU of this engine, DriverError where the other cannot be used.
        """

    def open_disk_tier(self, directory: str, limit_bytes: int, io_threads: int = 4) -> None:
        """Unnamed files in a directory. Space is checked by `reserve`.

        Raises TierError if the directory is missing, unwritable, not trusted, in memory (tmpfs, ramfs) or without
        direct I/O.
        """

    def open_compressed_tier(self, limit_bytes: int, io_threads: int = 4) -> None:
        """Compressed host memory; the limit counts uncompressed bytes.

        The memory they occupy is in `tier_stats`, and not limited.
        """

    def reserve(self, tier: str, nbytes: int, replace: bool = False) -> None:
        """Reserves one contiguous slab of at least ``nbytes``; raises TierError, with capacity unchanged, otherwise.

        Pinned memory grows in place. ``replace``: the slab is replaced even if it is large enough; its memory is freed
        with its last token. The memory of an empty slab is freed before; if a failure leaves too little to reserve that
        again, the error says so.
        """

    def out_start(self, swap: int, tier: str, offset: int, pointer: int, nbytes: int, stream: int) -> object:
        """Queues a copy out behind what ``stream`` holds now; returns the token, a DLPack capsule.

        The token is one int64 whose value is the handle; its deleter releases the block. ``offset`` is the planned
        offset in the slab; if it is still occupied (two forwards before a backward), another one is used.
        """

    def make_host_copies(self, tier: str, sizes: list[int]) -> list[tuple[int, object]]:
        """Allocates blocks that are read and written in place; returns for each its handle and a DLPack capsule.

        The capsule is a tensor of so many uint8: on the host driver on the CPU, else on the GPU, whose kernels access
        pinned memory. Its deleter waits for all that is queued on the GPU, and releases the block, also after `close`.
        The blocks of a call lie page-aligned in slabs, as large as they are, each of which is freed with the last of
        its blocks. ``tier``: "host", or "disk" on the host driver; TierError for others, and where the GPU has other
        addresses for pinned memory than the host (WSL2).

        `in_start` copies from a block any number of times. Its bytes must not change while a copy accesses them, or
        has yet to. They have no checksums, and no audits.
        """

    def fill_host_copy(self, swap: int, handle: int, pointer: int, stream: int) -> int:
        """Queues a copy out into a host copy, behind ``stream`` and earlier copies of the handle.

        Returns the transfer's number, for `in_done`; copies in that are queued later get the new bytes.
        """

    def out_done(self, handle: int, stream: int) -> None:
        """Makes ``stream`` (the caller, on the host driver) wait until the bytes have left."""

    def in_start(self, swap: int, handle: int, pointer: int, nbytes: int, stream: int) -> int:
        """Queues a copy in, behind the handle's copy out and behind ``stream``; returns the transfer's number.

        ``nbytes`` is the room at ``pointer``, at least as much as was swapped out.
        """

    def in_done(self, handle: int, transfer: int, stream: int) -> None:
        """Makes ``stream`` (the caller, on the host driver) wait until the bytes have arrived.

        ``transfer`` is one that in_start or fill_host_copy queued for ``handle``; one of a host copy that has ended and
        was waited for is unknown once the next copy of the handle is queued. Every wait for a failed transfer raises
        TransferError, or BytesDiffer if the disk or compressed memory returned other bytes than were written (unless
        the engine audits). Once the token is deleted, a wait raises OptionError.

        Where the device waits for the disk by itself, the transfer may fail later: `confirm` raises then.
        """

    def confirm(self) -> None:
        """Waits until the outcome of all transfers passed to `in_done` is known; raises as `in_done` does.

        Results are valid only afterwards: a failed copy in delivers zeros.
        """

    def forget_unconfirmed(self) -> None:
        """Excludes all transfers so far from `confirm`, because the results are discarded."""

    def out_transfer(self, handle: int) -> int:
        """Number of the transfer that out_start queued for ``handle``."""

    def nbytes(self, handle: int) -> int:
        """Number of bytes that were swapped out."""

    def is_finished(self, transfer: int) -> bool:
        """Whether the transfer no longer accesses its device memory (also true after it failed)."""

    def is_idle(self) -> bool:
        """Whether no transfer accesses device memory."""

    def take_checksums(self, transfer: int) -> list[int]:
        """Checksums of the tier's bytes after a transfer; waits for them. If the engine audits; once per transfer.

        One for each started MiB: see csrc/include/lmswap/checksum.h.
        """

    def take_records(self) -> list[TransferRecord]:
        """The records of transfers that finished since the last call, in the order of their end.

        To be called once per step, or `forget_records`: until then the engine keeps each transfer's events. A transfer
        that nothing has waited for is recorded once its token is deleted.
        """

    def mark(self, stream: int) -> int:
        """Records a mark behind what ``stream`` holds now; returns its number."""

    def take_mark(self, mark: int) -> float:
        """Waits until the stream has passed the mark; returns when it did, and removes the mark."""

    def forget_records(self, stop_seconds: float) -> None:
        """Drops the records of transfers queued before then that were waited for, or finished and lost their token."""

    def forget_marks(self, marks: list[int]) -> None:
        """Removes marks; unknown numbers are ignored."""

    def can_hold(self) -> bool:
        """Whether streams of this device can wait for the host without blocking other streams."""

    def hold(self, stream: int, max_seconds: float) -> None:
        """Makes ``stream`` wait, before what is queued after this call, until `let_go` or for ``max_seconds``.

        Ends the hold that is in force. Raises OptionError if `can_hold` is false.
        """

    def let_go(self) -> None:
        """Ends the hold in force, if there is one."""

    def tier_stats(self, tier: str) -> TierStats: ...
    def live_handles(self) -> int: ...
    def close(self) -> None:
        """Waits for all copies and frees everything. Idempotent; tokens may outlive it."""

class Holds:
    """Memory of torch's allocator that an arena holds without a tensor; consistent even if a signal handler raises."""

    def __init__(self, take: Callable[[int, int], int], give: Callable[[int], object]) -> None:
        """``take`` allocates bytes on a stream and returns the address, by which ``give`` frees them."""

    def take(self, nbytes: int, stream: int) -> int:
        """Allocates and holds ``nbytes``; returns their address."""

    def give_all(self) -> None:
        """Frees everything that is held."""

    def make(self, moves: tuple[tuple[int, int], ...], stream: int) -> tuple[int, int, int] | None:
        """Performs moves (bytes, address): allocates so many bytes, expected at that address; 0 bytes: frees it.

        Stops at the first unexpected result: returns its bytes, its address and the address found instead, or 0.
        """

    def held(self) -> dict[int, int]:
        """Bytes by address."""

def device_bytes(device: int, library: str = "libcuda.so.1") -> tuple[int, int]:
    """Free and total memory of a GPU, queried in a context that is retained for the query only."""

class HeapStats:
    live_bytes: int  # allocated now, rounded to pages
    peak_live_bytes: int  # since reset_peak
    retained_bytes: int  # free but kept for reuse
    peak_resident_bytes: int  # live + retained, since reset_peak
    num_fresh_pages: int  # allocated 4 KiB pages that the kernel had to fault in, since install

def float_mode() -> int:
    """The floating-point mode of this thread: the bits of MXCSR or FPCR for denormals, NaN and rounding."""

def heap_install(threshold_bytes: int, libraries: list[str]) -> None:
    """Serves the large host allocations of ``libraries`` (file names of loaded ones) from a heap that reuses pages."""

def heap_uninstall() -> None:
    """Serves no new allocations and returns retained pages to the kernel; live blocks stay valid until freed."""

def heap_is_installed() -> bool: ...
def heap_owns(pointer: int) -> bool: ...
def heap_stats() -> HeapStats: ...
def heap_reusable_bytes() -> int:
    """The retained bytes that are resident: without pages of `heap_lend`, and those that were never written."""

def heap_changes(start_seconds: float, stop_seconds: float) -> list[tuple[float, int]]:
    """Changes (time, live bytes) between two times of CLOCK_MONOTONIC; only the last 65,536 changes are known."""

def heap_reset_peak() -> None: ...
def heap_set_limit(resident_bytes: int) -> None:
    """Limits live + retained bytes, by dropping retained pages; 0: to the highest live bytes so far."""

def heap_trim() -> None:
    """Returns all retained pages to the kernel now."""

def heap_lend(nbytes: int) -> None:
    """Returns pages of ``nbytes`` to the kernel; their ranges stay retained, and are faulted in again on use."""
