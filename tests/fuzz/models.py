"""Random models as source text, so that a case which fails is a program to read and to keep.

A statement is a template filled with names of tensors made before. It is run at once on real tensors, and left out when
torch refuses it: so any template may be tried on any tensor, and all that is left is valid.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

_KINDS = {
    "pointwise": [
        "torch.tanh({a})", "torch.sin({a}) * 0.5", "F.gelu({a})", "F.relu({a})", "{a}.abs()", "torch.sigmoid({a})",
        "{a} * {b}", "{a} + {b}", "torch.maximum({a}, {b})", "torch.where({a} > 0, {a}, {b})", "F.softplus({a}) - {b}",
        "torch.addcmul({a}, {b}, {c})", "torch.lerp({a}, {b}, 0.25)",
    ],
    "shape": [
        "{a}.sum(-1)", "{a}.mean(0, keepdim=True)", "torch.softmax({a}, -1)", "{a}.cumsum(0)", "{a}.flip(0)",
        "torch.cat([{a}, {b}], -1)", "torch.stack([{a}, {b}])", "{a}.roll(1, 0)", "F.pad({a}, (1, 0))",
        "{a}.repeat_interleave(2, 0)", "{a}.index_select(0, n)", "{a}[n]", "torch.gather({a}, 0, {b}.long() * 0)",
    ],
    "view": [
        "{a}.transpose(0, -1)", "{a}.flatten()", "{a}.unsqueeze(0)", "{a}[::2]", "{a}[..., 1:]",
        "{a}.expand(2, *{a}.shape)",
        "{a}.as_strided((2, 3), (1, 2))", "{a}.as_strided((2, 2), (0, 1), 1)", "{a}.movedim(0, -1)", "{a}.chunk(2)[-1]",
        "{a}.unbind(0)[0]", "{a}.diagonal(0, 0, -1)", "{a}.detach()", "{a}.view(-1)", "{a}.view(2, -1)",
        "{a}.reshape(-1, 2)", "{a}.unfold(0, 2, 1)", "{a}.select(0, -1)", "{a}.narrow(-1, 0, 1)", "{a}.mT",
        "{a}.view(torch.int32)", "{a}.permute(*reversed(range({a}.dim())))", "{a}.squeeze()", "{a}.view_as({a})",
    ],
    "layout": [
        "{a}.contiguous()", "{a}.clone()", "{a}.contiguous(memory_format=torch.channels_last)",
        "{a}.clone(memory_format=torch.preserve_format)", "torch.empty_like({a}).copy_({b})",
    ],
    "dtype": [
        "{a}.double()", "{a}.bfloat16()", "{a}.float()", "{a} > 0", "{a}.long()", "{a}.int()", "~{a}", "{a}.half()",
        "torch.complex({a}, {b})", "torch.view_as_real({a})", "{a}.real", "{a}.imag * 2", "{a}.conj() * {b}",
    ],
    "matrix": [
        "F.linear({a}, self.w[:, : {a}.shape[-1]])", "F.linear({a}, self.w[:6, : {a}.shape[-1]], self.b[:6])",
        "{a} @ {b}", "{a} @ {b}.mT", "F.conv2d({a}, self.k[:, : {a}.shape[1]], padding=1)", "torch.outer({a}, {b})",
        "F.embedding(n, self.w)", "F.scaled_dot_product_attention({a}, {a}, {b})", "F.max_pool2d({a}, 2)",
        "F.interpolate({a}, scale_factor=2)", "F.avg_pool1d({a}, 2)",
    ],
    "norm": [
        "F.layer_norm({a}, {a}.shape[-1:])", "F.group_norm({a}, 1)", "F.instance_norm({a})", "F.normalize({a}, dim=0)",
        "F.batch_norm({a}, self.mean[: {a}.shape[1]], self.var[: {a}.shape[1]], training=True)",
    ],
    "random": [
        "F.dropout({a}, 0.3, True)", "torch.rand_like({a})", "torch.bernoulli({a}.sigmoid())", "{a} + torch.randn(())",
        "F.dropout1d({a}, 0.3, True)", "torch.randint(0, 3, {a}.shape)", "{a} * torch.randperm({a}.shape[0])[0]",
    ],
}  # fmt: skip
_PAIRS = [
    "{a}.max(-1)", "{a}.sort(0)", "{a}.topk(1, -1)", "torch.var_mean({a}, -1)", "{a}.chunk(2, -1)",
    "torch.aminmax({a})", "{a}.tensor_split(2)", "torch.frexp({a})", "{a}.median(0)",
    "F.max_pool2d({a}, 2, return_indices=True)",
]  # fmt: skip
_IN_PLACE = [
    "{a}.mul_(0.5)", "{a}.add_({b})", "{a}[0] = 1.0", "{a}[..., 0] = {b}[..., -1]", "{a}.relu_()", "{a}.copy_({b})",
    "{a}.zero_()", "{a}.masked_fill_({a} > 0.5, 0.25)", "F.dropout({a}, 0.5, True, inplace=True)", "self.seen.add_(1)",
    "self.seen.mul_(0.5).add_({a}.detach().mean())", "{a}.view(-1)[1:].mul_({b}.sum())", "{a}.transpose(0, -1).tanh_()",
    "{a}[{a} > 0.75] = 0.0", "{a}.index_add_(0, n, {b})", "{a}.fill_(0.25)", "{a}.unsqueeze(0).sub_({b})",
]  # fmt: skip
_SHAPES = [(8,), (4, 6), (6, 4), (2, 4, 6), (2, 3, 4, 4), (1, 4, 1)]
# How the second input comes: of its own, or sharing memory with the first.
_SECOND = [
    "torch.linspace(-1, 1, x.numel()).view(x.shape)",
    "x.detach()",
    "x",
    "x.detach()[..., :2]",
    "x.transpose(0, -1)",
]
_MAX_ELEMENTS = 4096


class RandomModel(nn.Module):
    """Runs ``source``, the body of a forward of the inputs x, y (float32) and n (int64 in 0, 1)."""

    def __init__(self, source: str, shape: tuple[int, ...], second: str) -> None:
        super().__init__()
        self.source, self.shape, self.second = source, shape, second
        numbers = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(16, 16, generator=numbers) / 4)
        self.b = nn.Parameter(torch.randn(16, generator=numbers))
        self.k = nn.Parameter(torch.randn(4, 8, 3, 3, generator=numbers) / 8)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self._start = {name: buffer.clone() for name, buffer in self.named_buffers()}
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(f"def forward(self, x, y, n):\n{source}", scope)
        self.forward = scope["forward"].__get__(self)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Fresh inputs, the same each time; the first and what shares its graph want a gradient."""
        count = torch.Size(self.shape).numel()
        x = torch.linspace(-2, 2, count).cos().view(self.shape).requires_grad_()
        return x, eval(self.second, {"torch": torch, "x": x}), torch.tensor([0, 1, 0])

    def reset(self) -> None:
        """Puts the buffers back to what they were."""
        for name, buffer in self.named_buffers():
            buffer.copy_(self._start[name])
        self.zero_grad()

    def __repr__(self) -> str:
        return f"RandomModel('''\n{self.source}''', {self.shape}, {self.second!r})"


@dataclass
class _Writer:
    """Adds statements as long as torch accepts them; ``scope`` holds what they made."""

    lines: list[str]
    names: list[str]
    scope: dict[str, Any]

    def add(self, line: str, made: tuple[str, ...] = ()) -> None:
        trial = dict(self.scope)
        with contextlib.suppress(Exception):
            exec(line, trial)
            if all(isinstance(trial[name], torch.Tensor) and trial[name].numel() <= _MAX_ELEMENTS for name in made):
                self.scope = trial
                self.lines.append(line)
                self.names += made


@st.composite
def models(draw: st.DrawFn, *, max_statements: int = 12) -> RandomModel:
    """Models of a few statements with one to four outputs, some of which may alias inputs or each other."""
    torch.manual_seed(0)  # what a statement draws may decide whether torch refuses the next
    shape, second = draw(st.sampled_from(_SHAPES)), draw(st.sampled_from(_SECOND))
    trial = RandomModel("  return x\n", shape, second)
    x, y, n = trial.inputs()
    writer = _Writer([], ["x", "y"], {"torch": torch, "F": F, "self": trial, "x": x, "y": y, "n": n})
    for number in range(draw(st.integers(2, max_statements))):
        # Recent tensors more often than old ones, so that chains are common and skips occur.
        name = st.sampled_from(writer.names[-3:] * 2 + writer.names)
        given = {hole: draw(name) for hole in "abc"}
        kind = draw(st.sampled_from([*_KINDS, "pointwise", "view", "pair", "in place", "in place"]))
        if kind == "in place":
            writer.add(draw(st.sampled_from(_IN_PLACE)).format(**given))
        elif kind == "pair":
            made = (f"v{number}", f"w{number}")
            writer.add(f"{made[0]}, {made[1]} = " + draw(st.sampled_from(_PAIRS)).format(**given), made)
        else:
            made = (f"v{number}",)
            writer.add(f"{made[0]} = " + draw(st.sampled_from(_KINDS[kind])).format(**given), made)
    outputs = draw(st.lists(st.sampled_from(writer.names[-4:] + writer.names), min_size=1, max_size=4))
    lines = [*writer.lines, f"return ({', '.join(outputs)},)"]
    return RandomModel("".join(f"  {line}\n" for line in lines), shape, second)
