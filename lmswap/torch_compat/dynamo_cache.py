"""Evicts single traces from Dynamo's cache, as torch does when an object that a guard names is freed."""

from __future__ import annotations

from types import CodeType
from typing import Any
from weakref import WeakValueDictionary

from torch._C._dynamo import eval_frame
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._guards import CompileContext, CompileId

_REASON = "evicted: not used for long, or memory was short"


class CacheEntry:
    """The entry that Dynamo makes of the frame for which it calls a backend now; it holds the graph's code."""

    def __init__(self) -> None:
        self._id = CompileContext.current_compile_id()  # None where a graph is compiled outside of Dynamo
        self._code: CodeType | None = None  # of the frame
        if self._id is not None:
            _without_code[self._id] = self

    def evict(self) -> bool:
        """Remove the entry's guards and code, so that Dynamo traces the frame again when it is next run alike.

        Return whether there was such an entry. What is left of it is 1 KiB, and counts as one of the traces that Dynamo
        allows.
        """
        entries = eval_frame._debug_get_cache_entry_list(self._code) if self._code is not None else []
        for entry in entries:
            manager: Any = entry.guard_manager
            if entry.compile_id == self._id and not isinstance(manager, DeletedGuardManagerWrapper):
                manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper(_REASON))
                return True
        return False


_without_code = WeakValueDictionary[CompileId, CacheEntry]()  # until Dynamo has generated the code of their frames


def _note_code(code: CodeType, new_code: CodeType) -> None:
    compile_id = CompileContext.current_compile_id()
    if compile_id is not None and (entry := _without_code.pop(compile_id, None)) is not None:
        entry._code = code


# For good: Dynamo iterates over its hooks, so that none of them may remove itself.
register_bytecode_hook(_note_code)
