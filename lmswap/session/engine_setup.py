"""Opens what a session runs on: the requested tier with its link and limits, and the engine that moves bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from lmswap.errors import OptionError
from lmswap.hardware.device import default_tier
from lmswap.hardware.local_ranks import LocalRanks, may_have_local_ranks
from lmswap.hardware.measure import assume_machine, describe_machine, describe_share, locate_tier
from lmswap.hardware.peer import describe_peer
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.machine import Machine, Tier
from lmswap.options import Options
from lmswap.planner import KEEP_WHAT_FITS
from lmswap.runtime import _C
from lmswap.runtime.storage import held_bytes
from lmswap.runtime.tiers import open_tier
from lmswap.session.plan_file import PinnedPlans
from lmswap.torch_compat.autograd import disable_autocast
from lmswap.torch_compat.caching_allocator import allocator_settings
from lmswap.torch_compat.operators import eager_dispatch
from lmswap.training_state import TrainingState

# What verify=True checks and does not check, by compiler.
WHAT_VERIFY_DOES = {
    "fx": "verify=True: each graph also runs without swaps; that, its copies and checks are part of the measured times",
    "inductor": "verify=True checks the transfers only: a step that Inductor compiles without copies in it may fuse "
    "otherwise, and differ in the last bits; compiler='fx' compares results too",
    "eager": "verify=True: under saved-tensor hooks the model's own code runs, once; what it saves stays on the device "
    "too, and is compared bitwise with what the backward takes back: nothing else can differ",
}


class KnownMachine:
    """The machine as far as a model may use it, with assumed rates until a plan needs measured ones."""

    def __init__(self, now: Machine, measure: Callable[[], Machine]) -> None:
        """``now`` is what is known; ``measure`` returns it measured."""
        self.now, self._measure = now, measure

    def measured(self) -> Machine:
        """Return the machine with measured rates; the first call may measure them."""
        if not self.now.is_measured:
            # Also in the middle of a trace, under the caller's autocast.
            with eager_dispatch(), disable_autocast(), torch.no_grad():
                self.now = self._measure()
        return self.now


@dataclass(frozen=True)
class Opened:
    """A model's tier, its location, the machine, and its engine."""

    tier: str
    where: str
    machine: KnownMachine
    native: _C.Engine
    node: LocalRanks | None  # whose ranks measure and plan together


def open_device(device: torch.device, options: Options, pinned: PinnedPlans | None) -> Opened:
    """Open the engine that moves the bytes of ``device`` as ``options`` request.

    What a plan needs to know of the machine is measured here only if every plan needs it: a GPU's launch overhead is
    part of each prediction, ranks measure together, and an emulated link must be slower than the real one. Else a step
    that fits as it is needs nothing.

    Raises:
        OptionError: ``device`` has no such tier, or nothing of it is left to use.
        PlanMismatch: the ``pinned`` plans are for another kind of device.
        TierError, DriverError: see `open_engine`.
    """
    _check_allocator(device)
    tier = resolve_tier(options.tier, device)
    where = locate(tier, device, options)
    node = LocalRanks.here() if options.together else None
    is_needed = device.type == "cuda" or options.link is not None or options.policy not in KEEP_WHAT_FITS
    if node is not None:
        found = describe_share(device, tier, where, node)
    else:
        found = (describe_machine if is_needed else assume_machine)(device, tier, where)
    machine = as_requested(found, tier, options)
    if pinned is not None:
        pinned.check_device(machine)
    known = KnownMachine(machine, lambda: as_requested(describe_machine(device, tier, where), tier, options))
    return Opened(tier, where, known, open_engine(device, tier, where, machine, options), node)


def describe_choices(options: Options, device: torch.device, opened: Opened, state: TrainingState) -> Iterator[str]:
    """Yield sentences for reports on choices made for the user and on effects of options they may not expect."""
    if state.optimizers and device.type == "cpu" and options.weights == "auto":
        has_graphs = can_swap_weights(options)
        why = "the tier has no room for them" if has_graphs else "only graphs of compiler='fx' could fetch them"
        yield f"parameters stay resident, and do not count: {why}"
    if opened.tier == "peer":
        yield f"tier: swapped tensors go to {describe_peer(device, opened.where)}"
    elif opened.tier != "disk" and options.disk_directory is not None:
        yield f"disk_directory is not used: swapped tensors go to tier '{opened.tier}' here"
    yield from notes_on_sample(opened.machine.now.tier(opened.tier))
    if options.verify:
        yield WHAT_VERIFY_DOES[options.compiler]
    if opened.node is not None:
        yield f"measured and planned together: {opened.node.count} ranks of this machine swap at once"
    elif may_have_local_ranks():
        yield (
            "how many of the ranks are on this machine is not known: each takes its memory, disk and links for its "
            "own; set LOCAL_WORLD_SIZE, as torchrun does, or give each a host_budget"
        )


def notes_on_sample(tier: Tier) -> Iterator[str]:
    """Yield a sentence for reports if ``tier`` had less room than its measurement usually takes."""
    if tier.sample_bytes is not None:
        yield (
            f"the {tier.name} tier has room for {format_bytes(tier.sample_bytes)}: its link was measured with so "
            "little, and seconds of larger copies are an estimate"
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


def complete_options(options: Options, opened: Opened, device: torch.device, state: TrainingState) -> Options:
    """Return ``options`` with the tier that was chosen; on a CPU the training state of optimizers has one budget.

    Raises:
        OptionError: the tier cannot hold that state.
    """
    options = replace(options, tier=opened.tier)
    if state.updates_on_cpu and options.tier != "host":
        raise OptionError(f"optimizer_device='cpu' needs tier='host', not tier='{options.tier}'")
    if state.optimizers and options.tier not in ("host", "disk"):
        raise OptionError(f"optimizer= needs tier='host' or 'disk', not tier='{options.tier}'")
    may_swap = device.type == "cpu" and bool(state.optimizers) and options.weights == "auto"
    if not (may_swap and can_swap_weights(options)):
        return options
    weight_bytes = sum(map(held_bytes, {id(each): each for each in state.parameters().values()}.values()))
    has_room = weight_bytes <= opened.machine.now.tier(opened.tier).capacity_bytes
    return replace(options, weights="swap") if has_room else options


def can_swap_weights(options: Options) -> bool:
    """Whether graphs can fetch weights from the tier: they are lmswap's own, and the device addresses its memory."""
    return options.compiler == "fx" and options.tier in ("host", "disk")


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
