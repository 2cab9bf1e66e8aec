"""The terminal display of a training: progress, losses and memory."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from benchmarks.unet3d.bars import Bars
from benchmarks.unet3d.train import Epoch
from lmswap.ir.bytesize import format_bytes


class TrainingView(Bars):
    """One bar for all epochs and one for the epoch under way; hand ``on_event`` to `train`."""

    def __init__(self, console: Console, *, epochs: int, steps: int, validation_steps: int) -> None:
        self._steps, self._validation_steps = steps, validation_steps
        super().__init__(
            console,
            10,
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[more]}"),
            TimeRemainingColumn(compact=True),
        )
        self._epochs = self._progress.add_task("epochs", total=epochs, loss="–", more="")
        self._epoch = self._progress.add_task("training", total=steps, loss="–", more="")

    def on_event(self, event: dict[str, Any]) -> None:
        """Show an event of the training."""
        match event["event"]:
            case "start":
                for row in event["history"]:
                    self._show_epoch(row)
                self._progress.update(self._epoch, completed=event["done"])
            case "step":
                self._show_step("training", self._steps, event)
            case "validation":
                self._show_step("validating", self._validation_steps, event)
            case "epoch":
                self._show_epoch(event["row"])
                self._progress.reset(self._epoch, description="training", total=self._steps)

    def _show_step(self, what: str, total: int, event: dict[str, Any]) -> None:
        self.say(f"{what}: {event['done']} of {total}, loss {event['loss']:.4f}")
        self._progress.update(
            self._epoch,
            description=what,
            completed=event["done"],
            total=total,
            loss=f"{event['loss']:.4f}",
            more=f"peak {format_bytes(event['peak_bytes'])}",
        )

    def _show_epoch(self, row: Epoch) -> None:
        rate = f"rate {row.learning_rate:g}"
        loss = f"{row.loss:.4f}, val {row.val_loss:.4f}"
        self._progress.update(self._epochs, completed=row.epoch, loss=loss, more=rate)
        self.say(f"epoch {row.epoch}: loss {loss}, {rate}")
