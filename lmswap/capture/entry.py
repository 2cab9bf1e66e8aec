"""Evicts single traces from Dynamo's cache, as torch does when an object that a guard names is freed."""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch._C._dynamo import eval_frame
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._guards import CompileContext

_REASON = "lmswap evicted it: it had not been used for long, or memory was short"


class CacheEntry:
    """The entry that Dynamo makes of the frame for which it calls a backend now; it holds the graph's code."""

    def __init__(self) -> None:
        self._id = CompileContext.current_compile_id()  # None where a graph is compiled outside of Dynamo
        self._code: CodeType | None = None  # of the frame
        if self._id is not None:
            self._handle: Any = register_bytecode_hook(self._made)

    def evict(self) -> bool:
        """Remove the entry's guards and code, so that Dynamo traces the frame again when it is next run alike.

        Return whether there was such an entry. What is left of it is 1 KiB, and counts as one of the traces that Dynamo
        allows (`lmswap.capture.recompiles.MAX_GRAPHS`).
        """
        entries = eval_frame._debug_get_cache_entry_list(self._code) if self._code is not None else []
        for entry in entries:
            manager: Any = entry.guard_manager
            if entry.compile_id == self._id and not isinstance(manager, DeletedGuardManagerWrapper):
                manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper(_REASON))
                return True
        return False

    def _made(self, code: CodeType, new_code: CodeType) -> None:
        """Note the frame's code when Dynamo has generated the ``new_code`` that runs instead of it."""
        self._handle.remove()
        if CompileContext.current_compile_id() == self._id:
            self._code = code
