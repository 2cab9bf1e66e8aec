"""The stand-in kernels give the CPU's bits, through torch's own allocator, autograd and generators."""

import pytest
import torch
from torch import nn

MODELS = {
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.InstanceNorm3d(8), nn.LeakyReLU()), (1, 2, 8, 8, 8)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        (4, 3, 16, 16),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (2, 6, 32)),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), (4, 8)),
}


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.network = kind(8, 16, 2, batch_first=True)

    def forward(self, x):
        return self.network(x)[0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_networks_are_those_of_the_cpu_but_for_rounding(kind):
    found, expected = (train(lambda: Recurrent(kind), (4, 6, 8), device) for device in ("cuda", "cpu"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norms_are_those_of_the_cpu_but_for_rounding(affine):
    def make():
        return nn.Sequential(nn.Linear(8, 8), nn.RMSNorm((4, 8), elementwise_affine=affine), nn.Linear(8, 3))

    found, expected = (train(make, (6, 4, 8), device) for device in ("cuda", "cpu"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


def train(make, shape, device):
    torch.manual_seed(0)
    model, x = make().cpu().to(device), torch.randn(shape, device="cpu").to(device)
    optimizer = torch.optim.Adam(model.parameters())
    results = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [result.cpu() for result in results + list(model.state_dict().values())]


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_bits_of_the_cpu(name):
    make, shape = MODELS[name]
    found = train(make, shape, "cuda")
    expected = train(make, shape, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli, nn.functional.dropout, lambda x: x.exponential_()])
def test_draws_repeat_from_the_generators_state_and_move_it_on(draw):
    x = torch.full((1000,), 0.5, device="cuda")
    state = torch.cuda.get_rng_state()
    first, second = draw(x.clone()), draw(x.clone())
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(x.clone()), first)
    assert not torch.equal(first, second)


def test_outputs_that_are_given_grow():
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_shapes_that_depend_on_data_are_waited_for():
    assert torch.tensor([0, 3, 0, 4], device="cuda").nonzero().tolist() == [[1], [3]]


def test_awaited_results_overwrite_the_fill_of_their_memory():
    x, indices = torch.arange(4096.0, device="cuda"), torch.arange(4096, device="cpu").flip(0)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        assert all(torch.equal(x[indices].cpu().flip(0), x.cpu()) for _ in range(50))
    finally:
        torch.use_deterministic_algorithms(False)


def test_conjugates_and_strides_are_seen():
    x = torch.randn(4, 6, dtype=torch.complex64, device="cpu")
    found = (x.cuda().conj().t() @ x.cuda()[:, ::2]).cpu()
    assert torch.equal(found, x.conj().t() @ x[:, ::2])


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3, device="cpu")


def test_a_result_that_is_used_on_is_computed_in_order():
    x = torch.zeros(1000, device="cuda")
    for _ in range(200):
        x = x + 1
    assert x.unique().tolist() == [200]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_16_bits_compute_in_32_and_round_running_statistics(dtype):
    image, weight = torch.randn(2, 3, 8, 8, device="cpu").to(dtype), torch.randn(4, 3, 3, 3, device="cpu").to(dtype)
    found = torch.nn.functional.conv2d(image.cuda(), weight.cuda())
    assert torch.equal(found.cpu(), torch.nn.functional.conv2d(image.float(), weight.float()).to(dtype))
    left, right = torch.randn(64, 96, device="cpu").to(dtype), torch.randn(96, 32, device="cpu").to(dtype)
    assert torch.equal((left.cuda() @ right.cuda()).cpu(), (left.float() @ right.float()).to(dtype))
    running = [torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)]
    ones = torch.ones(3, dtype=dtype)
    found, mean, _ = torch.native_batch_norm(image.cuda(), ones, ones, *running, True, 0.1, 1e-5)
    expected = [torch.zeros(3, device="cpu"), torch.ones(3, device="cpu")]
    one = torch.ones(3, device="cpu")
    normed, means, _ = torch.native_batch_norm(image.float(), one, one, *expected, True, 0.1, 1e-5)
    assert torch.equal(found.cpu(), normed.to(dtype))
    assert mean.dtype == torch.float32
    assert torch.equal(mean.cpu(), means)
    assert all(torch.equal(a.cpu(), b.to(dtype)) for a, b in zip(running, expected, strict=True))
    assert running[0].any()
    legit, *_ = torch.ops.aten._native_batch_norm_legit.no_stats(image.cuda(), ones, ones, True, 0.1, 1e-5)
    assert torch.equal(legit, found)
