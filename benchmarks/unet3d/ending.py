"""Ends a benchmark that cannot go on with one sentence on standard error and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.fresh import RunFailed
from benchmarks.unet3d.memory import MeasurementError
from lmswap.errors import LmswapError
from lmswap.reporting.text import print_result


def run_to_end(name: str, run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 for what cannot be used and 130 for Ctrl-C, which are said of ``name``."""
    try:
        return run()
    except KeyboardInterrupt:
        print_result(f"{name}: interrupted", sys.stderr)
        return 128 + signal.SIGINT
    except (DataError, MeasurementError, RunFailed, LmswapError, OSError) as error:
        print_result(f"{name}: {error}", sys.stderr)
        return 2
