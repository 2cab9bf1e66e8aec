"""A model larger than the GPU, and code outside of its calls that reads, moves, copies or averages the whole of it."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lmswap
from lmswap.errors import NotManaged, OptionError
from tests.gpu.trainings import begin
from tests.training_state.adapted import same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 2**20
WIDTH, LAYERS, BUDGET_BYTES = 2048, 14, 112 * MIB


def on_host():
    """Frozen layers of 16 MiB, and a trained one."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(LAYERS)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def train(model, steps):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def enabled(model):
    return lmswap.enable(model, BUDGET_BYTES, device="cuda")


def on_cpu(values):
    return [value.detach().cpu() for value in values]


@pytest.fixture(scope="module")
def parameters():
    """Those of the model before training."""
    return [*on_host().parameters()]


@pytest.fixture
def model(parameters):
    """The enabled model, of which half has no room on the GPU."""
    assert sum(parameter.nbytes for parameter in parameters) > 1.9 * BUDGET_BYTES
    begin()
    model = on_host()
    torch.cuda.set_per_process_memory_fraction(1.05 * BUDGET_BYTES / torch.cuda.mem_get_info()[1])
    yield enabled(model)
    lmswap.disable(model.cpu())
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_it_can_be_moved_to_the_cpu_copied_there_and_enabled_again(model, parameters):
    train(model, 1)
    trained = on_cpu(model.parameters())
    model.cpu()
    with pytest.raises(OptionError, match="enabled on cuda:0 and lies on cpu now: move it first, and then"):
        model(torch.zeros(1, WIDTH))
    copied = copy.deepcopy(model)
    enabled(model)
    train(model, 2)
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert same([*copied.parameters()], trained)
    assert not same(on_cpu(model.parameters()), trained)


@pytest.mark.parametrize("use", [copy.deepcopy, AveragedModel, torch.nn.Module.double], ids=lambda use: use.__name__)
def test_what_needs_the_whole_on_the_gpu_says_what_to_do(model, use):
    train(model, 1)
    with (
        pytest.warns(NotManaged, match=r"cuda:0 is full.*MiB of Sequential's weights.* or after model\.cpu\(\)"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        use(model)


def test_an_average_on_the_host_is_that_of_plain_torch(parameters):
    plain = on_host().cuda()
    train(plain, 1)
    trained = on_cpu(plain.parameters())
    del plain
    begin()
    model = on_host()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    enabled(model)
    average.update_parameters(model)
    train(model, 1)
    average.update_parameters(model)
    lmswap.disable(model)
    for found, old, new in zip(average.module.parameters(), parameters, trained, strict=True):
        torch.testing.assert_close(found, 0.9 * old + 0.1 * new)


def test_hooks_of_modules_and_code_between_steps_read_weights_in_place(model, parameters):
    seen = []

    def look(module, inputs, output):
        seen.append(module.weight)

    hooks = [layer.register_forward_hook(look) for layer in model]
    train(model, 2)
    for hook in hooks:
        hook.remove()
    assert all(found is layer.weight for found, layer in zip(seen, [*model, *model], strict=True))
    norms = [parameter.norm().cpu() for parameter in model.parameters() if not parameter.requires_grad]
    frozen = [old for old, new in zip(parameters, model.parameters(), strict=True) if not new.requires_grad]
    torch.testing.assert_close(norms, [parameter.norm() for parameter in frozen])
    assert torch.cuda.max_memory_reserved() <= 1.05 * BUDGET_BYTES
