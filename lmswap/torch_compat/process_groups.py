"""torch.distributed: the store through which the processes of the default group met."""

from __future__ import annotations

from typing import Any

from torch import distributed


def default_store() -> Any:
    """Return the store of the default process group, which must be initialized."""
    return distributed.distributed_c10d._get_default_store()
