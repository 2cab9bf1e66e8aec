"""Programs of models that are never allocated equal those of the same models as they train."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lmswap
from benchmarks.unet3d.network import UNet3d
from lmswap.capture.dry_run import capture_step
from lmswap.errors import CaptureError, OptionError
from lmswap.ir.program import LOSS, BufferKind, Program

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self, layers=2, width=32, heads=2, words=64, *, checkpoints=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


class Lora(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Interrupted(nn.Module):
    """Code that torch captures in two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))


def tokens(*shape):
    return torch.zeros(*shape, dtype=torch.long)


MODELS = {
    "decoder": (Decoder, tokens(2, 8)),
    "checkpoints": (lambda: Decoder(checkpoints=True), tokens(2, 8)),
    "frozen base": (lambda: nn.Sequential(Lora(), nn.ReLU(), Lora()), torch.zeros(4, 16)),
    "convolutions": (convolutions, torch.zeros(2, 3, 8, 8)),
    "graph break": (Interrupted, torch.zeros(4, 8)),
    "unet": (lambda: UNet3d(base_filters=2), torch.zeros(1, 4, 32, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_program_equals_that_of_the_model_as_it_trains(name, tmp_path):
    make_model, batch = MODELS[name]
    model = lmswap.enable(make_model(), "1GiB", policy="none", disk_directory=str(tmp_path))
    for _ in range(2):  # graphs are planned as one step once they have run as one
        model(batch).sum().backward()
        model.zero_grad()
    trained = lmswap.program(model)
    lmswap.disable(model)
    captured = lmswap.dry_run(make_model, batch.to("meta"), device="cpu")
    unmeasured = {"fixed": None, "scratch_bytes": ()}
    assert replace(captured, **unmeasured) == replace(trained.with_gradients(captured.kind_of_gradients), **unmeasured)
    assert captured.ops
    assert Program.from_json(captured.to_json()) == captured


def test_a_forward_alone_saves_nothing_for_a_backward():
    program = lmswap.dry_run(lambda: Decoder(checkpoints=True), tokens(2, 8), device="cpu", forward_only=True)
    assert [segment.phase for segment in program.segments] == ["inference"]
    assert program.gradients == ()
    parameters = [buffer.nbytes for buffer in program.buffers if buffer.kind is BufferKind.PARAMETER]
    assert program.fixed.parameter_bytes == sum(parameters)
    assert program.bytes_of(BufferKind.OUTPUT) == 4 * 2 * 8 * 64


def test_a_forward_alone_is_in_eval_mode():
    program = lmswap.dry_run(convolutions, torch.zeros(2, 3, 8, 8), device="cpu", forward_only=True)
    assert not [op.target for op in program.ops if "rand" in op.target or "dropout" in op.target]


def test_trained_parameters_are_those_with_gradients():
    program = lmswap.dry_run(Lora, torch.empty(4, 16, device="meta"), device="cpu")
    parameters = {buffer.name: buffer for buffer in program.buffers if buffer.kind is BufferKind.PARAMETER}
    assert {name: buffer.nbytes for name, buffer in parameters.items()} == {
        "base.weight": 4 * 16 * 16,
        "base.bias": 4 * 16,
        "down.weight": 4 * 16 * 2,
        "up.weight": 4 * 16 * 2,
    }
    trained = {program.buffers[parameter].name: program.buffers[gradient] for parameter, gradient in program.gradients}
    assert trained.keys() == {"down.weight", "up.weight"}
    assert all(gradient.kind is BufferKind.GRADIENT for gradient in trained.values())
    assert program.fixed.parameter_bytes == sum(buffer.nbytes for buffer in parameters.values())


def test_flops_of_decoder_layers_are_those_of_their_products():
    layers, width, batch, length, words = 2, 32, 2, 8, 64
    program = lmswap.dry_run(lambda: Decoder(layers, width, words=words), tokens(batch, length), device="cpu")
    multiplied = layers * 12 * width**2 + width * words  # the embedding is looked up
    # Each of 2 products of the forward and 5 of the backward, with the scores computed once more; no mask is skipped.
    attention = layers * 7 * 2 * batch * length**2 * width
    assert sum(op.flops for op in program.ops) == 6 * multiplied * batch * length + attention


def test_a_model_of_more_bytes_than_any_machine_is_not_allocated():
    program = lmswap.dry_run(lambda: nn.Linear(2**21, 2**21, bias=False), torch.empty(1, 2**21), device="cpu")
    assert program.fixed.parameter_bytes == 2**44


def test_a_model_that_was_converted_keeps_its_tied_weights():
    def make_model():
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8, bias=False))
        model[1].weight = model[0].weight
        return model.to(torch.bfloat16).to("cpu", torch.float64).half()

    program = lmswap.dry_run(make_model, tokens(2, 4), device="cpu")
    assert program.fixed.parameter_bytes == 2 * 8 * 16
    assert program.bytes_of(BufferKind.PARAMETER) == 2 * 8 * 16


def test_a_loss_outside_of_the_model_takes_three_tensors_of_its_outputs():
    program = lmswap.dry_run(lambda: nn.Linear(4, 6), torch.empty(5, 4), device="cpu")
    scratch = {op.target: program.scratch_bytes[op.index] for op in program.ops}
    assert scratch.pop(LOSS) == 3 * 4 * 5 * 6
    assert not any(scratch.values())


class Branching(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 0 else -x  # the branch


class Selecting(nn.Linear):
    def forward(self, x):
        return super().forward(x[x.sum(1).nonzero()])  # the rows


@torch.library.custom_op("lmswap_dry_run::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Opaque(nn.Linear):
    def forward(self, x):
        return super().forward(opaque(x))  # without a fake kernel


class SavingOutside(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return outside(x)


@torch.compiler.disable
def outside(x):
    return x.exp()


def make_with_values():
    return nn.Dropout(torch.linspace(0, 1, 3)[1].item())  # the rate


@pytest.mark.parametrize(
    ("make_model", "shape", "message"),
    [
        (lambda: Branching(4, 4), (2, 4), r"aten._local_scalar_dense.* # the branch\)"),
        (lambda: Selecting(4, 4), (2, 4), r"aten.nonzero.* # the rows\)"),
        (lambda: Opaque(4, 4), (2, 4), r"lmswap_dry_run.*opaque.* # without a fake kernel\)"),
        (make_with_values, (2, 4), r"aten._local_scalar_dense.* # the rate\)"),
        (lambda: nn.Linear(4, 4), (2, 5), r"Linear cannot be captured"),
        (nn.ReLU, (2, 4), "ReLU has no backward: no parameter"),
        (lambda: SavingOutside(512, 1024), (512, 512), r"outside of captured graphs saves 2.00 MiB.*test_dry_run.py"),
    ],
)
def test_code_that_cannot_run_without_values_is_named(make_model, shape, message):
    with pytest.raises(CaptureError, match=re.compile(message, re.DOTALL)):
        lmswap.dry_run(make_model, torch.empty(shape, device="meta"), device="cpu")


def test_what_makes_the_model_must_return_a_module():
    with pytest.raises(OptionError, match=r"must return a torch.nn.Module, not int"):
        lmswap.dry_run(lambda: 3, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="traces on the GPU")
def test_a_gpu_that_torch_cannot_use_is_refused():
    with pytest.raises(OptionError, match="where torch can use a GPU"):
        capture_step(Lora, (torch.empty(4, 16),), torch.device("cuda"))
