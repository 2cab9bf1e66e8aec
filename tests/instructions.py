"""The number of Python instructions that a computation executes: a measure of its time that no machine changes."""

import sys
from contextlib import contextmanager
from pathlib import Path

import lmswap

_LMSWAP = str(Path(lmswap.__file__).parent)


@contextmanager
def counted_instructions(path=_LMSWAP):
    """Count the instructions of Python that code in files of ``path`` executes; by default lmswap's."""
    counts = [0]

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(path):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[0] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(before)
