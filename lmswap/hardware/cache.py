"""What did an earlier process find out? JSON files, each named by a hash of what it depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheFile:
    """One file. It holds its key too, for people, and so that another key of the same hash is told apart."""

    path: Path | None  # None: nothing is remembered
    key: dict[str, Any]

    @staticmethod
    def locate(kind: str, key: Mapping[str, Any]) -> CacheFile:
        """The file of what is called ``kind`` and depends on ``key``, both in JSON's own types."""
        directory = cache_directory()
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return CacheFile(directory / f"{kind}-{digest}.json" if directory else None, dict(key))

    def read(self) -> dict[str, Any] | None:
        """What was written; None if there is nothing.

        Raises:
            ValueError: the file is damaged, or its key is another one.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(self.path.read_text(encoding="utf-8")) if self.path else None
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        if data is None:
            return None
        if not isinstance(data, dict) or data.pop("key", None) != self.key:
            raise ValueError("its key is another one")
        return data

    def write(self, data: Mapping[str, Any]) -> None:
        """Puts ``data`` in the place of what was there, in one move; a failure is logged and that is all."""
        if self.path is None:
            return
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.touch(mode=0o600)
            draft.write_text(json.dumps({**data, "key": self.key}, indent=1), encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            _log.warning("%s cannot be written, the next process will start anew: %s", self.path, error)


def cache_directory() -> Path | None:
    """Where files are kept: $LMSWAP_CACHE_DIR, else $XDG_CACHE_HOME/lmswap, by default ~/.cache/lmswap.

    None where $LMSWAP_CACHE_DIR is set and empty: then nothing is kept or read.
    """
    chosen = os.environ.get("LMSWAP_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmswap"
