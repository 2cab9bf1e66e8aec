"""The cost of slower links: one size and budget over links with the case study's ratios of transfer to compute.

The ratio is that of a forward pass which sends out all that it saves: saved bytes / (link's rate × forward seconds),
3.3 on x86 with PCIe gen3 and 0.5 on the AC922 with NVLink 2.0. Both parts are measured on the step that is swapped
later, in the same graphs with unlimited memory, and the link is paced to the rate that gives the ratio. So what is
compared is how a plan deals with a link, and not one device with another. On a GPU the links that lmswap knows by name
are compared too, at their own rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.case_study.published import SYSTEMS
from benchmarks.case_study.results import Ladder, LinkRuns, Links, without_curves
from benchmarks.case_study.runner import Runner, Trial
from benchmarks.unet3d.measured import Failure, Run, Swapping
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
    if too_fast := left_out(settings.device, links):
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
    """Figures of the run with the shortest forward pass, by which the ratios are set; None without any."""
    passes = [run.swapping for run in unswapped if run.swapping is not None]
    return min(passes, key=lambda swapping: swapping.forward_seconds, default=None)


def choose_links(device: str, basis: Swapping) -> list[LinkRuns]:
    """The links to compare, without runs: each system's by its ratio, on a GPU also those with a name.

    A system's that nothing here copies as fast as is the device's own; one with a name is left out.
    """
    at_once = basis.saved_bytes / basis.forward_seconds
    own = _link_of(default_tier(device))
    tiers = {"auto": own} if device == "cpu" else {"auto": own, "device": _link_of("device")}
    links = []
    for system in SYSTEMS:
        rate = at_once / system.ratio
        if (tier := _tier_as_fast(tiers, EmulatedLink(rate, rate))) is not None:
            links.append(LinkRuns(system.key, rate, format_rate(rate), tier, system.ratio))
        else:
            rate = min(own.out_rate.bytes_per_second, own.in_rate.bytes_per_second)
            links.append(LinkRuns(system.key, rate, None, "auto", at_once / rate))
    for name, preset in _named_links(device).items():
        if (tier := _tier_as_fast(tiers, preset)) is not None:
            rate = min(preset.out_bytes_per_second, preset.in_bytes_per_second)
            links.append(LinkRuns(name, rate, name, tier, at_once / rate))
    return links


def left_out(device: str, links: Sequence[LinkRuns]) -> list[str]:
    """Names of the links that no tier of ``device`` is fast enough to emulate: those that ``links`` lack."""
    return [name for name in _named_links(device) if all(link.name != name for link in links)]


def format_rate(bytes_per_second: float) -> str:
    """Formats a rate as the option ``link`` of `lmswap.enable`, the same each way."""
    return f"{bytes_per_second / 1e9:.4g}GB/s"


def describe_link(link: LinkRuns) -> str:
    """Describes a link: measured or emulated, its tier, and its rates in GB/s."""
    rate = f"{link.bytes_per_second / 1e9:.2f} GB/s each way"
    if link.link is None:
        return f"the device's own link, {rate} by itself"
    held = ", swapped tensors held in spare device memory" if link.tier == "device" else ""
    return f"emulated: copies paced to {rate}{held}"


def _named_links(device: str) -> Mapping[str, EmulatedLink]:
    """By name: the links with which a device of type "cpu" or "cuda" is compared."""
    return {} if device == "cpu" else PRESETS


def _tier_as_fast(tiers: Mapping[str, Link], wanted: EmulatedLink) -> str | None:
    """The first of ``tiers``, in order of preference, whose link can be paced to ``wanted``; None if none can."""
    for tier, own in tiers.items():
        sends = wanted.out_bytes_per_second <= _TRUSTED_SHARE * own.out_rate.bytes_per_second
        if sends and wanted.in_bytes_per_second <= _TRUSTED_SHARE * own.in_rate.bytes_per_second:
            return tier
    return None


def _link_of(tier: str) -> Link:
    return describe_machine(default_device(), tier).tier(tier).link


def _with_picture(runs: Sequence[Run]) -> tuple[Run, ...]:
    """``runs`` without spans, except for the one that is drawn: the last of policy auto."""
    drawn = max((n for n, run in enumerate(runs) if run.configuration.policy == "auto"), default=None)
    return tuple(without_curves(run, keep_spans=n == drawn) for n, run in enumerate(runs))
