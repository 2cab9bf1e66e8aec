"""Opens what a session runs on: the requested tier with its link and limits, and the engine that moves bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lmswap.errors import OptionError
from lmswap.hardware.device import default_tier
from lmswap.hardware.local_ranks import LocalRanks, may_have_neighbours
from lmswap.hardware.measure import describe_machine, describe_share, locate_tier
from lmswap.hardware.peer import describe_peer
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Machine
from lmswap.options import Options
from lmswap.runtime import _C
from lmswap.runtime.tiers import open_tier
from lmswap.session.plan_file import PinnedPlans
from lmswap.torch_compat.caching_allocator import allocator_settings

# What verify=True checks and does not check, by compiler.
WHAT_VERIFY_DOES = {
    "fx": "verify=True: each graph also runs without swaps; that, its copies and checks are part of the measured times",
    "inductor": "verify=True checks the transfers only: a step that Inductor compiles without copies in it may fuse "
    "otherwise, and differ in the last bits; compiler='fx' compares results too",
    "eager": "verify=True: under saved-tensor hooks the model's own code runs, once; what it saves stays on the device "
    "too, and is compared bitwise with what the backward takes back: nothing else can differ",
}


@dataclass(frozen=True)
class Opened:
    """A model's tier, its location, the machine as far as the model may use it, and its engine."""

    tier: str
    where: str
    machine: Machine
    native: _C.Engine
    node: LocalRanks | None  # whose ranks measure and plan together


def open_device(device: torch.device, options: Options, pinned: PinnedPlans | None) -> Opened:
    """Measure what ``options`` request on ``device``, and open the engine that moves its bytes.

    Raises:
        OptionError: ``device`` has no such tier, or nothing of it is left to use.
        PlanMismatch: the ``pinned`` plans are for another kind of device.
        TierError, DriverError: see `open_engine`.
    """
    _check_allocator(device)
    tier = resolve_tier(options.tier, device)
    where = locate(tier, device, options)
    node = LocalRanks.here() if options.together else None
    measured = describe_machine(device, tier, where) if node is None else describe_share(device, tier, where, node)
    machine = as_requested(measured, tier, options)
    if pinned is not None:
        pinned.check_device(machine)
    return Opened(tier, where, machine, open_engine(device, tier, where, machine, options), node)


def describe_choices(options: Options, device: torch.device, opened: Opened) -> Iterator[str]:
    """Yield sentences for reports on choices made for the user and on effects of options they may not expect."""
    if opened.tier == "peer":
        yield f"tier: swapped tensors go to {describe_peer(device, opened.where)}"
    elif opened.tier != "disk" and options.disk_directory is not None:
        yield f"disk_directory is not used: swapped tensors go to tier '{opened.tier}' here"
    sample_bytes = opened.machine.tier(opened.tier).sample_bytes
    if sample_bytes is not None:
        yield (
            f"the {opened.tier} tier has room for {format_bytes(sample_bytes)}: its link was measured with so little, "
            "and seconds of larger copies are an estimate"
        )
    if options.verify:
        yield WHAT_VERIFY_DOES[options.compiler]
    if opened.node is not None:
        yield f"measured and planned together: {opened.node.count} ranks of this machine swap at once"
    elif may_have_neighbours():
        yield (
            "how many of the ranks are on this machine is not known: each takes its memory, disk and links for its "
            "own; set LOCAL_WORLD_SIZE, as torchrun does, or give each a host_budget"
        )


def resolve_tier(tier: str, device: torch.device) -> str:
    """Return the tier of a model on ``device``.

    Raises:
        OptionError: the device has no such tier.
    """
    if tier == "auto":
        return default_tier(device.type)
    if tier == "host" and device.type == "cpu":
        raise OptionError("tier 'host' on a CPU model would move memory to memory; use tier='disk' or 'auto'")
    if tier == "device" and device.type == "cpu":
        raise OptionError("tier 'device' is spare memory of a GPU; the model lies on the CPU")
    return tier


def locate(tier: str, device: torch.device, options: Options) -> str:
    """Return the location of the requested tier; raises as `locate_tier`."""
    if tier == "peer":
        return locate_tier(device, tier, options.peer, options.host_budget_bytes)
    return locate_tier(device, tier, options.disk_directory)


def as_requested(machine: Machine, tier: str, options: Options) -> Machine:
    """Return ``machine`` with the link to emulate, and its tier limited to what may be used.

    Raises:
        OptionError: nothing of the tier is left to use.
    """
    found = machine.tier(tier)
    link = options.link.over(found.link) if options.link else found.link
    limits = [found.capacity_bytes]
    if options.host_budget_bytes is not None:
        limits.append(options.host_budget_bytes)
    if tier == "device" and options.budget_bytes is not None:
        limits.append(found.capacity_bytes - options.budget_bytes)
        if limits[-1] <= 0:
            raise OptionError(
                f"tier='device' has nothing to spare: {format_bytes(found.capacity_bytes)} of the device are free, and "
                f"the budget is {format_bytes(options.budget_bytes)}"
            )
    return replace(machine, tiers=(replace(found, link=link, capacity_bytes=min(limits)),))


def open_engine(device: torch.device, tier: str, where: str, machine: Machine, options: Options) -> _C.Engine:
    """Open an engine with its one tier, at ``where``.

    Raises:
        TierError: the tier's memory or directory cannot be used.
        DriverError: the device, or the other GPU, cannot be used.
    """
    link = options.link
    native = _C.Engine(
        driver="cuda" if device.type == "cuda" else "host",
        device=device.index or 0,
        out_bytes_per_second=link.out_bytes_per_second if link else 0.0,
        in_bytes_per_second=link.in_bytes_per_second if link else 0.0,
        shared_link=(link.shared_file if link else None) or "",
        audits=options.verify,
        wipes=options.wipe,
    )
    open_tier(native, tier, machine.tier(tier).capacity_bytes, where)
    return native


def _check_allocator(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "pluggable":
        raise OptionError(
            "memory of the GPU comes from a pluggable allocator (change_current_allocator), which does not report to "
            "torch what it holds: no budget could be kept; train with torch's own"
        )


def has_places(device: torch.device, options: Options) -> bool:
    """Whether steps of a model on ``device`` run in an arena, each tensor at its offset.

    They do if every allocation is known beforehand: in graphs of single ops, with torch's own allocator without
    settings. Reference runs of verification have no offsets.
    """
    if device.type != "cuda" or options.compiler != "fx" or options.verify:
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    settings = allocator_settings()
    splits_as_expected = not settings["expandable_segments"] and settings["max_split_size"] == -1
    rounds_as_expected = not any(settings["roundup_power2_divisions"].values())
    return splits_as_expected and rounds_as_expected
