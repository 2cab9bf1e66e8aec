"""Interrupts of an update or a backward at each point where Python runs handlers of signals."""

import itertools
import sys

import torch

from tests.capture.test_interrupts import Stop, handling, interrupt_at


def interrupted_runs(prepare, stride):
    """Interrupt what ``prepare`` returns at every ``stride``-th point; yield the point, and how many runs had raised.

    A run that ends before its point is the last one.
    """
    num_raised, before = 0, sys.gettrace()
    for point in itertools.count(1, stride):
        run = prepare()
        trace, counts = interrupt_at(point)
        with handling():
            sys.settrace(trace)
            try:
                run()
            except Stop:
                num_raised += 1
            finally:
                sys.settrace(before)
                torch.set_grad_enabled(True)  # torch's own step leaves it off if it is interrupted as it ends
        if counts[0] < point:
            break
        yield point, num_raised
    assert num_raised > 500 / stride
