"""Checks a trial: a few trainings in this process, compared bitwise with plain torch → a `Finding`.

The reference is torch without lmswap. lmswap then trains the trial with nothing swapped, and by each requested policy:
"swap_all" with all that waits for the backward, the others under half of what the step without swapping takes; where no
plan can do with that, since single operators need more, under the least that one can. If nothing moved by then,
"swap_all" is tried as well.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.conformance.memory import TensorMemory
from benchmarks.conformance.training import (
    PLAIN,
    TRACED,
    Bits,
    NothingTrains,
    Training,
    Way,
    real_numbers,
    train,
)
from benchmarks.conformance.trial import Trial, groups, together
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.errors import LmswapError, PlanInfeasible
from lmswap.hardware.mkl_init import initialize_mkl
from lmswap.options import NEEDS_GRAPHS
from lmswap.reporting import Report

# By the name of a path: the requested compiler.
PATHS = {"graphs": "fx", "hooks": "eager"}
# The first holds for a trial if no other does, the last before all others.
VERDICTS = {
    "passed": "plain torch's bits, by every policy",
    "unmoved": "nothing was swapped or recomputed: no evidence",
    "layout": "plain torch's bits, but some result lies otherwise in memory",
    "tracing": "other bits than plain torch: those of torch.compile(backend='aot_eager'), or the report says so and it "
    "is rounding: half of a number's digits at most",
    "torch": "it does not train in plain torch, or not twice to the same bits",
    "refused": "lmswap says that it cannot",
    "failed": "other bits, or an error",
}
# A step of several graphs says what it needs graph by graph, and as a whole once they are joined: after the first time
# the step gets more than it requests.
_MAX_BUDGETS = 8
_GROWTH = 1.5
# By driver "gelsy", linalg.lstsq gives one of three results for the same input, by what lay in its memory before.
_MAX_PLAIN_RUNS = 8
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class Figures:
    """One training's step: what tensors took in it and what had been predicted, its time, and what was moved."""

    measured_bytes: int
    predicted_bytes: int
    seconds: float
    swapped_bytes: int
    recomputed_bytes: int

    @property
    def error(self) -> float:
        """Predicted over measured peak, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Comparison:
    """One policy's training beside plain torch's and beside lmswap's without swapping: what differs first, or ""."""

    policy: str
    figures: Figures
    from_torch: str
    from_unswapped: str


@dataclass(frozen=True)
class Finding:
    """What came out of so many trials, trained together.

    ``unswapped_from_torch`` is what differs first when nothing is swapped, ``step_bytes`` what the plan under a budget
    was given for the step.
    """

    verdict: str  # of VERDICTS
    reason: str = ""
    path: str = ""
    step_bytes: int | None = None
    before: Figures | None = None
    after: Figures | None = None
    notes: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    unswapped_from_torch: str = ""
    trials: int = 1


def check_all(trials: Iterator[Trial], path: str, policies: Sequence[str], memory: TensorMemory) -> Iterator[Finding]:
    """Check trials group by group, the first by all policies, the others by the first of these.

    Args:
        trials: models with their inputs; those of a group are trained together, and apart where that fails.
        path: one of `PATHS`: captured graphs or saved-tensor hooks.
        policies: names of policies that swap or recompute.
        memory: counts the bytes of tensors.

    Yields:
        A finding for each group that passes together, else for each of its trials.
    """
    initialize_mkl()
    for number, group in enumerate(groups(trials)):
        tried = policies if number == 0 else policies[:1]
        if len(group) == 1:
            yield check(group[0], path, tried, memory)
            continue
        trained = []
        for trial in group:
            found = _plain(trial, memory)
            if isinstance(found, Finding):
                yield found
            else:
                trained.append(trial)
        if trained:
            yield from _check_group(trained, path, tried, memory)


def _check_group(trials: list[Trial], path: str, policies: Sequence[str], memory: TensorMemory) -> Iterator[Finding]:
    """One finding for all if they pass on the requested path, else for halves of them, down to each alone."""
    if len(trials) == 1:
        yield check(trials[0], path, policies, memory)
        return
    whole = together(trials)
    plain = _plain(whole, memory)
    found = _check_beside(whole, plain, path, policies, memory) if isinstance(plain, Training) else None
    if found is not None and found.verdict in ("passed", "unmoved"):
        yield replace(found, trials=len(trials))
        return
    middle = len(trials) // 2
    parts = [each for half in (trials[:middle], trials[middle:]) for each in _check_group(half, path, policies, memory)]
    yield from parts
    if found is not None and all(part.verdict in ("passed", "unmoved") for part in parts):
        yield found  # it takes all of them to go wrong


def check(trial: Trial, path: str, policies: Sequence[str], memory: TensorMemory) -> Finding:
    """Train the trial plainly, unswapped and by each policy, and compare; arguments as of `check_all`."""
    plain = _plain(trial, memory)
    if isinstance(plain, Finding):
        return plain
    unswapped = _train_unswapped(trial, path, memory)
    return _compare(trial, plain, unswapped, policies, memory) if isinstance(unswapped, Training) else unswapped


def _check_beside(
    trial: Trial, plain: Training, path: str, policies: Sequence[str], memory: TensorMemory
) -> Finding | None:
    """None if trials of the group must be looked at alone: not all are captured, or without swaps plain torch's."""
    unswapped = _train_unswapped(trial, path, memory)
    if isinstance(unswapped, Finding) or unswapped.bits != plain.bits:
        return None
    if path == "graphs" and unswapped.path != "graph":
        return None
    return _compare(trial, plain, unswapped, policies, memory)


def _train_unswapped(trial: Trial, path: str, memory: TensorMemory) -> Training | Finding:
    try:
        return train(trial, Way("none", compiler=PATHS[path]), memory)
    except Exception as error:  # any model may break in any way, and the others still have to run
        return _broken("without swapping", trial, error)


def _compare(
    trial: Trial, plain: Training, unswapped: Training, policies: Sequence[str], memory: TensorMemory
) -> Finding:
    done: dict[str, Training] = {}
    for policy in (*policies, "swap_all"):
        is_needless = policy in done or (policy not in policies and any(each.has_moved for each in done.values()))
        if is_needless or (policy in NEEDS_GRAPHS and unswapped.path == "hooks"):
            continue
        try:
            done[policy] = _train_by(policy, trial, unswapped, memory)
        except Exception as error:
            return _broken(policy, trial, error)
    return _judge(trial, plain, unswapped, done, memory)


def _plain(trial: Trial, memory: TensorMemory) -> Training | Finding:
    """The training in torch alone; a finding if there is none to compare with."""
    try:
        trial.make_model(), trial.make_call()
    except Exception as error:
        return Finding("failed", f"{_named(trial)}cannot be made: {_sentence(error)}")
    try:
        return train(trial, PLAIN, memory)
    except NothingTrains:
        return Finding("torch", f"{_named(trial)}nothing that it gives has a gradient")
    except Exception as error:
        return Finding("torch", f"{_named(trial)}does not train in torch alone: {_sentence(error)}")


def _train_by(policy: str, trial: Trial, unswapped: Training, memory: TensorMemory) -> Training:
    compiler = unswapped.way.compiler
    if policy == "swap_all":
        return train(trial, Way(policy, compiler=compiler), memory)
    beside_bytes = _beside_step(unswapped.report)
    # Without a plan for the whole step there is no prediction either.
    needed_bytes = _predicted_bytes(unswapped.report) or unswapped.activation_bytes
    budget_bytes = max(1, beside_bytes + needed_bytes // 2)
    for number in range(_MAX_BUDGETS):
        try:
            return train(trial, Way(policy, budget_bytes, compiler), memory)
        except PlanInfeasible as error:
            step_bytes = int(_GROWTH * (budget_bytes - beside_bytes)) if number else 1
            budget_bytes = max(error.needed_bytes, beside_bytes + step_bytes)
    return train(trial, Way(policy, budget_bytes, compiler), memory)


def _judge(
    trial: Trial, plain: Training, unswapped: Training, done: dict[str, Training], memory: TensorMemory
) -> Finding:
    comparisons = tuple(
        Comparison(
            policy,
            _figures(training),
            _difference(plain.bits, training.bits),
            _difference(unswapped.bits, training.bits),
        )
        for policy, training in done.items()
    )
    verdict, reason = _verdict(trial, plain, unswapped, done, memory)
    shown = done.get("auto") or next(iter(done.values()), unswapped)
    return Finding(
        verdict,
        reason and f"{_named(trial)}{reason}",
        unswapped.path,
        shown.report.budget_bytes - _beside_step(shown.report),
        _figures(unswapped),
        _figures(shown),
        shown.report.notes,
        comparisons,
        _difference(plain.bits, unswapped.bits),
    )


def _verdict(
    trial: Trial, plain: Training, unswapped: Training, done: dict[str, Training], memory: TensorMemory
) -> tuple[str, str]:
    ways = {"without swapping": unswapped, **done}
    apart = [way for way, training in ways.items() if training.bits != unswapped.bits]
    also = f", and by {', '.join(apart)} than without swapping" if apart else ""
    for way, training in ways.items():
        if different := _difference(plain.bits, training.bits):
            if torchs_own := _torchs_own(trial, plain, memory):
                return "torch", f"two runs in torch alone differ: {torchs_own}"
            is_torchs, by = (False, "") if apart else _is_torchs(trial, plain, training, memory)
            return "tracing" if is_torchs else "failed", f"{way}, {different} than in plain torch{also}{by}"
    for way, training in ways.items():
        if different := _difference(plain.layouts, training.layouts):
            return "layout", f"{way}, {different.replace('bits', 'strides')} than in plain torch"
    if not any(training.has_moved for training in done.values()):
        return "unmoved", ""
    return "passed", ""


def _torchs_own(trial: Trial, plain: Training, memory: TensorMemory) -> str:
    """Describes how runs of plain torch differ from each other; "" if they do not."""
    runs = (train(trial, PLAIN, memory).bits for _ in range(_MAX_PLAIN_RUNS))
    return next(filter(None, (_difference(plain.bits, bits) for bits in runs)), "")


def _is_torchs(trial: Trial, plain: Training, found: Training, memory: TensorMemory) -> tuple[bool, str]:
    """Whether other bits come of torch's tracing, or the report says why and they are rounding; then, by how much."""
    if found.path != "hooks" and _is_tracing(trial, plain, found, memory):
        return True, ""
    if not _is_said(found):
        return False, ""
    off, is_rounding = _rounding(trial, plain, found, memory)
    return is_rounding, f", by {off:.0e} of the largest number at most"


def _is_said(training: Training) -> bool:
    return any(note.startswith(ROUNDED_OTHERWISE) for note in training.report.notes)


def _rounding(trial: Trial, plain: Training, found: Training, memory: TensorMemory) -> tuple[float, bool]:
    """How far apart results of the first step that differs are, as a share of their largest number; is it rounding?"""
    steps = enumerate(zip(plain.bits, found.bits, strict=True))
    step = next(step for step, (those, these) in steps if those != these)
    those, these = (train(trial, each.way, memory, step).kept for each in (plain, found))
    if [each.shape for each in those.values()] != [these[name].shape for name in those if name in these]:
        return math.inf, False
    # The loss is summed in more digits than what it sums has.
    digits = max((torch.finfo(each.dtype).eps for each in those.values() if each.dtype.is_floating_point), default=0.0)
    # The gradient of the bias of an attention's keys is zero but for rounding: to its own size that may be anything.
    least = digits * max(_largest(real_numbers(each)) for each in those.values())
    off = max(_off(real_numbers(each), real_numbers(these[name]), least) for name, each in those.items())
    return off, off <= digits**0.5


def _largest(numbers: Tensor) -> float:
    return numbers.abs().nan_to_num(0, posinf=0).max().item() if numbers.numel() else 0.0


def _off(expected: Tensor, found: Tensor, least: float) -> float:
    is_other = ~((expected == found) | (expected.isnan() & found.isnan()))
    if not is_other.any():
        return 0.0
    difference = (expected.double() - found.double())[is_other].abs().max().nan_to_num(math.inf).item()
    return difference / max(_largest(expected), least)


def _is_tracing(trial: Trial, plain: Training, found: Training, memory: TensorMemory) -> bool:
    """Whether torch's own tracing, without lmswap, gives just those bits that are other than plain torch's."""
    try:
        traced = train(trial, TRACED, memory)
    except Exception:
        return False
    return all(
        found_step.get(name) == traced_step.get(name)
        for plain_step, found_step, traced_step in zip(plain.bits, found.bits, traced.bits, strict=True)
        for name in plain_step | found_step
        if found_step.get(name) != plain_step.get(name)
    )


def _difference(expected: Sequence[Bits], found: Sequence[Bits]) -> str:
    for step, (those, these) in enumerate(zip(expected, found, strict=True), start=1):
        different = [name for name in those | these if those.get(name) != these.get(name)]
        if different:
            rest = f" and {len(different) - 1} more" if len(different) > 1 else ""
            return f"step {step}: other bits in {different[0]}{rest}"
    return ""


def _broken(way: str, trial: Trial, error: Exception) -> Finding:
    if isinstance(error, LmswapError):
        return Finding("refused", f"{_named(trial)}{way}: {_sentence(error)}")
    return Finding("failed", f"{_named(trial)}{way}: {_sentence(error)} at {_origin(error)}")


def _figures(training: Training) -> Figures:
    report = training.report
    return Figures(
        training.activation_bytes,
        _predicted_bytes(report),
        training.step_seconds,
        report.swapped_out_bytes or 0,
        report.recomputed_bytes or 0,
    )


def _beside_step(report: Report) -> int:
    return report.base_bytes + report.reserve_bytes + report.margin_bytes


def _predicted_bytes(report: Report) -> int:
    if report.predicted_peak_bytes is None:
        return 0
    return report.predicted_peak_bytes - report.base_bytes - report.reserve_bytes


def _named(trial: Trial) -> str:
    return f"{trial.name}: " if trial.name else ""


def _sentence(error: Exception) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"[:_REASON_CHARACTERS]


def _origin(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" not in frame.filename]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "its start"
