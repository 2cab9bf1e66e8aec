"""ResNet-50 on many ranks, in steps that a kill can interrupt anywhere.

Which images come in a step, in which crop, and the learning rate follow from the seed and the step's number alone. So
ranks that were killed and go on from the last checkpoint have the same bits as ranks that were not.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lmswap
from benchmarks.distributed.images import ImageFiles, ImageFolder, find_images
from benchmarks.distributed.lars import Lars
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.reduction import hierarchical_hook, make_nodes
from benchmarks.distributed.results import Training as Point
from benchmarks.distributed.results import slowest_median
from benchmarks.distributed.schedule import learning_rate
from benchmarks.distributed.shards import Batch, Shards, shard_validation
from benchmarks.programs.models import Bottleneck, resnet50
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.checkpoint import State, load_state, save_state
from benchmarks.unet3d.memory import CudaMeter, MemorySampler, Meter, ResidentMeter, import_lmswap

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
LOSS_SCALE = 1024.0  # in fp16: keeps small gradients from becoming 0
WARM_UP_STEPS = 5  # not timed: lmswap captures and measures in the first, and plans again until the fourth
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

MakeNetwork = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Settings:
    """What to train. ``size`` is the side of images, ``batch`` a rank's; ``budget_bytes`` None is plain torch.

    It ends after ``epochs``, or after ``steps`` if they are not None and come first.
    ``checkpoint`` is a file that all ranks see, written every ``checkpoint_steps`` steps and after each epoch.
    """

    data: Path
    size: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "lars"]
    reduction: Literal["flat", "hierarchical"]
    dtype: Literal["fp32", "fp16", "bf16"]
    budget_bytes: int | None
    checkpoint: Path | None
    checkpoint_steps: int
    steps: int | None = None
    seed: int = 0


def make_resnet50(classes: int) -> nn.Module:
    """With the last norm of each block at 0, so that a block begins as the identity: large batches need it."""
    network = resnet50(classes)
    for block in network.modules():
        if isinstance(block, Bottleneck):
            last_norm = block.branch[-1]
            assert isinstance(last_norm, nn.BatchNorm2d)
            nn.init.zeros_(last_norm.weight)
    return network


def train(
    settings: Settings, ranks: Ranks, say: Callable[[str], None], make_network: MakeNetwork = make_resnet50
) -> Point:
    """Train as one of the ranks until the epochs are done, from the checkpoint on if there is one.

    Args:
        settings: of the training.
        ranks: the processes that train together.
        say: called with a line about each epoch.
        make_network: makes the network for a number of classes.

    Returns:
        The figures of this number of ranks.

    Raises:
        DataError: the images cannot be used, or the checkpoint is of another training or not the same on all ranks.
        LmswapError: from `lmswap.enable` and the steps under it.
    """
    folders = [find_images(settings.data, part) for part in ("train", "val")]
    run = _Run(settings, ranks, folders[0], folders[1], make_network)
    with run.enabled():
        while run.step < run.num_steps:
            say(run.epoch())
        return run.outcome()


class _Run:
    """One rank's part of a training."""

    def __init__(
        self, settings: Settings, ranks: Ranks, training: ImageFolder, validation: ImageFolder, make: MakeNetwork
    ) -> None:
        self._settings, self._ranks, self._classes = settings, ranks, len(training.classes)
        self._shards = Shards(settings.seed, len(training.paths), ranks.rank, ranks.size, settings.batch)
        if not self._shards.num_steps:
            raise DataError(
                f"{settings.data} has {len(training.paths)} training images, fewer than the "
                f"{ranks.size * settings.batch} of one step of all ranks; take a smaller --batch"
            )
        self._loader = _loader(ImageFiles(training, settings.size), self._shards, ranks)
        mine = shard_validation(len(validation.paths), ranks.rank, ranks.size, settings.batch)
        self._validation_loader = _loader(ImageFiles(validation, settings.size), mine, ranks)
        self._num_validated = len(validation.paths)
        torch.manual_seed(settings.seed)
        self._network = make(self._classes).to(ranks.device)
        self._model = self._network
        self._optimizer = _make_optimizer(self._network, settings)
        self._scaler = torch.amp.GradScaler(
            ranks.device.type, init_scale=LOSS_SCALE, growth_interval=2**31 - 1, enabled=settings.dtype == "fp16"
        )
        self.step = 0
        self._losses: list[float] = []
        self._accuracy: float | None = None
        self._seconds: list[float] = []
        self._meter: Meter | None = None
        self._load()

    @property
    def num_steps(self) -> int:
        """Steps of all epochs, or the requested number."""
        num = self._settings.epochs * self._shards.num_steps
        return num if self._settings.steps is None else min(num, self._settings.steps)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """The network under its budget, if it has one, and shared by the ranks."""
        settings, ranks = self._settings, self._ranks
        if settings.budget_bytes is not None:
            import_lmswap()
        self._meter = CudaMeter() if ranks.device.type == "cuda" else ResidentMeter()
        if settings.budget_bytes is not None:
            lmswap.enable(self._network, budget=settings.budget_bytes)
        shared = ranks.share(self._network)
        self._model = shared
        if settings.reduction == "hierarchical":
            shared.register_comm_hook(make_nodes(ranks.local_size), hierarchical_hook)
        try:
            with MemorySampler(self._meter):  # lmswap resets the kernel's peak when it plans
                yield
        finally:
            if settings.budget_bytes is not None:
                lmswap.disable(self._network)

    def epoch(self) -> str:
        """Trains the rest of the epoch and validates; returns a sentence for the log."""
        begun, first = time.perf_counter(), len(self._losses)
        epoch, done = divmod(self.step, self._shards.num_steps)
        self._shards.start(epoch, done)
        self._model.train()
        began_step = begun
        for images, labels in self._loader:
            self._take_step(images.to(self._ranks.device), labels.to(self._ranks.device))
            self._seconds.append(_now(self._ranks) - began_step)
            if self.step % self._settings.checkpoint_steps == 0:
                self._save()
            if self.step == self.num_steps:
                break
            began_step = time.perf_counter()
        self._accuracy = self._validate()
        self._save()
        losses = self._losses[first:]
        return (
            f"epoch {epoch + 1} of {self._settings.epochs}: loss {sum(losses) / len(losses):.4f}, top-1 "
            f"{self._accuracy:.1%}, {time.perf_counter() - begun:.1f} s"
        )

    def outcome(self) -> Point:
        """The results of all ranks as a point of the results file."""
        assert self._meter is not None
        found = self._ranks.gather((self._seconds[WARM_UP_STEPS:] or self._seconds, self._meter.peak_bytes()))
        is_swapped = self._settings.budget_bytes is not None
        return Point(
            name=f"ResNet-50, {self._settings.size} x {self._settings.size}, {self._settings.dtype}",
            ranks=self._ranks.size,
            batch=self._settings.batch,
            budget_bytes=self._settings.budget_bytes,
            step_seconds=slowest_median([seconds for seconds, _ in found]),
            peak_bytes=max(peak_bytes for _, peak_bytes in found),
            swapped_bytes=lmswap.report(self._network).swapped_out_bytes if is_swapped else None,
            bits=self._digest(),
            accuracy=self._accuracy,
        )

    def _take_step(self, images: Tensor, labels: Tensor) -> None:
        settings = self._settings
        rate = learning_rate(self.step, self.num_steps, self._ranks.size * settings.batch)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        dtype = _DTYPES.get(settings.dtype)
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(self._model(images), labels)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        self._losses.append(mean.item() / self._ranks.size)
        self.step += 1

    @torch.no_grad()
    def _validate(self) -> float:
        """Validation accuracy, 0 to 1, over the images of all ranks."""
        for buffer in self._network.buffers():  # each rank has batch statistics of its own
            distributed.broadcast(buffer, 0)
        self._network.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
        for images, labels in self._validation_loader:
            found = self._network(images.to(self._ranks.device)).argmax(1)
            correct += (found == labels.to(self._ranks.device)).sum()
        distributed.all_reduce(correct)
        return correct.item() / self._num_validated

    def _save(self) -> None:
        if self._settings.checkpoint is None or self._ranks.rank:
            return
        save_state(
            self._settings.checkpoint,
            {
                "training": self._identity(),
                "model": self._network.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
                "step": self.step,
                "losses": self._losses,
                "accuracy": self._accuracy,
            },
        )

    def _load(self) -> None:
        path = self._settings.checkpoint
        state: State = load_state(path) if path is not None and path.exists() else {}
        steps = self._ranks.gather(state.get("step", 0))
        if len(set(steps)) != 1:
            raise DataError(f"{path} is not one file to all ranks: it is at the steps {steps}, by rank")
        if not state:
            return
        if state["training"] != self._identity():
            raise DataError(f"{path} is of another training, {state['training']}; this one is {self._identity()}")
        self._network.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.step, self._losses, self._accuracy = state["step"], list(state["losses"]), state["accuracy"]

    def _identity(self) -> dict[str, object]:
        """The settings and data that determine the bits of a training."""
        names = ("size", "batch", "epochs", "optimizer", "reduction", "dtype", "seed")
        fixed = {name: getattr(self._settings, name) for name in names}
        return {**fixed, "ranks": self._ranks.size, "steps": self.num_steps, "of an epoch": self._shards.num_steps}

    def _digest(self) -> str:
        digest = hashlib.sha256(struct.pack(f">{len(self._losses)}d", *self._losses))
        for value in self._network.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        return digest.hexdigest()


def _make_optimizer(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer, with no weight decay for biases and norms."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = learning_rate(0, 1, settings.batch)
    if settings.optimizer == "lars":
        return Lars(groups, lr=rate, momentum=MOMENTUM)
    return torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, nesterov=True)


def _loader(images: ImageFiles, batches: Shards | list[Batch], ranks: Ranks) -> DataLoader[tuple[Tensor, int]]:
    """On a GPU, workers read ahead; they are spawned, as the engine's threads must not be copied into them."""
    on_cuda = ranks.device.type == "cuda"
    workers = max(1, torch.get_num_threads() // 2) if on_cuda else 0
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
        pin_memory=on_cuda,
    )


def _now(ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
