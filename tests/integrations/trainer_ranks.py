"""A Trainer's script that torchrun starts: ``torchrun -m tests.integrations.trainer_ranks FOLDER [BUDGET]``.

Each rank trains two steps, with an evaluation and a checkpoint after the second, and goes on from there in a Trainer of
its own; the first one writes its weights, and each what it swapped.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.integrations.trainers import rows, trained, trainer_of


def main(folder: Path, budget: str | None = None) -> None:
    rank, data = int(os.environ["RANK"]), rows(256)
    torch.manual_seed(0)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"lr_scheduler_type": "constant", "dataloader_drop_last": True, "ddp_backend": "gloo", "data": data}
    options = {"policy": "swap_all", "min_swap_bytes": 4096} if budget else {}
    trained(trainer_of(folder / "trainer", max_steps=2, **settings), budget, **options)
    resumed = trainer_of(folder / "trainer", max_steps=4, **settings)
    found, callback = trained(resumed, budget, resumes=True, **options)
    if rank == 0:
        torch.save(found, folder / "weights.pt")
    report = callback.report if callback else None
    reported = {"swapped_out_bytes": report.swapped_out_bytes, "notes": report.notes} if report else {}
    evaluations = [entry["eval_loss"] for entry in resumed.state.log_history if "eval_loss" in entry]
    reported |= {"world": resumed.args.world_size, "evaluations": evaluations}
    (folder / f"{rank}.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
