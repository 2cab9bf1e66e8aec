"""Opens the tiers of an engine by name."""

from __future__ import annotations

from lmswap.runtime._C import Engine

# Bound of the compression ratio: a ReLU output compresses to 0.47 of its bytes, zeros to 0.03.
MAX_RATIO = 8


def open_tier(engine: Engine, tier: str, limit_bytes: int, where: str) -> None:
    """Open "host", "device", "peer", "disk" or "compressed" with a capacity of ``limit_bytes``.

    ``where`` is the directory of the disk tier's file, or the GPU of the peer tier, such as "cuda:1".

    Raises:
        TierError: the directory cannot be used.
        DriverError: the other GPU cannot be used.
    """
    if tier == "host":
        engine.open_host_tier(limit_bytes)
    elif tier == "device":
        engine.open_device_tier(limit_bytes)
    elif tier == "peer":
        engine.open_peer_tier(int(where.removeprefix("cuda:")), limit_bytes)
    elif tier == "compressed":
        engine.open_compressed_tier(MAX_RATIO * limit_bytes)
    else:
        engine.open_disk_tier(where, limit_bytes)
