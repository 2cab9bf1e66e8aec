"""Steps on a card that has a budget and 2 % more: six networks, each within 70, 50 and 30 %.

Of a hundred per cent, which is what their steps take beyond what is there between steps: parameters and the optimizer's
state. Each network is trained in a process of its own for each share, beside plain torch on all there is; by kernels
that repeat their bits, which those of attention and some of cuDNN's do only in deterministic mode.
``python -m benchmarks.first_hour.cards FILE``; with ``--small`` networks are as small as an emulated GPU needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import lmswap
from benchmarks.compact import to_json
from benchmarks.first_hour.networks import Network, budgets, digest, networks
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.errors import PlanInfeasible
from lmswap.reporting.text import print_result

_CARD = 1.02  # of the budget: what torch may take, beside the context
_STEPS = 6  # after the fourth plans are final
_REFUSAL = f"{PlanInfeasible.__module__}.{PlanInfeasible.__name__}:"


def train(network: Network, budget_bytes: int | None) -> dict[str, Any]:
    """Train on a card of ``budget_bytes``, or plainly on the whole card if that is None.

    Returns:
        Losses and a digest of the weights; by step its seconds, reserved and tensor bytes, and the allocator's retries;
        and the bytes in use between steps.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which has no part in the bits
    torch.manual_seed(0)
    model = network.make_model().to("cuda", network.dtype)
    if budget_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(_CARD * budget_bytes / total_bytes)
        lmswap.enable(model, budget=budget_bytes)
    optimizer = torch.optim.Adam(model.parameters())
    steps, losses = [], []
    for _ in range(_STEPS):
        batch = [tensor.to("cuda") for tensor in network.make_batch()]
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses.append(network.step(model, batch, optimizer).item())
        steps.append(
            {
                "seconds": time.perf_counter() - started,
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "tensor_bytes": torch.cuda.max_memory_allocated(),
                "retries": torch.cuda.memory_stats()["num_alloc_retries"],
            }
        )
    between_bytes = torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in batch)
    return {"losses": losses, "weights": digest(model), "between_bytes": between_bytes, "steps": steps}


def study(names: Sequence[str], known: Sequence[Mapping[str, Any]], *, are_small: bool) -> Iterator[dict[str, Any]]:
    """Run the named networks under all budgets, each in a process of its own.

    Args:
        names: networks of `benchmarks.first_hour.networks`.
        known: the runs of an earlier call, of which only failed ones are repeated.
        are_small: whether the networks are those for an emulated GPU.

    Yields:
        Each run with its figures, or its error.
    """
    ended = {(run["network"], run["share"]): dict(run) for run in known if not has_failed(run)}
    for name in names:
        plain = ended.get((name, None)) or {"network": name, "share": None, **_fresh(name, None, are_small=are_small)}
        yield plain
        if "failure" in plain:
            continue
        between_bytes, peak_bytes = plain["between_bytes"], max(step["reserved_bytes"] for step in plain["steps"])
        for share, budget_bytes in budgets(between_bytes, peak_bytes).items():
            run = ended.get((name, share))
            if run is None:
                run = {"network": name, "share": share, "budget_bytes": budget_bytes}
                run |= _fresh(name, budget_bytes, are_small=are_small)
                run["same"] = {key: run.get(key) == plain[key] for key in ("losses", "weights")}
            yield run


def has_failed(run: Mapping[str, Any]) -> bool:
    """It did not train, though lmswap had not refused to: "no plan fits" is an answer too."""
    return "failure" in run and not run["failure"].startswith(_REFUSAL)


def lines(found: Mapping[str, Any]) -> list[str]:
    """What a study has found, as Markdown: runs with budgets, and what failed without one."""
    head = f"On cards of {found['card']} × the budget; of a step's bytes beyond parameters and the optimizer's state:"
    told = [run for run in found["runs"] if run["share"] is not None or "failure" in run]
    return [head, "", *(f"- {describe(run)}" for run in told)]


def page(found: Mapping[str, Any]) -> str:
    """`lines` with where they are from."""
    host = found["host"]
    where = (
        f"{found['device']}, on {host['cpu']}, {host['cores']} cores; torch {host['torch']}, commit {host['commit']}."
    )
    return "\n".join(["# Networks on cards of their budgets", "", where, "", *lines(found)]) + "\n"


def describe(run: Mapping[str, Any]) -> str:
    """Describes a run in one line."""
    if run["share"] is None:
        return f"{run['network']} by plain torch: {run.get('failure', 'trained')}"
    title = f"{run['network']} within {run['share']:.0%}, {run['budget_bytes'] / 2**20:.0f} MiB"
    if "failure" in run:
        return f"{title}: {run['failure']}"
    reserved_bytes = max(step["reserved_bytes"] for step in run["steps"])
    retries = run["steps"][-1]["retries"] - run["steps"][2]["retries"]
    bits = "the bits of plain torch" if all(run["same"].values()) else "other bits than plain torch"
    return f"{title}: reserved {reserved_bytes / run['budget_bytes']:.3f} of it, {retries} retries after step 3, {bits}"


def _fresh(name: str, budget_bytes: int | None, *, are_small: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.first_hour.cards", "--one", name, str(budget_bytes or 0)]
    repeatable = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*command, *["--small"] * are_small], capture_output=True, text=True, check=False, env=repeatable
    )
    if done.returncode < 0:
        return {"failure": f"ended by {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Runs the study, or, for it, one of its runs; 1 if one of them failed. It goes on with what the file holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--networks", nargs="+", metavar="NAME", choices=networks(are_small=True))
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "BYTES"))
    options = parser.parse_args()
    known = networks(are_small=options.small)
    if options.one:
        name, nbytes = options.one
        sys.stdout.write(json.dumps(train(known[name], int(nbytes) or None)) + "\n")
        return 0
    return _keep(options.result, options.networks or [*known], are_small=options.small)


def _keep(path: Path, names: Sequence[str], *, are_small: bool) -> int:
    device, host = torch.cuda.get_device_name(), asdict(describe_machine())
    head = {"device": device, "host": host, "card": _CARD, "are_small": are_small}
    before = json.loads(path.read_text()) if path.exists() else {}
    known = before["runs"] if before.items() >= head.items() else []
    runs = []
    for run in study(names, known, are_small=are_small):
        runs.append(run)
        write_text(path, to_json({**head, "runs": runs}))  # each time: a study that is ended leaves what it has
        write_text(path.with_suffix(".md"), page({**head, "runs": runs}))
        print_result(describe(run))
    return int(any(map(has_failed, runs)))


if __name__ == "__main__":
    sys.exit(main())
