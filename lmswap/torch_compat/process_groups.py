"""The default process group of torch.distributed, and the store through which its processes met."""

from __future__ import annotations

from typing import Any

from torch import distributed


def is_distributed() -> bool:
    """Return whether this process is in a process group."""
    return distributed.is_available() and distributed.is_initialized()


def default_store() -> Any:
    """Return the store of the default process group, which must be initialized."""
    return distributed.distributed_c10d._get_default_store()
