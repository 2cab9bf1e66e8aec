"""The C++ runtime (csrc/bind.cpp). Pointers, streams and sizes are plain integers; nothing here knows torch.

Errors are raised as `lmswap.errors.TierError`, `DriverError`, `TransferError` and `OptionError`. Blocking calls
release the GIL. Times are seconds of CLOCK_MONOTONIC, the clock of `time.perf_counter`.
"""

from collections.abc import Callable
from typing import NamedTuple

class TransferRecord(NamedTuple):
    """One finished copy. A wait is what compute lost to it, [wait_start, wait_end); both 0 when nothing waited."""

    swap: int  # the number given to out_start or in_start
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
    reserve_seconds: float  # what making room took so far
    resident_bytes: int  # what holds them now: as much as is reserved, or less where they are compressed
    peak_resident_bytes: int

class Engine:
    """Owner of tiers, arenas, lanes and events for one device. Closes by `close`, never by a static destructor."""

    def __init__(
        self,
        *,
        driver: str,  # "cuda" or "host"
        device: int = 0,
        library: str = "libcuda.so.1",
        out_bytes_per_second: float = 0.0,  # paces the lanes (emulated link); 0 is full speed
        in_bytes_per_second: float = 0.0,
        shared_link: str = "",  # a file by which engines of several processes share one paced link
        faults: str = "",  # host driver and disk only, for tests: see csrc/include/lmswap/faults.h
        audits: bool = False,  # bytes are read back from their tier and summed, blocks given back are filled with 0xff
        wipes: bool = False,  # what tiers give back, at the latest when they are closed, is overwritten with zeros
    ) -> None: ...
    def open_host_tier(self, limit_bytes: int) -> None: ...
    def open_device_tier(self, limit_bytes: int) -> None:
        """Spare memory of the device, beside that of torch's allocator: stands in for a host behind a faster link."""

    def open_peer_tier(self, device: int, limit_bytes: int) -> None:
        """Memory of another GPU, by its number: directly where the two have peer access, else by way of the host.

        Raises OptionError for the GPU that computes, DriverError where the other cannot be used.
        """

    def open_disk_tier(self, directory: str, limit_bytes: int, io_threads: int = 4) -> None:
        """Refuses a directory that is missing, unwritable, in memory (tmpfs, ramfs) or without direct I/O.

        Whether there is room shows when it is reserved.
        """

    def open_compressed_tier(self, limit_bytes: int, io_threads: int = 4) -> None:
        """Host memory that holds bytes compressed; the limit counts them as the device has them.

        What they take there is in `tier_stats`, and is not limited.
        """

    def reserve(self, tier: str, nbytes: int, anew: bool = False) -> None:
        """Makes one contiguous arena of at least ``nbytes``; raises TierError before anything starts if it cannot.

        An arena of pinned memory grows in place, by what it has less. ``anew``: one that there is gives way to it also
        where it would do, and takes no more memory when its last token is gone.
        """

    def out_start(self, swap: int, tier: str, offset: int, pointer: int, nbytes: int, stream: int) -> object:
        """Queues the copy out behind what ``stream`` holds now; returns the token, a DLPack capsule.

        The token is one int64 whose value is the handle; its deleter gives the block back. ``offset`` is the planned
        place in the arena; when that is still held (two forwards before a backward) another place is found.
        """

    def out_done(self, handle: int, stream: int) -> None:
        """Makes ``stream`` (the caller, on the host driver) wait until the bytes have left."""

    def in_start(self, swap: int, handle: int, pointer: int, nbytes: int, stream: int) -> int:
        """Queues the copy in, behind the handle's own copy out and behind ``stream``; returns the transfer's number.

        ``nbytes`` is the room at ``pointer``, at least what was swapped out.
        """

    def in_done(self, handle: int, transfer: int, stream: int) -> None:
        """Makes ``stream`` (the caller, on the host driver) wait until the bytes have arrived.

        ``transfer`` is one that in_start queued for ``handle``. If it failed, every wait for it raises TransferError,
        until the token is gone; from then on a wait raises OptionError, and nothing is kept of the transfer. Of a copy
        from disk that brought other bytes than left it is BytesDiffer, unless the engine audits.

        Where the device waits for the disk by itself, a failure may come about later: `confirm` tells of it.
        """

    def confirm(self) -> None:
        """Waits until of all that `in_done` made a stream wait for it is known whether it arrives; raises as that does.

        Until then nothing that was computed may be taken for right: of what failed, zeros arrive.
        """

    def forget_unconfirmed(self) -> None:
        """Nobody uses what was computed: `confirm` is not to tell of it."""

    def out_transfer(self, handle: int) -> int:
        """The number of the transfer that out_start queued for ``handle``."""

    def nbytes(self, handle: int) -> int:
        """How many bytes were swapped out."""

    def is_finished(self, transfer: int) -> bool:
        """Whether the device memory of the transfer is no longer touched (also true after it failed)."""

    def is_idle(self) -> bool:
        """Whether no device memory is touched by any transfer."""

    def take_checksums(self, transfer: int) -> list[int]:
        """Sums of the tier's bytes after a transfer; waits for them. Of an engine that audits, once for each transfer.

        One for each begun MiB: see csrc/include/lmswap/checksum.h.
        """

    def take_records(self) -> list[TransferRecord]:
        """The records of transfers that finished since the last call, in order of their end.

        To be called once a step, or `forget_records`: until then the engine keeps what it needs to tell of them. One
        that nobody has waited for yet is told of when its token is gone.
        """

    def mark(self, stream: int) -> int:
        """Marks what ``stream`` holds now; returns the mark's number."""

    def take_mark(self, mark: int) -> float:
        """Waits until the stream has passed the mark, and says when it did; a mark can be taken once."""

    def forget_records(self, stop_seconds: float) -> None:
        """Tells no more of transfers queued before then that were waited for, or that ended and lost their token.

        `take_records` is then not called for them.
        """

    def forget_marks(self, marks: list[int]) -> None:
        """Marks that nobody will take."""

    def can_hold(self) -> bool:
        """Whether streams of this device can wait for the host, and hold up no others meanwhile."""

    def hold(self, stream: int, most_seconds: float) -> None:
        """Makes ``stream`` wait for `let_go`, or for ``most_seconds``, before it runs what is queued after this call.

        A hold that is in force ends. Raises OptionError where `can_hold` is false.
        """

    def let_go(self) -> None:
        """Ends the hold in force, if there is one."""

    def tier_stats(self, tier: str) -> TierStats: ...
    def live_handles(self) -> int: ...
    def close(self) -> None:
        """Waits for the lanes, gives everything back; tokens that outlive it are harmless. Idempotent."""

class Holds:
    """What an arena holds of torch's memory and no tensor does; a signal's handler never comes in between."""

    def __init__(self, take: Callable[[int, int], int], give: Callable[[int], object]) -> None:
        """``take`` allocates bytes on a stream and gives the address, at which ``give`` frees them."""

    def take(self, nbytes: int, stream: int) -> int:
        """Holds so many bytes more; where they lie."""

    def give_all(self) -> None:
        """Holds nothing any more."""

    def make(self, moves: tuple[tuple[int, int], ...], stream: int) -> tuple[int, int, int] | None:
        """For each move (bytes, address) takes so many, which have to lie there, or, of 0 bytes, gives that back.

        Where one does not go as it says no other is made: bytes, address, and where they were found, 0: nowhere.
        """

    def held(self) -> dict[int, int]:
        """Bytes by address."""

def device_bytes(device: int, library: str = "libcuda.so.1") -> tuple[int, int]:
    """What is free of a GPU's memory, and all of it, asked in a context that is there for the question only."""

class HeapStats(NamedTuple):
    live_bytes: int  # allocated now, rounded to pages
    peak_live_bytes: int  # since reset_peak
    retained_bytes: int  # free but kept for reuse
    peak_resident_bytes: int  # live + retained, since reset_peak
    num_fresh_pages: int  # 4 KiB pages handed out that the kernel had to fault in, since install

def float_mode() -> int:
    """How this thread computes with floating-point numbers: bits of MXCSR or FPCR for denormals, NaN and rounding."""

def heap_install(threshold_bytes: int, libraries: list[str]) -> None:
    """Serves the large host allocations of ``libraries`` (loaded objects, by file name) from a recycling heap."""

def heap_uninstall() -> None:
    """Serves no new allocation and gives retained pages back; live blocks stay valid until they are freed."""

def heap_is_installed() -> bool: ...
def heap_owns(pointer: int) -> bool: ...
def heap_stats() -> HeapStats: ...
def heap_reusable_bytes() -> int:
    """What of the retained bytes is resident: lent pages are not until they are used, nor what no block wrote to."""

def heap_changes(start_seconds: float, stop_seconds: float) -> list[tuple[float, int]]:
    """When the live bytes became how many, between two times of CLOCK_MONOTONIC; the last 65,536 changes are known."""

def heap_reset_peak() -> None: ...
def heap_set_limit(resident_bytes: int) -> None:
    """Retained pages are dropped whenever live + retained would exceed this; 0: exceed the highest live so far."""

def heap_trim() -> None:
    """Gives all retained pages back to the kernel now."""

def heap_lend(nbytes: int) -> None:
    """Gives pages of so much to the kernel for a while; they stay retained, and come anew when they are used."""
