"""Writes log records of lmswap to standard error at $LMSWAP_LOG_LEVEL, without a change of the script."""

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


def set_up_logging(environment: Mapping[str, str] = os.environ) -> None:
    """Set the level of lmswap's loggers to $LMSWAP_LOG_LEVEL; records that the script does not handle are printed.

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
    handler.addFilter(lambda _: not logging.getLogger().hasHandlers())  # handlers may be added later
    logger = logging.getLogger("lmswap")
    logger.setLevel(level)
    logger.addHandler(handler)
