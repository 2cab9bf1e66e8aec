"""What does a slower link cost? One size and budget over links with the case study's ratios of transfer to compute.

The ratio is that of a forward pass which sends out all that it saves: saved bytes / (link's rate × forward seconds),
3.3 on x86 with PCIe gen3 and 0.5 on the AC922 with NVLink 2.0. Both parts are measured on the step that is swapped
later, in the same graphs with unlimited memory, and the link is paced to the rate that gives the ratio. So what is
compared is how a plan deals with a link, and not one device with another.
"""

from __future__ import annotations

import torch

from benchmarks.case_study.published import SYSTEMS, System
from benchmarks.case_study.results import Ladder, LinkRuns, Links, without_curves
from benchmarks.case_study.runner import Runner
from benchmarks.unet3d.run import Run
from benchmarks.unet3d.study import Failure
from lmswap.hardware.measure import describe_machine
from lmswap.ir.machine import Link

POLICIES = ("auto", "tflms")
# The device's own link is trusted to give this share of what it was measured to give at its best.
_TRUSTED_SHARE = 0.95
_COPY_BYTES = 64 * 2**20


def compare_links(runner: Runner, ladder: Ladder) -> Links | None:
    """Trains the large size over the link of each system; None where ``ladder`` has nothing to set the ratio by."""
    settings = runner.settings
    unswapped = ladder.of(settings.large, "unswapped")
    if not unswapped or ladder.budget_bytes is None:
        return None
    fastest = min(unswapped, key=lambda run: run.seconds_per_step)
    assert fastest.swapping is not None
    saved_bytes, forward_seconds = fastest.swapping.saved_bytes, fastest.swapping.forward_seconds
    found = []
    for system in SYSTEMS:
        wanted = saved_bytes / (system.ratio * forward_seconds)
        link, tier, bytes_per_second = _choose_link(settings.device, wanted)
        runner.console.print(f"{system.name}: {describe_link(link, tier, bytes_per_second)}", highlight=False)
        runs: list[Run] = []
        failures: list[Failure] = []
        for repeat in range(settings.repeats):
            runner.attempt(runner.configuration(settings.large, "none"), runs, failures)
            for policy in POLICIES:
                if repeat and any(failure.configuration.policy == policy for failure in failures):
                    continue
                limits = {"budget_bytes": ladder.budget_bytes, "cap_bytes": ladder.cap_bytes}
                swapped = runner.configuration(settings.large, policy, link=link, tier=tier, **limits)
                runner.attempt(swapped, runs, failures)
        found.append(
            LinkRuns(
                system=system.key,
                wanted_bytes_per_second=wanted,
                bytes_per_second=bytes_per_second,
                link=link,
                tier=tier,
                ratio=saved_bytes / (bytes_per_second * forward_seconds),
                runs=_with_pictures(runs),
                failures=tuple(failures),
            )
        )
    return Links(saved_bytes, forward_seconds, tuple(found))


def describe_link(link: str | None, tier: str, bytes_per_second: float) -> str:
    """In words: is it emulated, and how fast is it?"""
    rate = f"{bytes_per_second / 1e9:.2f} GB/s each way"
    if link is None:
        return f"the device's own link, {rate}"
    held = ", swapped tensors held in spare device memory" if tier == "device" else ""
    return f"emulated: copies paced to {rate}{held}"


def format_rate(bytes_per_second: float) -> str:
    """A rate each way as `lmswap.enable` reads it."""
    return f"{bytes_per_second / 1e9:.4g}GB/s"


def _choose_link(device: str, wanted: float) -> tuple[str | None, str, float]:
    """(link, tier, bytes per second): paced where the real link is faster; as it is where a CPU's is not."""
    tier = "disk" if device == "cpu" else "host"
    own = describe_machine(torch.device(device), tier).tier(tier).link
    own_bytes_per_second = _bytes_per_second(own)
    if wanted <= _TRUSTED_SHARE * own_bytes_per_second:
        return format_rate(wanted), "auto", wanted
    if device == "cpu":
        return None, "auto", own_bytes_per_second
    return format_rate(wanted), "device", wanted


def _bytes_per_second(link: Link) -> float:
    """Of the slower way, in large copies."""
    return min(_COPY_BYTES / rate.seconds(_COPY_BYTES) for rate in (link.out_rate, link.in_rate))


def _with_pictures(runs: list[Run]) -> tuple[Run, ...]:
    """The runs with the spans of the one that is drawn: the last of policy auto."""
    drawn = [run for run in runs if run.configuration.policy == "auto"][-1:]
    return tuple(without_curves(run, keep_spans=run in drawn) for run in runs)


def system_of(links: LinkRuns) -> System:
    """The system whose ratio a link was set to."""
    return next(system for system in SYSTEMS if system.key == links.system)
