"""Step time, reserved memory and bits of one network trained in one way, and the table of several ways.

All ways of a network are trained in one process, one after the other, plain torch twice: what it does not repeat
bitwise, no one can; `cards` selects kernels that do.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.first_hour.kernels import record_kernels
from benchmarks.first_hour.networks import Network, digest
from benchmarks.unet3d.files import write_text
from lmswap.errors import LmswapError, PlanInfeasible

PLAIN, PLAIN_AGAIN, NO_BUDGET = "plain torch", "plain torch again", "without a budget"
_LEARNING_STEPS = 6  # plans are final after the fourth
_STEADY_STEPS = 10
_OF_REPORT = (
    *("predicted_seconds", "measured_seconds", "free_seconds", "bound_seconds", "host_bound_seconds", "stall_seconds"),
    *("swapped_out_bytes", "recomputed_bytes", "base_bytes", "margin_bytes", "predicted_peak_bytes", "notes"),
)

Options = Mapping[str, Any]
# Takes a model and gives what is called in its place.
Wrapper = Callable[[nn.Module], AbstractContextManager[Callable[..., Tensor]]]


def train(
    network: Network, options: Options | None, *, wrap: Wrapper = nullcontext, traces: Path | None = None
) -> dict[str, Any]:
    """Train plainly, or with lmswap: first steps, then steady ones, between which nothing waits.

    Args:
        network: what is trained.
        options: arguments of `lmswap.enable`; None for training without lmswap.
        wrap: another way to need less memory.
        traces: folder for a Kineto trace of two further steps and, with lmswap, its report and plan as JSON;
            None: nothing is kept.
    """
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = network.make_model().to("cuda", network.dtype)
    batch = [tensor.to("cuda") for tensor in network.make_batch()]
    optimizer = torch.optim.Adam(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    if options is not None:
        lmswap.enable(model, **options)
    with wrap(model) as call:
        step = partial(network.step, call, batch, optimizer)
        losses, first_steps = [], []
        for _ in range(_LEARNING_STEPS):
            losses.append(step().item())
            first_steps.append(time.perf_counter() - begun)
            begun = time.perf_counter()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        seconds, steady = _timed(step)
        found = {
            **seconds,
            "first_steps": first_steps,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "tensor_bytes": torch.cuda.max_memory_allocated(),
            "between_bytes": torch.cuda.memory_allocated(),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
            "losses": [*losses, *(loss.item() for loss in steady)],
            "weights": digest(model),
        }
        if traces is not None:
            found["kernels"] = record_kernels(step, traces / "kineto.json")
    if options is not None:
        report = lmswap.report(model)
        found["report"] = {name: getattr(report, name) for name in _OF_REPORT}
        if traces is not None:
            write_text(traces / "report.json", report.to_json())
            lmswap.save_plan(model, traces / "plan.json")
        lmswap.disable(model)
    return found


def _timed(step: Callable[[], Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Figures in seconds of steady steps (device clock, queueing, host clock), and their losses."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEADY_STEPS + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    marks[0].record()
    losses = []
    for mark in marks[1:]:
        losses.append(step())
        mark.record()
    queued_seconds = (time.perf_counter() - begun) / _STEADY_STEPS
    torch.cuda.synchronize()
    wall_seconds = (time.perf_counter() - begun) / _STEADY_STEPS
    seconds = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    return {"seconds": seconds, "queued_seconds": queued_seconds, "wall_seconds": wall_seconds}, losses


def attempt(
    way: str,
    plain: Mapping[str, Any],
    network: Network,
    options: Options | None,
    *,
    wrap: Wrapper = nullcontext,
    traces: Path | None = None,
) -> dict[str, Any]:
    """One way of training beside ``plain``; a plan that does not fit, or an error, is a result and ends nothing."""
    run: dict[str, Any] = {"way": way, "budget_bytes": options["budget"] if options else None}
    try:
        run |= train(network, options, wrap=wrap, traces=traces)
        run["same"] = {key: run[key] == plain[key] for key in ("losses", "weights")}
    except PlanInfeasible as error:
        run["refused"] = str(error)
    except (LmswapError, RuntimeError) as error:
        run["failure"] = f"{type(error).__name__}: {error}"[:600]
    return run


def lines(found: Mapping[str, Any]) -> list[str]:
    """The table of all networks and ways, in Markdown."""
    head = "| network | way | step, s | over plain | over no budget | predicted | reserved | swapped | bits |"
    return [head, "|---" * 9 + "|", *(line for runs in found["networks"].values() for line in rows(runs))]


def rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line of the table for each way of one network."""
    known = {run["way"]: statistics.median(run["seconds"]) for run in runs if "seconds" in run}
    for run in runs:
        if said := run.get("refused") or run.get("failure"):
            yield f"| {run['network']} | {run['way']} | {said[:200]} |" + " |" * 6
            continue
        seconds, report = known[run["way"]], run.get("report")
        plain, free = known.get(PLAIN), known.get(NO_BUDGET)
        cells = [run["network"], run["way"], f"{seconds:.4f}", f"{seconds / plain:.3f} ×" if plain else ""]
        cells.append(f"{seconds / free:.3f} ×" if report and free else "")
        predicted = report["predicted_seconds"] if report else None
        cells.append(f"{predicted:.4f} for {report['measured_seconds'] or 0:.4f}" if report and predicted else "")
        nbytes = run["reserved_bytes"]
        budget = run.get("budget_bytes")
        cells.append(f"{nbytes / budget:.3f} of it" if isinstance(budget, int) else f"{nbytes / 2**20:.0f} MiB")
        cells.append(f"{report['swapped_out_bytes'] / 2**20:.0f} MiB" if report else "")
        cells.append("" if "same" not in run else "same" if all(run["same"].values()) else "others")
        yield f"| {' | '.join(cells)} |"
