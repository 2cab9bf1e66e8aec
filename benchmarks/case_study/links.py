"""What does a slower link cost? One size and budget over links with the case study's ratios of transfer to compute.

The ratio is that of a forward pass which sends out all that it saves: saved bytes / (link's rate × forward seconds),
3.3 on x86 with PCIe gen3 and 0.5 on the AC922 with NVLink 2.0. Both parts are measured on the step that is swapped
later, in the same graphs with unlimited memory, and the link is paced to the rate that gives the ratio. So what is
compared is how a plan deals with a link, and not one device with another. On a GPU the links that lmswap knows by name
are compared too, at their own rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.case_study.published import SYSTEMS
from benchmarks.case_study.results import Ladder, LinkRuns, Links, without_curves
from benchmarks.case_study.runner import Runner, Trial
from lmswap.bench.unet3d.measured import Failure, Run, Swapping
from lmswap.hardware.device import default_device, default_tier
from lmswap.hardware.measure import describe_machine
from lmswap.ir.emulation import PRESETS, EmulatedLink
from lmswap.ir.machine import Link

# The device's own link is trusted to give this share of what it was measured to give at its best.
_TRUSTED_SHARE = 0.95
TOO_FAST = "as this device copies nothing as fast, its own memory included"


def compare_links(runner: Runner, ladder: Ladder) -> Links | None:
    """Trains the large size over every link; None where ``ladder`` has nothing to set the ratios by.

    Each repeat goes through all links; only the first also has TFLMS' policy, whose order of magnitude is enough.
    """
    settings = runner.settings
    free = ladder.of(settings.large, "unswapped")
    basis = basis_of(free)
    if basis is None or ladder.budget_bytes is None:
        return None
    links = choose_links(settings.device, basis)
    unswapped: list[Run] = []
    runs: dict[str, list[Run]] = {link.name: [] for link in links}
    failures: dict[str, list[Failure]] = {link.name: [] for link in links}
    unswapped_failures: list[Failure] = []

    def trial(link: LinkRuns, policy: str, repeat: int) -> Trial:
        over = {"link": link.link, "tier": link.tier}
        swapped = runner.configuration(settings.large, policy, is_planned=repeat > 0, **over, **ladder.limits)
        return Trial(swapped, runs[link.name], failures[link.name])

    for link in links:
        runner.console.print(f"{link.name}: {describe_link(link)}", highlight=False)
    if too_fast := [name for name in named_links(settings.device) if name not in runs]:
        runner.console.print(f"{', '.join(too_fast)}: left out, {TOO_FAST}", highlight=False)
    for repeat in range(settings.repeats):
        beside = Trial(runner.configuration(settings.large, "none"), unswapped, unswapped_failures)
        swapped = [trial(link, "auto", repeat) for link in links]
        if repeat == 0:
            swapped += [trial(link, "tflms", repeat) for link in links if link.name not in PRESETS]
        runner.compare([beside, *swapped], free[0].peak_bytes + len(swapped) * ladder.budget_bytes)
    return Links(
        saved_bytes=basis.saved_bytes,
        forward_seconds=basis.forward_seconds,
        unswapped=tuple(map(without_curves, unswapped)),
        links=tuple(
            replace(link, runs=_with_picture(runs[link.name]), failures=tuple(failures[link.name])) for link in links
        ),
        failures=tuple(unswapped_failures),
    )


def basis_of(unswapped: Sequence[Run]) -> Swapping | None:
    """What ratios are set by: the shortest forward pass of some runs of the same graphs without a budget."""
    passes = [run.swapping for run in unswapped if run.swapping is not None]
    return min(passes, key=lambda swapping: swapping.forward_seconds, default=None)


def choose_links(device: str, basis: Swapping) -> list[LinkRuns]:
    """The links to compare, without runs: each system's by its ratio, on a GPU also those with a name.

    A system's that nothing here copies as fast as is the device's own; one with a name is left out.
    """
    at_once = basis.saved_bytes / basis.forward_seconds
    links = []
    for system in SYSTEMS:
        rate = at_once / system.ratio
        if (tier := _tier_as_fast(device, EmulatedLink(rate, rate))) is not None:
            links.append(LinkRuns(system.key, rate, format_rate(rate), tier, system.ratio))
        else:
            own = _own_link(device, default_tier(device))
            rate = min(own.out_rate.bytes_per_second, own.in_rate.bytes_per_second)
            links.append(LinkRuns(system.key, rate, None, "auto", at_once / rate))
    for name in named_links(device):
        rate = min(PRESETS[name].out_bytes_per_second, PRESETS[name].in_bytes_per_second)
        if (tier := _tier_as_fast(device, PRESETS[name])) is not None:
            links.append(LinkRuns(name, rate, name, tier, at_once / rate))
    return links


def named_links(device: str) -> tuple[str, ...]:
    """Those that have a name and that a device of this type is set beside, if it copies as fast."""
    return () if device == "cpu" else tuple(PRESETS)


def format_rate(bytes_per_second: float) -> str:
    """A rate each way as `lmswap.enable` reads it."""
    return f"{bytes_per_second / 1e9:.4g}GB/s"


def describe_link(link: LinkRuns) -> str:
    """In words: is it emulated, and how fast is it?"""
    rate = f"{link.bytes_per_second / 1e9:.2f} GB/s each way"
    if link.link is None:
        return f"the device's own link, {rate} by itself"
    held = ", swapped tensors held in spare device memory" if link.tier == "device" else ""
    return f"emulated: copies paced to {rate}{held}"


def _tier_as_fast(device: str, wanted: EmulatedLink) -> str | None:
    """Over which tier copies can be paced to ``wanted``: the device's own, else spare memory of a GPU; None if none."""
    tiers = {"auto": default_tier(device)} | ({} if device == "cpu" else {"device": "device"})
    for asked, tier in tiers.items():
        own = _own_link(device, tier)
        sends = wanted.out_bytes_per_second <= _TRUSTED_SHARE * own.out_rate.bytes_per_second
        if sends and wanted.in_bytes_per_second <= _TRUSTED_SHARE * own.in_rate.bytes_per_second:
            return asked
    return None


def _own_link(device: str, tier: str) -> Link:
    return describe_machine(default_device(), tier).tier(tier).link


def _with_picture(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs with the spans of the one that is drawn: the last of policy auto."""
    drawn = max((n for n, run in enumerate(runs) if run.configuration.policy == "auto"), default=None)
    return tuple(without_curves(run, keep_spans=n == drawn) for n, run in enumerate(runs))
