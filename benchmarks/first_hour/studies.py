"""Networks trained in several ways, each network in a process of its own: what a budget costs, and beside what.

``python -m benchmarks.first_hour.studies STUDY FILE`` trains the networks of one study and keeps each way's figures as
soon as they are there:

- headline: the 3D U-Net at the larger size in the memory that plain torch reserves for the smaller, fp32 and bf16
- stalls: the smaller at 70, 50 and 40 %, each with a Kineto trace of steady steps beside lmswap's report
- peers: what users would take instead, each at its own peak, and lmswap within that peak
- links: the larger in the memory of the smaller, over the machine's own link and paced to PCIe 3
- speed: six networks without a budget and within 70, 50 and 30 %, and a step of some 10 ms without a budget
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compact import to_json
from benchmarks.first_hour.networks import SHARES, Network, budgets, few_images, gpt_1b, monai_unet, networks, unet3d
from benchmarks.first_hour.speed import NO_BUDGET, PLAIN, PLAIN_AGAIN, Wrapper, attempt, rows, train
from benchmarks.peers.tasks import Task
from benchmarks.peers.ways import PEERS
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device
from lmswap.reporting.text import print_result

Runs = Iterator[dict[str, Any]]
Study = dict[str, Callable[[], Runs]]  # by name of a network
_BF16 = torch.bfloat16
_STALL_SHARES = (0.7, 0.5, 0.4)
_PEERS = {"torch.checkpoint": 0, "torch.save_on_cpu": 0, "torch.memory_budget": 50}  # with their dials


def within_shares(network: Network, shares: Sequence[float], traces: Path | None = None) -> Runs:
    """Plain torch twice, no budget, and budgets that are ``shares`` of what a plain step reserves."""
    plain = {"way": PLAIN, **train(network, None, traces=_in(traces, "plain"))}
    yield plain
    yield attempt(PLAIN_AGAIN, plain, network, None)
    yield attempt(NO_BUDGET, plain, network, {"budget": "auto"}, traces=_in(traces, "no_budget"))
    for share, nbytes in budgets(plain["between_bytes"], plain["reserved_bytes"], shares).items():
        yield attempt(f"{share:.0%}", plain, network, {"budget": nbytes}, traces=_in(traces, f"{share:.0%}"))


def in_memory_of(smaller: Network, network: Network, traces: Path | None = None) -> Runs:
    """``network`` within what plain torch reserves for ``smaller``, beside plain torch and no budget."""
    small = train(smaller, None)
    yield {"way": f"{PLAIN}, the smaller size", **small}
    plain = {"way": PLAIN, **train(network, None)}
    yield plain
    yield attempt(PLAIN_AGAIN, plain, network, None)
    within = {"budget": small["reserved_bytes"]}
    yield attempt("in the smaller's memory", plain, network, within, traces=_in(traces, "budget"))
    yield attempt(NO_BUDGET, plain, network, {"budget": "auto"}, traces=_in(traces, "no_budget"))


def beside_peers(network: Network, peers: Mapping[str, tuple[Network, Wrapper]]) -> Runs:
    """Plain torch twice, each of ``peers`` at its own peak, and lmswap within that peak."""
    plain = {"way": PLAIN, **train(network, None)}
    yield plain
    yield attempt(PLAIN_AGAIN, plain, network, None)
    for name, (changed, wrap) in peers.items():
        peer = attempt(name, plain, changed, None, wrap=wrap)
        yield peer
        if "reserved_bytes" in peer:
            yield attempt(f"lmswap within the peak of {name}", plain, network, {"budget": peer["reserved_bytes"]})


def over_links(smaller: Network, network: Network, traces: Path | None = None) -> Runs:
    """``network`` in the memory of ``smaller`` over the machine's own link and PCIe 3, by two policies."""
    budget = train(smaller, None)["reserved_bytes"]
    plain = {"way": PLAIN, **train(network, None, traces=_in(traces, "plain"))}
    yield plain
    for link in (None, "pcie3"):
        for policy in ("tflms", "auto"):
            way = f"{policy}, {'paced to PCIe 3' if link else 'own link'}"
            options = {"budget": budget, "policy": policy, "link": link}
            yield attempt(way, plain, network, options, traces=_in(traces, way.replace(" ", "_")))


def _torch_peers(network: Network) -> dict[str, tuple[Network, Wrapper]]:
    task = Task(network.make_model, network.make_batch, network.blocks)

    def wrapper(name: str, percent: int) -> Wrapper:
        return lambda model: PEERS[name].apply(model, task, percent)

    return {name: (network, wrapper(name, percent)) for name, percent in _PEERS.items()}


def studies(
    sizes: tuple[int, int], *, are_small: bool, traces: Path | None
) -> dict[str, dict[str, Callable[[], Runs]]]:
    """By name of study and network, what trains it."""
    small, large = sizes
    known = networks(are_small=are_small)
    gpt = known["gpt"] if are_small else gpt_1b()
    peers: Study = {
        "unet3d": partial(beside_peers, unet3d(small), _torch_peers(unet3d(small))),
        "gpt_1b": partial(beside_peers, gpt, _torch_peers(gpt)),
    }
    if importlib.util.find_spec("monai") is not None:
        checkpointed = {"monai.CheckpointUNet": (monai_unet(small, checkpoints=True), nullcontext)}
        peers["monai_unet"] = partial(beside_peers, monai_unet(small), checkpointed)
    return {
        "headline": {
            "unet3d": partial(in_memory_of, unet3d(small), unet3d(large), _in(traces, "fp32")),
            "unet3d_bf16": partial(in_memory_of, unet3d(small, _BF16), unet3d(large, _BF16), _in(traces, "bf16")),
        },
        "stalls": {"unet3d": partial(within_shares, unet3d(small), _STALL_SHARES, traces)},
        "peers": peers,
        "links": {"unet3d": partial(over_links, unet3d(small), unet3d(large), traces)},
        "speed": {
            **{name: partial(within_shares, network, SHARES) for name, network in known.items()},
            "resnet50_few": partial(within_shares, few_images(are_small=are_small), ()),
        },
    }


def _in(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None else None


def main() -> int:
    """Run one study, or, for it, one of its networks; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=studies((0, 0), are_small=True, traces=None))
    parser.add_argument("result", type=Path)
    parser.add_argument("--sizes", nargs=2, type=int, default=(144, 192), metavar="N", help="of the U-Net (144 192)")
    parser.add_argument("--small", action="store_true", help="networks for an emulated GPU")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--one", metavar="NETWORK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    traces = options.result.parent / "traces"
    known = studies(tuple(options.sizes), are_small=options.small, traces=traces)[options.study]
    if unknown := set(options.networks or ()) - known.keys():
        parser.error(f"{options.study} has {', '.join(known)}, not {', '.join(sorted(unknown))}")
    if options.one:
        for run in known[options.one]():
            sys.stdout.write(json.dumps({"network": options.one, **run}) + "\n")
            sys.stdout.flush()
        return 0
    command = [options.study, str(options.result), "--sizes", *map(str, options.sizes), *["--small"] * options.small]
    code = keep(options.result, command, options.networks or [*known])
    if traces.exists():
        with tarfile.open(options.result.with_suffix(".traces.tar"), "w") as archive:
            archive.add(traces, "traces")
    return code


def keep(path: Path, command: Sequence[str], names: Sequence[str]) -> int:
    """Run the networks ``names``, and write to ``path`` what is known after each way."""
    device = describe_device(torch.device("cuda", 0))
    head = {"device": device.name, "driver": device.driver, "host": asdict(describe_machine()), "command": [*command]}
    runs: dict[str, list[dict[str, Any]]] = {}
    has_failed = False
    for name in names:
        runs[name] = []
        program = [sys.executable, "-m", "benchmarks.first_hour.studies", *command, "--one", name]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                runs[name].append(json.loads(line))
                write_text(path, to_json({**head, "networks": runs}))
                print_result([*rows(runs[name])][-1])
        has_failed |= process.returncode != 0 or any("failure" in run for run in runs[name])
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
