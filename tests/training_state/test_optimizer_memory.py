"""Pending bytes of optimizers are those that they allocate later, however their state comes to exist."""

import copy
import gc
import tracemalloc

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from lmswap.training_state.optimizer_memory import TrainableParameters
from tests.training_state.test_quantized import Quantized

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": optim.Adam,
    "AMSGrad": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": optim.AdamW,
    "RMSprop": optim.RMSprop,
    "RMSprop, centered, with momentum": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": optim.Adagrad,  # its state is there from the start
    "NAdam": optim.NAdam,
    "Adadelta": optim.Adadelta,
}


class Wrapping(optim.Optimizer):
    """As libraries do it: a class of its own, with all that another optimizer has."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    @property
    def param_groups(self):
        return self.wrapped.param_groups

    @property
    def state(self):
        return self.wrapped.state


@pytest.fixture(autouse=True)
def without_optimizers_of_others():
    gc.collect()


def make():
    return [nn.Parameter(torch.ones(64, 3)), nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]


def take_step(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def state_bytes(optimizer):
    found = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in found if isinstance(value, torch.Tensor) and value.ndim)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pending_bytes_are_those_that_the_first_step_allocates(name):
    parameters = make()
    trained, optimizer = TrainableParameters(lambda: parameters), OPTIMIZERS[name](parameters)
    before_bytes, said_bytes = state_bytes(optimizer), trained.measure().pending_optimizer_bytes
    take_step(optimizer, parameters)
    assert said_bytes == state_bytes(optimizer) - before_bytes
    assert trained.measure().pending_optimizer_bytes == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_watching_detects_an_optimizer_step_of_the_parameters(name):
    parameters, others = make(), make()
    trained = TrainableParameters(lambda: parameters)
    both = OPTIMIZERS[name]([*others, parameters[0]])
    take_step(both, others + parameters)
    trained.start_watching_optimizer()
    take_step(OPTIMIZERS[name](others), others)
    assert not trained.stop_and_check_stepped()
    trained.start_watching_optimizer()
    take_step(both, others + parameters)
    assert trained.stop_and_check_stepped()


@pytest.mark.parametrize("ends", [TrainableParameters.stop_and_check_stepped, lambda _: None], ids=["asked", "gone"])
def test_watching_ends_when_it_is_stopped_or_its_owner_is_gone(ends):
    num_before, trained = len(_global_optimizer_post_hooks), TrainableParameters(make)
    assert len(_global_optimizer_post_hooks) == num_before
    trained.start_watching_optimizer()
    trained.start_watching_optimizer()
    assert len(_global_optimizer_post_hooks) == num_before + 1
    ends(trained)
    del trained
    assert len(_global_optimizer_post_hooks) == num_before


def test_two_values_per_element_are_pending_without_an_optimizer():
    known, unknown = make()
    trained = TrainableParameters(lambda: [known, unknown])
    assert trained.measure().pending_optimizer_bytes == 2 * trained.nbytes
    optimizer = optim.SGD([known], lr=0.1)
    assert trained.measure().pending_optimizer_bytes == 2 * unknown.nbytes
    del optimizer
    assert trained.measure().pending_optimizer_bytes == 2 * trained.nbytes


def test_state_loaded_from_a_checkpoint_is_not_pending():
    parameters = make()
    first = optim.Adam(parameters)
    take_step(first, parameters)
    state = copy.deepcopy(first.state_dict())
    others = make()
    trained, optimizer = TrainableParameters(lambda: others), optim.Adam(others)
    assert trained.measure().pending_optimizer_bytes == 2 * trained.nbytes
    optimizer.load_state_dict(state)
    assert trained.measure().pending_optimizer_bytes == 0


def test_an_optimizer_that_wraps_another_adds_nothing():
    parameters = make()
    trained, optimizer = TrainableParameters(lambda: parameters), Wrapping(optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert trained.measure().pending_optimizer_bytes == trained.nbytes
    assert optimizer.param_groups


def test_groups_count_by_their_own_settings():
    one, other = make()
    trained = TrainableParameters(lambda: [one, other])
    optimizer = optim.SGD([{"params": [one], "momentum": 0.9}, {"params": [other]}], lr=0.1)
    assert trained.measure().pending_optimizer_bytes == one.nbytes
    assert optimizer.param_groups


def test_gradients_and_state_are_measured_once_if_an_optimizer_is_wrapped():
    parameters, others = make(), make()
    trained, optimizer = TrainableParameters(lambda: parameters), optim.Adam([*parameters, *others])
    wrapping = Wrapping(optimizer)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    assert trained.measure() == (nbytes, 0, 0, 2 * nbytes)
    take_step(wrapping.wrapped, parameters + others)
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    assert trained.measure() == (nbytes, nbytes, 2 * nbytes + counters // 2, 0)


def test_parameters_that_are_unfrozen_later_are_trained_from_then_on():
    frozen, other = make()
    frozen.requires_grad_(False)
    trained, optimizer = TrainableParameters(lambda: [frozen, other]), optim.Adam([frozen, other])
    take_step(optimizer, [other])
    frozen.requires_grad_(True)
    assert trained.nbytes == frozen.nbytes + other.nbytes
    assert trained.measure(assumed_values=0).pending_optimizer_bytes == 2 * frozen.nbytes


def test_state_of_unknown_optimizers_is_pending_only_where_it_is_assumed():
    parameters = make()
    trained = TrainableParameters(lambda: parameters)
    assert trained.measure(assumed_values=0).pending_optimizer_bytes == 0
    optimizer = optim.NAdam(parameters)
    assert trained.measure(assumed_values=0).pending_optimizer_bytes == 0
    assert trained.measure().pending_optimizer_bytes == 2 * trained.nbytes
    assert optimizer.param_groups


def test_a_quantized_parameter_counts_what_it_wraps():
    values, scale = torch.zeros(64, 32, dtype=torch.int8), torch.ones(64, 1)
    parameter = nn.Parameter(Quantized(values, scale), requires_grad=False)
    assert TrainableParameters(lambda: [parameter]).measure().parameter_bytes == values.nbytes + scale.nbytes


def test_optimizers_are_found_without_memory_for_all_objects_of_the_process():
    parameters, bystanders = make(), [[] for _ in range(2**18)]
    optimizer = optim.Adam(parameters)
    trained = TrainableParameters(lambda: parameters)
    tracemalloc.start()
    try:
        found, (_, peak_bytes) = trained.measure(assumed_values=0), tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.pending_optimizer_bytes == 2 * sum(parameter.nbytes for parameter in parameters)
    assert peak_bytes < len(bystanders)
    assert optimizer
