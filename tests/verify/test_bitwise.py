"""Bitwise comparison of results of any strides and kind."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import lmswap
from lmswap.verify.bitwise import Comparator, bitwise_equal, difference, effect_results, effects
from lmswap.verify.summary import Result, Verified

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


LAYOUTS = {
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0),
    "bool": torch.ones(3, dtype=torch.bool),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "conjugate": torch.ones(2, 2, dtype=torch.complex64).conj(),
    "float8": torch.ones(8).to(torch.float8_e4m3fn),
    "channels_last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with_gaps": torch.ones(4, 6)[:, ::2],
    "expanded": torch.ones(3).expand(4, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_bits_are_seen_in_any_layout(name):
    tensor = LAYOUTS[name]
    assert bitwise_equal(tensor, tensor.clone(memory_format=torch.preserve_format))


def test_results_are_compared_by_their_bits():
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) is None
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert difference(None, None) is None
    assert difference(torch.zeros(2), None) is not None
    assert difference(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) is not None
    assert difference(torch.zeros(0), torch.zeros(0)) is None
    found = difference(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 7.0]]))
    assert (found.num_differing, found.num_elements) == (2, 6)
    assert found.first == "first at [1, 1]: 0.0 without, 5.0 with"
    assert not found.is_nan
    assert difference(nan, torch.ones(2)).is_nan


def test_bits_count_not_values():
    assert bitwise_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    one, other = torch.zeros(2**23), torch.zeros(2**23)
    other[-1] = 1e-45  # in another piece than the first
    assert not bitwise_equal(one, other)


def test_results_not_repeated_by_the_reference_are_named_and_excluded():
    verified, noise = Verified("model"), itertools.count()
    comparator = Comparator(verified, "{result.name} of eager mode")
    results = [Result("steady"), Result("noisy")]

    def run():
        return [torch.zeros(2), torch.full((2,), float(next(noise)))]

    assert comparator.differences(results, run(), run(), run) == {}
    assert verified.unrepeatable == ["noisy of eager mode"]
    never = Mock(side_effect=AssertionError)
    assert comparator.differences(results, run(), run(), never) == {}  # known already
    (found,) = comparator.differences(results, run(), [torch.ones(2), torch.ones(2)], run)
    assert found.name == "steady"
    assert verified.unrepeatable == ["noisy of eager mode"]


def test_effects_of_a_call_are_outputs_written_inputs_and_rng_states():
    device = torch.device("cpu")
    inputs = [torch.zeros(1), torch.ones(1)]
    values = effects([torch.full((1,), 2.0)], inputs, [1], device)
    results = effect_results([Result("output 0")], ["a", "b"], [1], device)
    assert [result.name for result in results] == [
        "output 0",
        "input b (written in place)",
        "the random generator's state",
    ]
    assert [float(value[0]) for value in values[:2]] == [2.0, 1.0]
    assert torch.equal(values[2], torch.get_rng_state())


class Sampled(nn.Module):
    """Its outputs are views of one element each, with the strides of what they were cut from."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        return x[0, :2][::2], x[:2, 0][::2]


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_strided_one_element_outputs_are_verified(compiler):
    torch.compiler.reset()
    model = lmswap.enable(Sampled(), policy="swap_all", min_swap_bytes=1024, compiler=compiler, verify=True)
    for _ in range(2):
        sum(output.sum() for output in model(torch.randn(64, 64))).backward()
    assert lmswap.report(model).verified.num_differences == 0
    lmswap.disable(model)
