"""What must a process compute once, by one thread, before several do? Whatever a library prepares in its first call."""

from __future__ import annotations

import torch


def initialize_mkl() -> None:
    """Makes MKL choose its kernels for this process and its forks; a millisecond the first time, then microseconds.

    oneMKL 2024.2, which torch's wheels hold up to 2.13, detects the CPU in the first call of its vector maths (sqrt,
    exp, log ...) and races there: on Intel's CPUs a thread that calls meanwhile takes a kernel of low accuracy,
    x * rsqrt(x) for sqrt, and its share of that one call is 2.5e-4 off (pytorch #188792). Of fresh
    processes whose first sqrt took two threads 19 of 4,887 had other bits, none of 4,900 after a call of one element.
    First matrix products that run side by side have crashed (executorch #22975).
    """
    torch.sqrt(torch.ones(1))
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
