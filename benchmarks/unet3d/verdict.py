"""Verdicts of a comparison, one sentence each: budget kept, results bitwise identical, cost, copies hidden."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.unet3d.measured import Run, Swapping
from benchmarks.unet3d.study import Study
from lmswap.ir.bytesize import format_bytes
from lmswap.profiling.figures import Figures
from lmswap.reporting.text import format_seconds


@dataclass(frozen=True)
class Verdict:
    """A statement about the runs. ``holds`` says whether it must be true and is; None: a finding, either is fine."""

    holds: bool | None
    text: str


def judge(study: Study) -> list[Verdict]:
    """Every verdict on a study; a study is good if none has ``holds`` False."""
    verdicts = [Verdict(False, f"{f.configuration.name} did not finish: {f.message}") for f in study.failures]
    for swapped in (run for run in study.runs if run.configuration.budget_bytes is not None):
        size = swapped.configuration.size
        plain, unswapped = study.find(size, "plain"), study.find(size, "unswapped")
        others = [run for run in (plain, unswapped) if run is not None and run is not swapped]
        verdicts.append(_judge_budget(swapped, plain))
        if unswapped in others:
            verdicts.append(_judge_bits(swapped, unswapped))
        if plain is not None:
            verdicts.append(_compare_bits(swapped, plain))
        if others:
            verdicts.append(_compare_seconds(swapped, others))
        if swapped.swapping is not None:
            verdicts.append(_tell_moves(swapped.configuration.name, swapped.swapping, swapped.figures))
    return verdicts


def judge_copies(run: Run) -> Verdict:
    """Whether ``run`` swapped, and its copies ran beside compute."""
    name = run.configuration.name
    if run.swapping is None or not run.swapping.out_bytes:
        return Verdict(False, f"{name}: NOTHING was swapped; a smaller budget, or sizes further apart, would show it")
    if run.figures is None or not run.figures.overlap:
        return Verdict(False, f"{name}: NO copies ran beside compute")
    return Verdict(True, f"{name}: copies ran beside compute")


def _judge_budget(swapped: Run, plain: Run | None) -> Verdict:
    budget_bytes = swapped.configuration.budget_bytes
    assert budget_bytes is not None
    text = f"{swapped.configuration.name}: peak {format_bytes(swapped.peak_bytes)}"
    against = f", where plain torch takes {format_bytes(plain.peak_bytes)}" if plain is not None else ""
    if swapped.peak_bytes <= budget_bytes:
        return Verdict(True, f"{text}, within the budget of {format_bytes(budget_bytes)}{against}")
    excess = format_bytes(swapped.peak_bytes - budget_bytes)
    return Verdict(False, f"{text} is {excess} OVER the budget of {format_bytes(budget_bytes)}{against}")


def _tell_moves(name: str, swapping: Swapping, figures: Figures | None) -> Verdict:
    """Bytes swapped and recomputed in a step, and the share of the copies that overlapped compute."""
    if not swapping.out_bytes and not swapping.recomputed_bytes:
        return Verdict(None, f"{name}: the step fits the budget as it is, nothing is swapped")
    again = f"recomputes {format_bytes(swapping.recomputed_bytes or 0)}"
    if not swapping.out_bytes:
        return Verdict(None, f"{name}: each step swaps nothing and {again}")
    overlap = figures.overlap if figures is not None else None
    hidden = f", {100 * overlap:.0f} % of the copying beside compute" if overlap is not None else ""
    out, in_ = format_bytes(swapping.out_bytes), format_bytes(swapping.in_bytes or 0)
    waited = format_seconds(swapping.stall_seconds or 0.0)
    return Verdict(None, f"{name}: each step swaps {out} out and {in_} in{hidden}, waits {waited} for it, and {again}")


def _judge_bits(swapped: Run, unswapped: Run) -> Verdict:
    steps = len(swapped.losses)
    difference = _first_difference(swapped, unswapped)
    name = f"{swapped.configuration.name} and unswapped"
    if difference is not None:
        return Verdict(False, f"{name} DIFFER: {difference}")
    return Verdict(
        True, f"{name}: the losses of all {steps} steps and the weights after them are equal to the last bit"
    )


def _compare_bits(swapped: Run, plain: Run) -> Verdict:
    difference = _first_difference(swapped, plain)
    name = f"{swapped.configuration.name} and plain eager torch"
    return Verdict(
        None, f"{name}: " + ("the same bits too" if difference is None else f"not the same bits, {difference}")
    )


def _first_difference(a: Run, b: Run) -> str | None:
    """Describes the first difference of two runs; None if losses and weights are bitwise identical."""
    for step, (bits_a, bits_b) in enumerate(zip(a.loss_bits, b.loss_bits, strict=True)):
        if bits_a != bits_b:
            return f"from step {step + 1} on (loss {a.losses[step]:.9g} against {b.losses[step]:.9g})"
    return None if a.weights_sha256 == b.weights_sha256 else "in the weights after the last step, not in the losses"


def _compare_seconds(swapped: Run, others: list[Run]) -> Verdict:
    ratios = [
        f"{swapped.seconds_per_step / other.seconds_per_step:.2f} × the {other.seconds_per_step:.2f} s of "
        + ("plain torch" if other.configuration.kind == "plain" else "the same graphs unswapped")
        + ", step by step in turn" * other.configuration.takes_turns
        for other in others
    ]
    return Verdict(
        None, f"{swapped.configuration.name}: {swapped.seconds_per_step:.2f} s a step, {' and '.join(ratios)}"
    )
