"""What does a budget cost in time? Networks by plain torch, without a budget, and within 70, 50 and 30 %.

All ways of a network are trained in one process, one after the other, plain torch twice: what it does not repeat the
bits of, nobody can; `cards` asks for kernels that do, and has the same shares.
``python -m benchmarks.first_hour.speed FILE``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmswap
from benchmarks.first_hour.networks import Network, budgets, digest, networks
from lmswap.bench.compact import to_json
from lmswap.bench.unet3d.files import write_text
from lmswap.bench.unet3d.study import describe_machine
from lmswap.errors import LmswapError, PlanInfeasible
from lmswap.hardware.device import describe_device
from lmswap.reporting.text import print_result

_LEARNING_STEPS = 6  # after the fourth plans are final
_STEADY_STEPS = 10
_OF_REPORT = (
    *("predicted_seconds", "measured_seconds", "free_seconds", "bound_seconds", "host_bound_seconds", "stall_seconds"),
    *("swapped_out_bytes", "recomputed_bytes", "notes"),
)


def train(network: Network, budget: int | str | None) -> dict[str, Any]:
    """Trains plainly, or with lmswap within ``budget``: first steps, and steady ones, which wait for nothing."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = network.make_model().to("cuda", network.dtype)
    batch = [tensor.to("cuda") for tensor in network.make_batch()]
    step = partial(network.step, model, batch, torch.optim.Adam(model.parameters()))
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    if budget is not None:
        lmswap.enable(model, budget)
    losses = [step().item()]
    first_seconds = time.perf_counter() - begun
    losses += [step().item() for _ in range(_LEARNING_STEPS - 1)]
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    seconds, steady = _timed(step)
    found = {
        **seconds,
        "first_seconds": first_seconds,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "between_bytes": torch.cuda.memory_allocated(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "losses": [*losses, *(loss.item() for loss in steady)],
        "weights": digest(model),
    }
    if budget is not None:
        report = lmswap.report(model)
        found["report"] = {name: getattr(report, name) for name in _OF_REPORT}
        lmswap.disable(model)
    return found


def _timed(step: Callable[[], Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Seconds of steady steps: of each by the device's clock, of queueing one, and of one by the host's clock."""
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


def ways(network: Network) -> Iterator[dict[str, Any]]:
    """Every way of training a network; what cannot be planned or goes wrong is said and ends nothing."""
    plain = {"way": "plain torch", **train(network, None)}
    yield plain
    shares = budgets(plain["between_bytes"], plain["reserved_bytes"])
    within = {f"{share:.0%}": nbytes for share, nbytes in shares.items()}
    for way, budget in {"plain torch again": None, "without a budget": "auto", **within}.items():
        run: dict[str, Any] = {"way": way, "budget_bytes": budget}
        try:
            run |= train(network, budget)
            run["same"] = {key: run[key] == plain[key] for key in ("losses", "weights")}
        except PlanInfeasible as error:
            run["refused"] = str(error)
        except (LmswapError, RuntimeError) as error:
            run["failure"] = f"{type(error).__name__}: {error}"[:600]
        yield run


def lines(found: Mapping[str, Any]) -> list[str]:
    """What was found, as a table of Markdown."""
    head = "| network | way | step, s | over plain | over no budget | predicted | reserved | swapped | bits |"
    return [head, "|---" * 9 + "|", *(line for runs in found["networks"].values() for line in _rows(runs))]


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = {run["way"]: statistics.median(run["seconds"]) for run in runs if "seconds" in run}
    for run in runs:
        if said := run.get("refused") or run.get("failure"):
            yield f"| {run['network']} | {run['way']} | {said[:200]} |" + " |" * 6
            continue
        seconds, report = known[run["way"]], run.get("report")
        cells = [run["network"], run["way"], f"{seconds:.4f}", f"{seconds / known['plain torch']:.3f} ×"]
        free = known.get("without a budget")
        cells.append(f"{seconds / free:.3f} ×" if report and free else "")
        predicted = report["predicted_seconds"] if report else None
        cells.append(f"{predicted:.4f} for {report['measured_seconds'] or 0:.4f}" if report and predicted else "")
        nbytes = run["reserved_bytes"]
        budget = run.get("budget_bytes")
        cells.append(f"{nbytes / budget:.3f} of it" if isinstance(budget, int) else f"{nbytes / 2**20:.0f} MiB")
        cells.append(f"{report['swapped_out_bytes'] / 2**20:.0f} MiB" if report else "")
        cells.append("" if "same" not in run else "same" if all(run["same"].values()) else "others")
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Runs the networks, each in a process of its own, and keeps what each found as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--networks", nargs="+", metavar="NAME", choices=networks(are_small=True))
    parser.add_argument("--one", metavar="NETWORK")
    options = parser.parse_args()
    known = networks(are_small=options.small)
    if options.one:
        for run in ways(known[options.one]):
            sys.stdout.write(json.dumps({"network": options.one, **run}) + "\n")
            sys.stdout.flush()
        return 0
    return _keep(options.result, options.networks or [*known], are_small=options.small)


def _keep(path: Path, names: Sequence[str], *, are_small: bool) -> int:
    device = describe_device(torch.device("cuda", 0))
    head = {"device": device.name, "driver": device.driver, "host": asdict(describe_machine()), "are_small": are_small}
    runs: dict[str, list[dict[str, Any]]] = {}
    has_failed = False
    for name in names:
        runs[name] = []
        command = [sys.executable, "-m", "benchmarks.first_hour.speed", "--one", name, *["--small"] * are_small]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                runs[name].append(json.loads(line))
                write_text(path, to_json({**head, "networks": runs}))
                print_result([*_rows(runs[name])][-1])
        has_failed |= process.returncode != 0 or any("failure" in run for run in runs[name])
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
