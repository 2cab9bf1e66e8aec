import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import DecoderLevel, EncoderLevel, UNet3d


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet3d().eval()


def layers(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


def test_has_the_parameters_of_the_original():
    assert sum(p.numel() for p in UNet3d(head="conv").parameters()) == 8_269_561
    assert sum(p.numel() for p in UNet3d(head="block").parameters()) == 8_269_579


def test_has_the_layers_of_the_table(unet):
    assert len(layers(unet, nn.Conv3d)) == 30
    assert len(layers(unet, nn.InstanceNorm3d)) == len(layers(unet, nn.LeakyReLU)) == 27
    assert [drop.p for drop in layers(unet, nn.Dropout3d)] == [0.3] * 5
    levels = [sum(p.numel() for p in level.parameters()) for level in unet.encoder]
    assert levels == [
        1_776 + 2 * 6_960,
        13_920 + 2 * 27_744,
        55_488 + 2 * 110_784,
        221_568 + 2 * 442_752,
        885_504 + 2 * 1_770_240,
    ]
    levels = [sum(p.numel() for p in level.parameters()) for level in unet.decoder]
    assert levels == [
        885_120 + 885_120 + 16_768,
        221_376 + 221_376 + 4_288,
        55_392 + 55_392 + 1_120,
        13_872 + 13_872 + 304,
    ]
    assert [sum(p.numel() for p in head.parameters()) for head in unet.heads] == [195, 99, 51]


def test_saves_the_bytes_of_the_reference_for_backward():
    saved = {}
    with FakeTensorMode(allow_non_fake_inputs=False):
        model, x = UNet3d(), torch.empty(1, 4, 64, 64, 64)
        own = {p.untyped_storage()._cdata for p in [*model.parameters(), x]}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = (storage, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
    per_voxel = sum(nbytes for _, nbytes in saved.values()) / 64**3
    assert per_voxel == pytest.approx(1798, rel=0.01)  # measured on the original layer list with torch 2.13


def test_starts_as_keras_starts(unet):
    for conv in layers(unet, nn.Conv3d):
        assert torch.count_nonzero(conv.bias) == 0
        volume = math.prod(conv.kernel_size)
        bound = math.sqrt(6 / (volume * (conv.in_channels + conv.out_channels)))
        largest = conv.weight.abs().max().item()
        assert largest <= bound
        if conv.weight.numel() > 1000:
            assert largest > 0.95 * bound
    assert {layer.negative_slope for layer in layers(unet, nn.LeakyReLU)} == {0.3}


def test_a_constant_channel_gets_keras_gain(unet):
    norm = layers(unet, nn.InstanceNorm3d)[0]
    assert 1 / math.sqrt(norm.eps) == pytest.approx(1 / 1e-3)


@pytest.mark.parametrize("size", [32, 48])
def test_gives_a_probability_per_label_and_voxel(unet, size):
    with torch.no_grad():
        probability = unet(torch.randn(1, 4, size, size, size))
    assert probability.shape == (1, 3, size, size, size)
    assert probability.min() >= 0 and probability.max() <= 1


def test_the_output_sums_the_heads_of_three_levels(unet):
    seen = []
    hooks = [head.register_forward_hook(lambda _m, _i, output: seen.append(output)) for head in unet.heads]
    with torch.no_grad():
        probability = unet(torch.randn(1, 4, 32, 32, 32))
    for hook in hooks:
        hook.remove()
    quarter, half, full = seen
    assert [output.shape[-1] for output in seen] == [8, 16, 32]

    def double(x):
        return functional.interpolate(x, scale_factor=2, mode="nearest")

    assert torch.equal(probability, torch.sigmoid(double(double(quarter) + half) + full))


def test_a_level_down_adds_its_context_to_its_entry():
    level = EncoderLevel(3, 5, stride=2, dropout=0.3).eval()
    x = torch.randn(1, 3, 8, 8, 8)
    assert torch.equal(level(x), level.entry(x) + level.context(level.entry(x)))
    assert level(x).shape == (1, 5, 4, 4, 4)


def test_a_level_up_puts_the_skip_first():
    level = DecoderLevel(6, 3).eval()
    given = []
    level.localize.register_forward_pre_hook(lambda _m, inputs: given.append(inputs[0]))
    x, skip = torch.randn(1, 6, 4, 4, 4), torch.randn(1, 3, 8, 8, 8)
    level(x, skip)
    assert torch.equal(given[0], torch.cat([skip, level.up(x)], dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("head", ["conv", "block"])
def test_trains_under_bf16_autocast(head):
    torch.manual_seed(0)
    model = UNet3d(head=head)
    truth = (torch.rand(1, 3, 32, 32, 32) > 0.9).float()
    with torch.autocast("cpu", torch.bfloat16):
        probability = model(torch.randn(1, 4, 32, 32, 32))
        loss = weighted_dice_loss(probability, truth)
    loss.backward()
    assert probability.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    assert loss.isfinite()
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient.dtype is torch.float32 for gradient in gradients)
    # Those of convolution weights can hold NaN, by oneDNN's fault (see README); nothing is computed from them.
    assert all(gradient.isfinite().all() for gradient in gradients if gradient.ndim != 5)
    assert any(gradient.count_nonzero() for gradient in gradients)
