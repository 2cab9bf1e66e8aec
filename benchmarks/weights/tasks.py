"""Models whose frozen blocks hold most of the weights, with a batch for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.unet3d.network import DecoderLevel, EncoderLevel
from benchmarks.whole_step.decoders import Decoder, Sizes

NAMES = ("decoder", "decoder-forward", "encoder3d", "encoder3d-forward")
_MODALITIES, _LABELS = 4, 3
_POOL_ELEMENTS = 2**22 + 7919  # no multiple of a layer's size: layers differ in their values


@dataclass(frozen=True)
class VolumeSizes:
    """A 3D network: channels of the levels down to the frozen stages, the stages' width and number, and the side."""

    levels: tuple[int, ...]
    width: int
    stages: int
    side: int


@dataclass(frozen=True)
class Size:
    """The decoder with its batch, and the 3D network; ``dtype`` is that of all parameters."""

    decoder: Sizes
    sequences: int
    tokens: int
    volume: VolumeSizes
    dtype: torch.dtype = torch.float32


SIZES = {
    "tiny": Size(Sizes(6, 256, 704, 4, 4, 512), 1, 64, VolumeSizes((4, 8), 64, 6, 16)),
    "small": Size(Sizes(8, 768, 2048, 6, 6, 512), 1, 64, VolumeSizes((4, 8), 192, 16, 32)),
    # 300 million parameters, and 150 million in a 3D encoder.
    "cpu": Size(Sizes(12, 1408, 3872, 22, 22, 2048), 2, 128, VolumeSizes((8, 16, 32), 384, 12, 48)),
    # Llama 2 13B's, which 24 GiB do not hold; its batch is one sequence.
    "13b": Size(
        Sizes(40, 5120, 13_824, 40, 40, 32_000),
        1,
        8192,
        VolumeSizes((32, 64, 128), 1024, 16, 128),
        torch.bfloat16,
    ),
}


@dataclass(frozen=True)
class Task:
    """A model on the host, and what a step does with it.

    ``blocks`` returns the modules whose frozen parameters other tools would move, in the order of their use;
    ``num_visits`` is how many times a step uses each, with others in between.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, ...]]  # of a step, on the host
    loss: Callable[[Tensor, Sequence[Tensor]], Tensor]  # of the model's output and the batch
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    num_visits: int
    trains: bool


class Segmenter(nn.Module):
    """A frozen encoder, most of whose weights are in stages at the lowest resolution, and a trained decoder."""

    def __init__(self, sizes: VolumeSizes) -> None:
        super().__init__()
        ins = (_MODALITIES, *sizes.levels)
        outs = (*sizes.levels, sizes.width)
        self.levels = nn.ModuleList(
            EncoderLevel(i, o, stride=2 if number else 1, dropout=0.0)
            for number, (i, o) in enumerate(zip(ins, outs, strict=True))
        )
        self.stages = nn.ModuleList(
            EncoderLevel(sizes.width, sizes.width, stride=1, dropout=0.0) for _ in range(sizes.stages)
        )
        self.requires_grad_(False)
        self.decoder = nn.ModuleList(
            DecoderLevel(outs[level + 1], outs[level]) for level in reversed(range(len(sizes.levels)))
        )
        self.head = nn.Conv3d(sizes.levels[0], _LABELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each label in each voxel of scans."""
        skips = []
        for level in self.levels:
            x = level(x)
            skips.append(x)
        skips.pop()
        for stage in self.stages:
            x = stage(x)
        for level in self.decoder:
            x = level(x, skips.pop())
        logits: Tensor = self.head(x)
        return logits


def make_task(name: str, size_name: str, tokens: int | None) -> Task:
    """One of `NAMES` in one of `SIZES`; ``tokens`` in place of the size's, None for those."""
    size, trains = SIZES[size_name], not name.endswith("-forward")
    if name.startswith("decoder"):
        shape = (size.sequences, tokens or size.tokens)

        def make_tokens(step: int) -> tuple[Tensor, ...]:
            return (torch.randint(size.decoder.vocabulary, shape, generator=_generator(step)),)

        return Task(
            lambda: _make_model(name, size_name, trains=trains),
            make_tokens,
            lambda loss, batch: loss,  # the model's own
            lambda model: list(model.layers),  # type: ignore[arg-type]
            2 if trains else 1,
            trains,
        )
    side = size.volume.side

    def make_scans(step: int) -> tuple[Tensor, ...]:
        scan = torch.randn(1, _MODALITIES, side, side, side, generator=_generator(step))
        labels = scan[:, :_LABELS] > 1
        return scan.to(size.dtype), labels.to(size.dtype)

    return Task(
        lambda: _make_model(name, size_name, trains=trains),
        make_scans,
        lambda logits, batch: binary_cross_entropy_with_logits(logits, batch[1]),
        lambda model: list(model.stages),  # type: ignore[arg-type]
        1,  # the backward ends at the encoder
        trains,
    )


def on_meta(name: str, size_name: str) -> nn.Module:
    """A task's model without memory."""
    size = SIZES[size_name]
    with torch.device("meta"):
        model = Decoder(size.decoder, is_adapted=True) if name.startswith("decoder") else Segmenter(size.volume)
    return model.to(size.dtype)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _make_model(task: str, size_name: str, *, trains: bool) -> nn.Module:
    return with_values(on_meta(task, size_name)).train(trains)


def with_values(model: nn.Module) -> nn.Module:
    """``model``, which has no memory, on the host; matrices and kernels are stretches of one pool of random values.

    Drawing 13 billion values would take minutes.
    """
    assert not [*model.buffers()]  # which would be left without values
    dtype = next(model.parameters()).dtype
    model = model.to_empty(device="cpu")
    pool = torch.randn(_POOL_ELEMENTS, generator=_generator(-1)).to(dtype)
    drawn = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            if parameter.ndim == 1:  # of a norm, or a bias
                flat.fill_(float(name.endswith("weight")))
                continue
            scale = (parameter.numel() / len(parameter)) ** -0.5
            start = 0
            while start < len(flat):
                offset = drawn % len(pool)
                count = min(len(flat) - start, len(pool) - offset)
                torch.mul(pool[offset : offset + count], scale, out=flat[start : start + count])
                start, drawn = start + count, drawn + count
    return model
