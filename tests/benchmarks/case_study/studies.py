"""A case study as a CPU would have measured it, made by hand; predictions are really made."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.case_study.predict import predict
from benchmarks.case_study.results import (
    Boxes,
    Ladder,
    LinkRuns,
    Links,
    Origin,
    Replicas,
    Results,
    Settings,
    Together,
    without_curves,
)
from benchmarks.unet3d.synthetic import DATA_KIND
from tests.benchmarks.unet3d.runs import MACHINE, MIB, make_configuration, make_run

BUDGET_BYTES = 1000 * MIB
SETTINGS = Settings(
    small=96, large=128, ladder=(), device="cpu",
    replicas=2, repeats=2, timed_steps=2, budget_bytes=None, head="conv", dtype="fp32",
    seed=0, data=None, evaluation=None,
)  # fmt: skip
ORIGIN = Origin(
    "python -m benchmarks.case_study",
    "2026-01-01T00:00:00+00:00",
    DATA_KIND,
    "Some CPU, 2 threads",
    "Linux 6.1",
    MACHINE,
)


def unswapped(seconds, size=128):
    return make_run(make_configuration(size=size, policy="none"), seconds=(9.0, seconds, seconds))


def swapped(seconds, size=128, policy="auto", link=None, *, keep_spans=False):
    configuration = replace(make_configuration(size=size, policy=policy, budget_bytes=BUDGET_BYTES), link=link)
    run = make_run(configuration, peak_bytes=990 * MIB, seconds=(9.0, seconds, seconds))
    return without_curves(run, keep_spans=keep_spans)


def make_ladder():
    plain = make_run(make_configuration(size=96), peak_bytes=BUDGET_BYTES)
    runs = [unswapped(2.0, 96), swapped(2.0, 96), unswapped(5.0), swapped(5.5)]
    again = [unswapped(2.0, 96), swapped(2.1, 96), unswapped(6.0), swapped(6.9)]
    return Ladder(BUDGET_BYTES, None, (plain, *runs, *again), ())


def make_link(name, seconds, link, ratio):
    runs = [swapped(seconds, link=link), swapped(3 * seconds, policy="tflms", link=link)]
    return LinkRuns(name, 0.8e9, link, "auto", ratio, (*runs, swapped(seconds, link=link, keep_spans=True)))


def make_links():
    slow, fast = make_link("x86", 5.2, "0.8GB/s", 3.3), make_link("ac922", 5.0, None, 0.9)
    return Links(4_000_000_000, 1.5, (unswapped(5.0), unswapped(5.0)), (slow, fast), ())


def make_replicas():
    def together(row, system, count, seconds, policy="auto"):
        runs = [unswapped(seconds, 96) if system is None else swapped(seconds, link="0.8GB/s") for _ in range(count)]
        return Together(row, system, tuple(runs), (seconds,) * count)

    rows = [together("small", None, 1, 4.0), together("small_each", None, 2, 4.4)]
    rows += [together("large", "x86", 1, 10.0), together("large_each", "x86", 2, 11.0)]
    rows += [together("large_contended", "x86", 2, 15.0), together("large", "ac922", 1, 10.0)]
    return Replicas(0, (*rows, together("large_contended", "ac922", 2, 12.0)), ())


@cache
def predictions():
    return predict()


def make_results(**changes):
    """A case study with all of its stages but the evaluation; ``changes`` are fields of `Results`."""
    whole = Results(
        SETTINGS, ORIGIN, Boxes(((140, 170, 139), (142, 174, 141))), predictions(), make_ladder(), make_links(),
        make_replicas(),
    )  # fmt: skip
    return replace(whole, **changes)
