"""What is said of a model for people? Sentences for its reports, which the log gets when they are added."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Notes(list[str]):
    """The notes of one model, in the order in which they were added."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def append(self, note: str) -> None:
        """Adds a sentence."""
        super().append(note)
        _log.info("%s: %s", self._model, note)

    def append_once(self, note: str) -> None:
        """Adds a sentence, unless it was said before."""
        if note not in self:
            self.append(note)
