"""The cost of a larger image in the same memory: every size without a budget, and under the small size's."""

from __future__ import annotations

from benchmarks.case_study.results import Ladder, without_curves
from benchmarks.case_study.runner import Runner, Trial
from benchmarks.unet3d.measured import Failure, Run


def climb(runner: Runner) -> Ladder:
    """Trains every size; the plain peak of the small one is the budget unless the settings give one.

    Unlimited memory means lmswap's own graphs without a budget: on a CPU plain torch is slower than those, since the
    kernel has to allocate its pages again. A size without a run that exceeds memory is kept as a failure.
    The small size fits a budget of its own, where there is nothing to compare: it runs once.
    """
    settings = runner.settings
    runs: list[Run] = []
    failures: list[Failure] = []
    budget_bytes = cap_bytes = settings.budget_bytes
    if budget_bytes is None:
        first = runner.attempt(runner.configuration(settings.small, None), runs, failures)
        if first is None:
            return Ladder(None, None, (), tuple(failures))
        budget_bytes = cap_bytes = first.peak_bytes
    if settings.device == "cpu":
        cap_bytes = None
    for repeat in range(settings.repeats):
        for size in settings.sizes:
            fits = size == settings.small and settings.budget_bytes is None
            if repeat and (fits or any(failure.configuration.size == size for failure in failures)):
                continue
            unswapped = runner.configuration(size, "none")
            limits = {"budget_bytes": budget_bytes, "cap_bytes": cap_bytes}
            swapped = runner.configuration(size, "auto", is_planned=repeat > 0, **limits)
            needed_bytes = budget_bytes + budget_bytes * size**3 // settings.small**3
            runner.compare([Trial(each, runs, failures) for each in (unswapped, swapped)], needed_bytes)
    return Ladder(budget_bytes, cap_bytes, tuple(map(without_curves, runs)), tuple(failures))
