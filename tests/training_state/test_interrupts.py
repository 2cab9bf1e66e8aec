"""A backward or an update that an exception ends, wherever Python runs handlers of signals, can be repeated."""

import copy

import pytest
import torch

import lmswap
from tests.training import session_of
from tests.training_state import test_gradients
from tests.training_state.interrupted import interrupted_runs
from tests.training_state.test_streaming import LAYERS, WIDTH, all_tensors, made, non_resident, same, streaming


def backward(model):
    model.zero_grad()
    model(torch.ones(4, WIDTH)).backward()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_an_update_that_is_interrupted_anywhere_can_be_repeated(stride):
    model, optimizer = made()
    state = streaming(model, optimizer)
    for _ in range(3):
        backward(model)
        optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model)
    optimizer.step()
    expected = [tensor.clone() for tensor in all_tensors(model, optimizer)]
    num_moved = len(non_resident(model, optimizer))

    def prepare():
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        backward(model)
        return optimizer.step

    for point, _ in interrupted_runs(prepare, stride):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        backward(model)
        optimizer.step()
        assert same(all_tensors(model, optimizer), expected), point
        assert len(non_resident(model, optimizer)) == num_moved, point
        assert not state._fetched
    lmswap.disable(model)


def gradients(model):
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.cpu_only("a GPU's backward runs in a thread of its own, where no handler of a signal runs")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_backward_whose_gradients_stream_can_be_repeated_from_anywhere(stride):
    model, optimizer = made()
    test_gradients.streaming(model, optimizer)
    for _ in range(4):
        backward(model)
    expected = gradients(model)
    # Each adds to earlier gradients.
    for point, num_raised in interrupted_runs(lambda: model(torch.ones(4, WIDTH)).backward, stride):
        model.zero_grad(set_to_none=bool(num_raised % 2))
        model(torch.ones(4, WIDTH)).backward()
        assert same(gradients(model), expected), point
        assert len(test_gradients.non_resident_gradients(model)) == LAYERS, point
        assert not session_of(model).updates.gradients._fetched
