"""Notes of a model for its reports, and warnings; both are logged, too."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable

from lmswap.terminal import escape_controls
from lmswap.user_frame import users_frame

_log = logging.getLogger(__name__)


def crowded_out(graph: int, after: int | None) -> str:
    """Return a note that no plan of ``graph`` fits where it was captured: after graph ``after``, or by itself."""
    if after is None:
        return f"no plan of graph {graph} fits the budget beside what was in use when it was found: it takes the least"
    return f"graph {graph} was found after graph {after} had been planned: it may have exceeded the budget once"


class Notes(list[str]):
    """The notes of one model, in the order in which they were added."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def append(self, note: str) -> None:
        """Add a sentence, and log it."""
        super().append(note)
        _log.info("%s: %s", self._model, note)

    def extend(self, notes: Iterable[str]) -> None:
        """Add sentences, and log them."""
        for note in notes:
            self.append(note)

    def append_once(self, note: str) -> None:
        """Add a sentence, unless it is there already."""
        if note not in self:
            self.append(note)

    def supersede(self, earlier: str, note: str) -> None:
        """Add a sentence in place of an ``earlier`` one, if that is there."""
        if earlier in self:
            self.remove(earlier)
        self.append(note)


def warn(sentence: str, category: type[Warning]) -> None:
    """Warn at the user's own line, and log it."""
    sentence = escape_controls(sentence)
    if _log.hasHandlers():  # without handlers, logging would print it a second time
        _log.warning("%s", sentence)
    frame = users_frame()
    # As warnings.warn does in an unnamed namespace: a warning of module None is dropped.
    module = frame.f_globals.get("__name__") or "<string>"
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    line = frame.f_lineno or 0  # None in code without lines
    warnings.warn_explicit(sentence, category, frame.f_code.co_filename, line, module, registry)
