"""Bitwise comparison of results of any strides and kind."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.verify.bitwise import difference

TENSORS = {
    "one element of two": lambda: torch.ones(2)[::2],
    "one row of two": lambda: torch.ones(4, 3)[::2][:1, ::3],
    "a number": lambda: torch.tensor(1.5),
    "none": lambda: torch.ones(0, 3),
    "every second": lambda: torch.arange(6.0)[1::2],
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "conjugated": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    "negated": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
    "channels last": lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_equal_tensors_do_not_differ_and_one_changed_element_is_found(make):
    tensor = make()
    same = tensor.resolve_conj().resolve_neg().clone()
    assert difference(tensor, tensor) is None
    assert difference(tensor, same) is None
    if tensor.numel():
        same[(-1,) * same.dim()] += 1
        found = difference(tensor, same)
        assert (found.num_differing, found.num_elements) == (1, tensor.numel())
        assert f"first at {[size - 1 for size in tensor.shape]}" in found.first


class Sampled(nn.Module):
    """Its outputs are views of one element each, with the strides of what they were cut from."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        return x[0, :2][::2], x[:2, 0][::2]


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_a_model_whose_outputs_are_strided_views_of_one_element_is_verified(compiler):
    torch.compiler.reset()
    model = lmswap.enable(Sampled(), policy="swap_all", min_swap_bytes=1024, compiler=compiler, verify=True)
    for _ in range(2):
        sum(output.sum() for output in model(torch.randn(64, 64))).backward()
    assert lmswap.report(model).verified.num_differences == 0
    lmswap.disable(model)
