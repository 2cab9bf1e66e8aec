"""Runs as a child process would have reported them, made by hand so that each verdict can be tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.measured import Run, Swapping
from benchmarks.unet3d.study import Machine, Study
from benchmarks.unet3d.synthetic import DATA_KIND
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.profiling.figures import figures_of
from lmswap.profiling.trace import Stall

MIB = 2**20
MACHINE = Machine("Some CPU", 2, 24 * 2**30, "2.13.0", "3.11.0", "abcdef")


def make_configuration(size=128, policy=None, budget_bytes=None):
    return Configuration(
        size=size, steps=3, policy=policy, budget_bytes=budget_bytes, cap_bytes=None, head="conv", dtype="fp32",
        device="cpu", seed=0, cubes=("a.npz",),
    )  # fmt: skip


def make_run(configuration, *, peak_bytes=2000 * MIB, bits=("bf000000",) * 3, weights="w", seconds=(9.0, 2.0, 4.0)):
    swapped = configuration.budget_bytes is not None
    spans = (
        Span(Lane.COMPUTE, "forward 0", 0.0, 1.4),
        Span(Lane.OUT, "conv", 0.5, 1.0, 300 * MIB, 7),
        Span(Lane.COMPUTE, "backward 0", 1.5, 2.4),
        Span(Lane.IN, "conv", 2.0, 2.5, 300 * MIB, 7),
        Span(Lane.STALL, "conv", 2.4, 2.5, 0, 7),
        Span(Lane.COMPUTE, "backward 0", 2.5, 3.0),
    )
    return Run(
        configuration=configuration,
        device="CPU",
        threads=2,
        losses=(-0.5,) * 3,
        loss_bits=bits,
        weights_sha256=weights,
        step_seconds=seconds,
        step_ends=tuple(accumulate(seconds)),
        peak_bytes=peak_bytes,
        tensor_peak_bytes=peak_bytes * 9 // 10,
        memory=((0.0, 100 * MIB), (1.5, peak_bytes), (3.0, 100 * MIB)),
        swapping=Swapping(
            policy="tflms",
            predicted_peak_bytes=peak_bytes,
            predicted_seconds=3.0,
            graph_seconds=2.9,
            out_bytes=300 * MIB,
            in_bytes=300 * MIB,
            recomputed_bytes=100 * MIB,
            stall_seconds=0.1,
            saved_bytes=800 * MIB,
            forward_seconds=1.4,
            spans=spans if swapped else (),
            tensor_memory=((0.0, 50 * MIB),),
            free_seconds=2.8,
            bound_seconds=2.95,
        )
        if configuration.policy is not None
        else None,
        figures=figures_of(Timeline("measured", spans, ())) if configuration.policy is not None else None,
        stalls=(Stall("convolution_backward_3", "network.py:31 y = conv(x)", "conv", Lane.IN, 2, 0.2),) * swapped,
    )


def make_study(*runs, failures=()):
    return Study(
        command="python -m benchmarks.unet3d compare",
        created="2026-01-01T00:00:00+00:00",
        data=DATA_KIND,
        subjects=("s1", "s2", "s3"),
        machine=MACHINE,
        budget_bytes=1000 * MIB,
        runs=runs,
        failures=failures,
    )


def on_emulated_gpu(runs):
    """The same runs, as if tools/emulated_gpu had made them."""
    return [
        replace(run, device="Emulated GPU", configuration=replace(run.configuration, device="cuda")) for run in runs
    ]


def good_runs():
    """What a comparison gives if all is well: small, large plain, large swapped, large unswapped."""
    return [
        make_run(make_configuration(size=96), peak_bytes=1000 * MIB),
        make_run(make_configuration()),
        make_run(make_configuration(policy="auto", budget_bytes=1000 * MIB), peak_bytes=990 * MIB, seconds=(9, 3, 6)),
        make_run(make_configuration(policy="none"), seconds=(9, 5, 5)),
    ]


def swapped_only(**changes):
    """The run of the large size that recomputes nothing."""
    run = make_run(make_configuration(policy="swap", budget_bytes=1000 * MIB), peak_bytes=980 * MIB)
    return replace(run, swapping=replace(run.swapping, recomputed_bytes=0, **changes))
