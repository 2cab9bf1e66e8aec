"""How does an engine get the tier of a name? By the call that opens that kind."""

from __future__ import annotations

from lmswap.execute._C import Engine


def open_tier(engine: Engine, tier: str, limit_bytes: int, directory: str) -> None:
    """Opens "host", "device" or "disk", which puts its file into ``directory``, for up to ``limit_bytes``.

    Raises:
        TierError: the directory cannot be used.
    """
    if tier == "host":
        engine.open_host_tier(limit_bytes)
    elif tier == "device":
        engine.open_device_tier(limit_bytes)
    else:
        engine.open_disk_tier(directory, limit_bytes)
