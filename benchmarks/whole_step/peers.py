"""Schedules of other tools as plans of the same simulator, each with the settings that are best for the same peak.

==================  =======================  =========================  ===============================================
name                weights                  gradients                  updates
==================  =======================  =========================  ===============================================
block_swap          the fewest layers        stay                       on the device
zero_offload        stay                     leave in each backward     by the host, after the backward
torchao             stay                     leave in the last          by the host, as gradients arrive
fsdp                the fewest, or all       leave in each backward     by the host, after the backward
megatrain           all layers               leave in each backward     by the host, after the backward
slideformer         all layers               leave in each backward     by the host, as gradients arrive
paged_state         the fewest layers        as weights                 on the device, the fewest chunks streamed
offloaded_inputs    stay                     stay                       on the device
==================  =======================  =========================  ===============================================

* block_swap: musubi-tuner's ``--blocks_to_swap`` with copies in only (diffusion-pipe and OneTrainer have the same):
  frozen weights of some layers, spread evenly, return from the host for each visit and are never copied out.
* zero_offload: ZeRO-Offload (arXiv 2101.06840). bf16 weights are on the device; gradients leave while the backward
  runs; CPU Adam follows, whose new weights are copied in chunk by chunk. Its update delayed by one step changes results
  and is not taken.
* torchao: ``CPUOffloadOptimizer``. As above; ``step()`` updates a parameter once its gradient has arrived, while the
  device may still run the backward. Gradients of several micro-batches are summed on the device, since it can free
  them only without accumulation.
* fsdp: ``fully_shard`` with ``CPUOffloadPolicy`` on one device, of all layers or the fewest that fit: a layer's weights
  are copied in before its forward and its backward; ``optimizer.step()`` follows on the CPU.
* megatrain: MegaTrain (arXiv 2604.05091), all layers through two buffers, CPU Adam after the backward.
* slideformer: SlideFormer (arXiv 2603.16428), all layers through a window, CPU Adam under the backward.
* paged_state: Megatron-Core's chunked state: chunks of optimizer state, spread evenly, are streamed through the device,
  where it is updated. If all of it does not suffice, weights and gradients of layers are streamed as well.
* offloaded_inputs: checkpointing whose saved inputs are offloaded (``offload_to_cpu`` of Fairscale, transformers,
  accelerate), and nothing else.

Each may offload what a forward passes to its backward, and has a window of two to six layers, or chunks of state. CPU
Adam rounds other than the device's: only the schedules that update on the device give plain torch's bits. It runs at
the rate of the host's memory (28 bytes an element): 300 GB/s, the peak of a socket with eight channels of DDR5-4800, or
450 GB/s for GH200's CPU. That is in favour of it: users see 0.22 s for 0.3 billion parameters (DeepSpeed#6695), which
is 38 GB/s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from benchmarks.whole_step.host_updates import GRADIENTS, HostStep, with_gradient_tier, with_host_updates
from benchmarks.whole_step.streaming import layers, saved, state_by_update, streamed, stretch_ends
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.analyze.training_step import Optimizer
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.timeline import Timeline
from lmswap.planner.memory.pack_tier import assign_offsets
from lmswap.planner.simulate import simulate

_SLOTS = (2, 3, 4, 6)


@dataclass(frozen=True)
class Peer:
    """A schedule: which layers' weights are streamed, and who updates.

    ``pages_state``: the device's updates stream chunks of optimizer state, before layers are streamed.
    """

    weights: tuple[Literal["stay", "fewest", "all"], ...] = ("stay",)
    updates: Literal["device", "host after backward", "host under backward"] = "device"
    frozen_only: bool = False
    sums_on_device: bool = False
    pages_state: bool = False
    offloads_saved: tuple[bool, ...] = (False, True)

    @property
    def is_exact(self) -> bool:
        """Whether parameters have plain torch's bits."""
        return self.updates == "device"


PEERS = {
    "block_swap": Peer(("fewest",), frozen_only=True),
    "zero_offload": Peer(updates="host after backward"),
    "torchao": Peer(updates="host under backward", sums_on_device=True),
    "fsdp": Peer(("fewest", "all"), "host after backward"),
    "megatrain": Peer(("all",), "host after backward"),
    "slideformer": Peer(("all",), "host under backward"),
    "paged_state": Peer(("fewest",), pages_state=True),
    "offloaded_inputs": Peer(offloads_saved=(True,)),
}


@dataclass(frozen=True)
class PeerPlan:
    """A plan, with what it is a plan of, and the machine with the tiers that it uses."""

    program: Program
    costs: OpCosts
    machine: Machine
    plan: Plan


@dataclass(frozen=True)
class Setup:
    """What all schedules have in common.

    ``machine`` has a tier "host", whose memory gives CPU Adam ``host_bytes_per_second``; weights and activations of
    fewer bytes than ``min_swap_bytes`` stay.
    """

    optimizer: Optimizer
    machine: Machine
    host_bytes_per_second: float
    min_swap_bytes: int


def best_plan(peer: Peer, steps: Sequence[Program], setup: Setup, budget_bytes: int) -> PeerPlan | None:
    """The fastest plan of a peer within the budget; None if none fits, or there is nothing that it moves.

    Args:
        peer: one of `PEERS`.
        steps: the same training step in ways to choose from: with and without checkpointing.
        setup: the machine and the optimizer.
        budget_bytes: of the step.
    """
    found = [plan for step in steps for plan in _Schedules(peer, step, setup).plans(budget_bytes)]
    return min(found, key=lambda found: found.plan.predicted_seconds, default=None)


class _Schedules:
    def __init__(self, peer: Peer, step: Program, setup: Setup) -> None:
        self._peer, self._setup, self._machine = peer, setup, with_gradient_tier(setup.machine)
        self._host: HostStep | None = None
        if not peer.is_exact:
            self._host = with_host_updates(step, setup.optimizer, sums_on_device=peer.sums_on_device)
        self._program = step if self._host is None else self._host.program
        costs = roofline(self._program, setup.machine)
        self._costs = costs if self._host is None else self._host.costs(costs, [0.0] * len(self._host.chunks))
        self._memory = StepMemory(self._program, self._costs)
        kinds = (BufferKind.WEIGHT, BufferKind.SUMMED_GRADIENT)
        self._ends = stretch_ends(self._program, layers(self._program, kinds[:1], 1))
        streamed_kinds = kinds if peer.pages_state else kinds[:1]
        self._layers = layers(self._program, streamed_kinds, setup.min_swap_bytes, frozen_only=peer.frozen_only)
        self._state = state_by_update(self._program) if peer.pages_state else []
        self._saved = saved(self._program, self._memory.ranges.values(), setup.min_swap_bytes)

    def plans(self, budget_bytes: int) -> Iterator[PeerPlan]:
        """Yield the plans within the budget by all settings."""
        if not self._ends or (self._peer.frozen_only and not self._layers):
            return
        most = len(self._state) + len(self._layers)
        counts = {"stay": range(1), "fewest": range(most + 1), "all": range(most, most + 1)}
        for weights, slots in product(self._peer.weights, _SLOTS):
            for offloads_saved in self._peer.offloads_saved:
                fixed = list(self._gradient_swaps(slots))
                fixed += streamed(self._program, self._saved, self._ends, slots) if offloads_saved else ()
                count = self._fewest(counts[weights], fixed, slots, budget_bytes)
                if count is not None:
                    yield self._plan(fixed + self._streamed(count, slots), budget_bytes)
                if count == counts[weights][0]:
                    break  # there is room for what is saved

    def _fewest(self, counts: range, fixed: list[Swap], slots: int, budget_bytes: int) -> int | None:
        """The fewest of ``counts`` that fit the budget, by bisection; None if the last does not."""

        def fits(count: int) -> bool:
            return self._peak_bytes(fixed + self._streamed(count, slots)) <= budget_bytes

        return counts[bisect_left(counts, True, key=fits)] if fits(counts[-1]) else None

    def _streamed(self, count: int, slots: int) -> list[Swap]:
        """Swaps of ``count`` chunks of state, then layers, spread evenly; and new weights for layers that stay."""
        chunks = _spread(self._state, min(count, len(self._state)))
        chosen = _spread(self._layers, count - len(chunks))
        swaps = self._swaps(chunks, [self._memory.ranges[chunk[0]].uses[-1] + 1 for chunk in chunks], slots)
        swaps += self._swaps(chosen, stretch_ends(self._program, chosen), slots)
        if self._host is not None:
            renewed = {swap.buffer for swap in swaps if swap.first_use >= len(self._program.ops)}
            for number, chunk in enumerate(self._host.chunks):
                swaps += self._host.installs(number, [weight for weight in chunk.weights if weight not in renewed])
        return swaps

    def _swaps(self, groups: Sequence[Sequence[int]], ends: Sequence[int], slots: int) -> list[Swap]:
        ranges = [self._memory.ranges[buffer] for group in groups for buffer in group]
        return list(streamed(self._program, ranges, ends, slots))

    def _gradient_swaps(self, slots: int) -> Iterator[Swap]:
        """Yield the copies of gradients to the host's updates, from when each is final."""
        if self._host is None:
            return
        for buffer in (gradient for chunk in self._host.chunks for gradient in chunk.gradients):
            *_, final, leaving = self._memory.ranges[buffer].uses
            left = bisect_left(self._ends, final + 1) + slots - 1
            release = min(self._ends[left] if left < len(self._ends) else leaving, leaving)
            yield Swap(buffer, GRADIENTS, 0, final + 1, release, leaving, leaving)

    def _peak_bytes(self, swaps: Sequence[Swap]) -> int:
        num_ops = len(self._program.ops)
        change = np.zeros(num_ops + 1, np.int64)
        for swap in swaps:
            for start, stop in swap.absences(num_ops):
                change[start] -= self._program.buffers[swap.buffer].nbytes
                change[stop] += self._program.buffers[swap.buffer].nbytes
        return int((self._memory.curve + np.cumsum(change[:-1])).max())

    def _plan(self, swaps: Sequence[Swap], budget_bytes: int) -> PeerPlan:
        num_ops = len(self._program.ops)
        placed: list[Swap] = []
        tier_bytes = {}
        for tier in ("host", GRADIENTS):
            there, nbytes = assign_offsets(self._program, [swap for swap in swaps if swap.tier == tier])
            placed += there
            tier_bytes |= {tier: nbytes} if there else {}
        ordered = tuple(sorted(placed, key=lambda swap: swap.first_use % num_ops))
        plan, costs = Plan("peer", budget_bytes, ordered, 0.0, 0, tier_bytes), self._costs
        timeline = self._simulate(costs, plan)
        if self._host is not None:
            overlaps = self._peer.updates == "host under backward"
            waits = self._host.waits(timeline, self._setup.host_bytes_per_second, overlaps_backward=overlaps)
            costs = self._host.costs(costs, waits)
            timeline = self._simulate(costs, plan)
        plan = replace(plan, predicted_seconds=timeline.seconds, predicted_peak_bytes=timeline.peak_bytes)
        return PeerPlan(self._program, costs, self._machine, plan)

    def _simulate(self, costs: OpCosts, plan: Plan) -> Timeline:
        return simulate(self._program, costs, self._machine, plan)


def _spread(items: Sequence[list[int]], count: int) -> list[list[int]]:
    """``count`` of ``items``, spread evenly."""
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]
