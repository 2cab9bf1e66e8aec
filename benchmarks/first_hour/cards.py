"""Does a card that has a budget and 2 % more run the step? Six networks, each within 70, 50 and 30 %.

Of a hundred per cent, which is what their steps take beyond what is there between steps: parameters and the optimizer's
state. Each network is trained in a process of its own for each share, beside plain torch on all there is.
``python -m benchmarks.first_hour.cards FILE``; with ``--small`` networks are as small as an emulated GPU needs them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lmswap
from benchmarks.programs.models import Gpt, VisionTransformer, resnet50
from lmswap.bench.compact import to_json
from lmswap.bench.unet3d.files import write_text
from lmswap.bench.unet3d.loss import weighted_dice_loss
from lmswap.bench.unet3d.network import UNet3d
from lmswap.bench.unet3d.study import describe_machine
from lmswap.errors import PlanInfeasible
from lmswap.reporting.text import print_result

_SHARES = (0.7, 0.5, 0.3)
_CARD = 1.02  # of the budget: what torch may take, beside the context
_STEPS = 6  # after the fourth plans are final
_DIGEST_BYTES = 16
_REFUSAL = f"{PlanInfeasible.__module__}.{PlanInfeasible.__name__}:"
_VOXELS = (144, 144, 144)  # of a scan, on a card and emulated


@dataclass(frozen=True)
class Network:
    """A model, the tensors of one step, and its loss of what the model returns and the last of them."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    is_autocast: bool = False  # to bfloat16, with weights in float32


def _scan(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return torch.randn(1, 4, *_VOXELS).to(dtype), (torch.rand(1, 3, *_VOXELS) < 0.1).to(dtype)


def _images(count: int, side: int) -> tuple[Tensor, ...]:
    return torch.randn(count, 3, side, side), torch.randint(1000, (count,))


def _texts(count: int, tokens: int, words: int) -> tuple[Tensor, ...]:
    text = torch.randint(words, (count, tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def networks(*, are_small: bool) -> dict[str, Network]:
    """By name; large ones are those of benchmarks/programs.

    Small ones have plans in 30 %: of smaller steps, what is fixed is more than that. The U-Net is one in both.
    """
    images, pixels, texts, tokens, words = (64, 128, 16, 256, 2048) if are_small else (64, 224, 8, 1024, 50257)
    vit = {"layers": 8, "width": 192, "heads": 3} if are_small else {"layers": 12, "width": 768, "heads": 12}
    gpt = {"layers": 10, "width": 192, "heads": 3} if are_small else {"layers": 24, "width": 1024, "heads": 16}
    bf16 = torch.bfloat16
    return {
        "unet3d": Network(UNet3d, _scan, weighted_dice_loss),
        "unet3d_bf16": Network(UNet3d, partial(_scan, bf16), weighted_dice_loss, bf16),
        "resnet50": Network(resnet50, partial(_images, images, pixels), cross_entropy),
        "gpt": Network(
            partial(Gpt, **gpt, tokens=tokens, words=words), partial(_texts, texts, tokens, words), _own_loss
        ),
        "gpt_autocast": Network(
            partial(Gpt, **gpt, tokens=tokens, words=words),
            partial(_texts, texts, tokens, words),
            _own_loss,
            is_autocast=True,
        ),
        "vit": Network(partial(VisionTransformer, **vit, size=pixels), partial(_images, 64, pixels), cross_entropy),
    }


def _own_loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss


def train(network: Network, budget_bytes: int | None) -> dict[str, Any]:
    """Trains on a card of the budget, or plainly on all there is, and says what the allocator did in each step."""
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
        with torch.autocast("cuda", torch.bfloat16, enabled=network.is_autocast):
            loss = network.loss(model(*batch) if network.loss is _own_loss else model(batch[0]), batch[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        steps.append(
            {
                "seconds": time.perf_counter() - started,
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "tensor_bytes": torch.cuda.max_memory_allocated(),
                "retries": torch.cuda.memory_stats()["num_alloc_retries"],
            }
        )
    between_bytes = torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in batch)
    return {"losses": losses, "weights": _digest(model), "between_bytes": between_bytes, "steps": steps}


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def study(names: Sequence[str], known: Sequence[Mapping[str, Any]], *, are_small: bool) -> Iterator[dict[str, Any]]:
    """All runs of the named networks, each in a process of its own; of the ``known`` ones only what failed."""
    ended = {(run["network"], run["share"]): dict(run) for run in known if not has_failed(run)}
    for name in names:
        plain = ended.get((name, None)) or {"network": name, "share": None, **_fresh(name, None, are_small=are_small)}
        yield plain
        if "failure" in plain:
            continue
        between_bytes, peak_bytes = plain["between_bytes"], max(step["reserved_bytes"] for step in plain["steps"])
        for share in _SHARES:
            budget_bytes = int(between_bytes + share * (peak_bytes - between_bytes))
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
    """A run in a line."""
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
    done = subprocess.run([*command, *["--small"] * are_small], capture_output=True, text=True, check=False)
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
