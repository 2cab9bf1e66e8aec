"""Which records of lmswap go to standard error, for people who cannot change the script? LMSWAP_LOG_LEVEL says."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from lmswap.errors import OptionError
from lmswap.terminal import escape_controls

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def log_as_asked(environment: Mapping[str, str] = os.environ) -> None:
    """Sets the level of lmswap's loggers to $LMSWAP_LOG_LEVEL; where the script handles no records, they are printed.

    Raises:
        OptionError: there is no such level.
    """
    level = environment.get("LMSWAP_LOG_LEVEL", "").upper()
    if not level:
        return
    if level not in LEVELS:
        raise OptionError(f"LMSWAP_LOG_LEVEL is '{level}'; it can be {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda _: not logging.getLogger().hasHandlers())  # asked when something is said, not now
    logger = logging.getLogger("lmswap")
    logger.setLevel(level)
    logger.addHandler(handler)
