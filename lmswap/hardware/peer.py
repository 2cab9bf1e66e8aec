"""Choice of the GPU for the peer tier: free memory, and the rate of copies to it.

Free memory is queried from the driver, not from torch, which would leave a context on each queried GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmswap.errors import LmswapError, OptionError, TierError
from lmswap.hardware.link import find_gpu, has_nvlink
from lmswap.hardware.probe import MEASURED_BYTES, round_trip_seconds
from lmswap.ir.bytesize import format_bytes

if TYPE_CHECKING:
    import torch

# Links differ by factors of two: half as many of them, an older generation, by way of the host. A ratio above the
# reciprocal root of 2 is noise.
_SIMILAR = 0.7


def find_peer(device: torch.device, wanted: str | None = None, needed_bytes: int | None = None) -> str:
    """The GPU ("cuda:1") for the "peer" tier of ``device``: ``wanted``, or the best one.

    Of those with ``needed_bytes`` free, by default what a measurement takes, the one with the fastest copies; of those
    that are equally fast the one with the most free memory.

    Raises:
        OptionError: ``device`` is not a GPU or the only one, or ``wanted`` is not another one.
        TierError: no eligible GPU has enough free memory; states the free bytes of each.
    """
    others = _others(device)
    if wanted is not None and wanted not in others:
        raise OptionError(f"tier 'peer' is memory of another GPU than {device}: {', '.join(others)}, not {wanted}")
    min_bytes = max(needed_bytes or 0, MEASURED_BYTES)
    free, refusals = {}, []
    for peer in [wanted] if wanted is not None else others:
        try:
            free[peer] = free_bytes(peer)
        except LmswapError as error:
            refusals.append(f"{peer} cannot be used: {error}")
    refusals += [f"{peer} has {format_bytes(nbytes)}" for peer, nbytes in free.items() if nbytes < min_bytes]
    free = {peer: nbytes for peer, nbytes in free.items() if nbytes >= min_bytes}
    if not free:
        raise TierError(
            f"no GPU for tier 'peer' has {format_bytes(min_bytes)} free: {'; '.join(refusals)}. Free memory there, "
            "lower host_budget, or use tier='host'"
        )
    if len(free) == 1:
        return next(iter(free))
    seconds = {peer: round_trip_seconds(device, "peer", peer) for peer in free}
    alike = [peer for peer in free if min(seconds.values()) >= _SIMILAR * seconds[peer]]
    return max(alike, key=free.__getitem__)


def free_bytes(peer: str) -> int:
    """Bytes free on ``peer`` now; other processes may allocate them.

    Raises:
        DriverError: the driver cannot create a context there, or failed otherwise.
    """
    from lmswap.runtime import _C

    return _C.device_bytes(int(peer.removeprefix("cuda:")))[0]


def peer_key(device: torch.device, peer: str) -> str:
    """Cache key of a measurement of copies to ``peer``, independent of CUDA_VISIBLE_DEVICES' numbering."""
    import torch

    pair = " to ".join(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in (device, peer))
    return pair + (" directly" if torch.cuda.can_device_access_peer(device, peer) else " by way of the host")


def describe_peer(device: torch.device, peer: str) -> str:
    """Name of ``peer`` and the path of copies from ``device``, for messages."""
    import torch

    return f"{peer} ({torch.cuda.get_device_name(peer)}), {_path_kind(device, peer)}"


def _others(device: torch.device) -> list[str]:
    import torch

    if device.type != "cuda":
        raise OptionError("tier 'peer' is memory of another GPU, for models on a GPU, not on the CPU")
    others = [f"cuda:{number}" for number in range(torch.cuda.device_count()) if number != device.index]
    if not others:
        raise OptionError(
            f"tier 'peer' is memory of another GPU, and {device} is the only one that is visible: let "
            "CUDA_VISIBLE_DEVICES name more of them, or use tier='host'"
        )
    return others


def _path_kind(device: torch.device, peer: str) -> str:
    import pynvml  # type: ignore[import-untyped]
    import torch

    if not torch.cuda.can_device_access_peer(device, peer):
        return "by way of the host: the two have no peer access"
    try:
        pynvml.nvmlInit()
        try:
            one, other = (find_gpu(pynvml, str(torch.cuda.get_device_properties(gpu).uuid)) for gpu in (device, peer))
            return f"directly, by {'NVLink' if has_nvlink(pynvml, one, other) else 'PCIe'}"
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"directly, by an unknown link: NVML does not report it ({error})"
