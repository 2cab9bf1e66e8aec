"""GPUs that train together: the case study's Table 7, predicted.

`python -m benchmarks.case_study.together` prints its rows. V100s, links and network are those of the case study as
stored here; nothing is measured. An epoch's 228 steps are shared out to the GPUs: with 16 each takes 15.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from benchmarks.case_study.predict import FUSED, SMALL
from benchmarks.case_study.published import EPOCH_SECONDS_TOGETHER, STEPS_PER_EPOCH
from benchmarks.distributed.prediction.network import PRESETS
from benchmarks.distributed.prediction.ranks import Ranks
from benchmarks.distributed.prediction.scaling import Scaling, plan_ranks
from benchmarks.programs.corpus import load_machine, load_program
from benchmarks.programs.replay import MIN_SWAP_BYTES
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory

MACHINE, NETWORK = "v100_nvlink2", "ac922"


@dataclass(frozen=True)
class Row:
    """A number of GPUs; efficiencies are shares, 0 to 1, of the speed that each has alone."""

    num_gpus: int
    published: float
    of_epoch: float
    of_step: float
    of_small_step: float
    all_reduce_seconds: float

    def __str__(self) -> str:
        """The row in Markdown, as in the documentation."""
        shares = (self.published, self.of_epoch, self.of_step, self.of_small_step)
        cells = [str(self.num_gpus), *(f"{100 * share:.2f} %" for share in shares)]
        return f"| {' | '.join(cells)} | {1e3 * self.all_reduce_seconds:.2f} ms |"


def predict_together() -> list[Row]:
    """The rows of Table 7 with more than one GPU."""
    large, small = _scaling(FUSED), _scaling(SMALL)
    alone = EPOCH_SECONDS_TOGETHER[1]
    rows = []
    for large_step, small_step in zip(large.steps, small.steps, strict=True):
        count = large_step.ranks.count
        if count == 1 or count not in EPOCH_SECONDS_TOGETHER:
            continue
        of_step = large.efficiency(large_step)
        rows.append(
            Row(
                num_gpus=count,
                published=alone / (count * EPOCH_SECONDS_TOGETHER[count]),
                of_epoch=of_step * STEPS_PER_EPOCH / (count * math.ceil(STEPS_PER_EPOCH / count)),
                of_step=of_step,
                of_small_step=small.efficiency(small_step),
                all_reduce_seconds=large_step.all_reduce_seconds,
            )
        )
    return rows


def _scaling(name: str) -> Scaling:
    """Predicted steps of the size ``name`` on 1 to 16 GPUs, each with the memory that the small size needs."""
    machine, program, small = load_machine(MACHINE), load_program(name), load_program(SMALL)
    budget_bytes = StepMemory(small, roofline(small, machine)).peak.nbytes
    ranks = Ranks(max(EPOCH_SECONDS_TOGETHER), PRESETS[NETWORK])
    limits = {"budget_bytes": budget_bytes, "tier": machine.tiers[0].name, "min_swap_bytes": MIN_SWAP_BYTES}
    return plan_ranks("auto", program, roofline(program, machine), machine, ranks, **limits)


if __name__ == "__main__":
    sys.stdout.writelines(f"{row}\n" for row in predict_together())
