"""Models loaded from mapped files, larger than the GPU: host memory holds each byte once, but for one file."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import NotManaged, OptionError
from lmswap.runtime.host_copies import HostCopies
from tests.training import session_of
from tests.training_state.test_quantized import Quantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDTH, LAYERS = 512, 5


def mapped(folder):
    """The files of ``folder`` that the process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line}


def test_a_file_is_given_back_when_its_large_parameters_have_moved(tmp_path, monkeypatch):
    with torch.device("cpu"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        tensors = {f"{number}.{name}": value for name, value in layer.state_dict().items()}
        torch.save(tensors, tmp_path / f"{number}.pt")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for path in tmp_path.glob("*.pt"):
        model.load_state_dict(torch.load(path, mmap=True), strict=False, assign=True)
    assert len(mapped(tmp_path)) == LAYERS

    counts = []
    receive = HostCopies.receive

    def counting(host_copies, storage):
        counts.append(len(mapped(tmp_path)))
        return receive(host_copies, storage)

    monkeypatch.setattr(HostCopies, "receive", counting)
    lmswap.enable(model, "1GiB", device="cuda", min_swap_bytes="64KiB")
    assert counts == [5, 4, 3, 2, 1]
    assert not mapped(tmp_path)
    for layer, loaded in zip(layers, model, strict=True):
        assert torch.equal(loaded.weight.cpu(), layer.weight)
        assert torch.equal(loaded.bias.cpu(), layer.bias)
    lmswap.disable(model)


def quantized(**how):
    """A layer with a weight of 16 MiB that is a tensor subclass."""
    model = nn.Linear(4096, 4096, bias=False, device="cpu")
    values, scale = torch.zeros(4096, 4096, dtype=torch.int8, device="cpu"), torch.ones(4096, 1, device="cpu")
    model.weight = nn.Parameter(Quantized(values, scale), **how)
    model.plain = nn.Parameter(torch.ones(4, device="cpu"))
    return model


@pytest.fixture
def _nine_mib():
    """The GPU has 9 MiB left."""
    torch.cuda.empty_cache()
    allowed_bytes = torch.cuda.memory_reserved() + 9 * 2**20  # tests before this one may have left workspaces of cuBLAS
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_nine_mib")
def test_what_cannot_be_swapped_and_has_no_room_is_named():
    message = r"no room for what stays on it of Linear: 'weight' \(.* is a Quantized"
    with pytest.raises(OptionError, match=message):
        lmswap.enable(quantized(requires_grad=True), "8MiB", device="cuda")


@pytest.mark.usefixtures("_nine_mib")
def test_what_a_frozen_tensor_subclass_wraps_is_never_on_the_device_as_a_whole():
    model = lmswap.enable(quantized(requires_grad=False), "8MiB", device="cuda")
    weight = model.weight
    assert {each.device.type for each in (weight, weight.values, weight.scale)} == {"cuda"}
    assert session_of(model).engine.host_copies.find(weight.values.untyped_storage()) is not None
    assert isinstance(weight, nn.Parameter)
    assert not weight.values[7:9].any()
    with pytest.warns(NotManaged, match="has no room for them"):
        lmswap.disable(model)
