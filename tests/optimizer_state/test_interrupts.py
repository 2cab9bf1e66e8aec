"""A backward or an update that an exception ends, wherever Python runs handlers of signals, can be repeated."""

import copy
import itertools
import sys

import pytest
import torch

import lmswap
from tests.capture.test_interrupts import Stop, handling, interrupt_at
from tests.optimizer_state import test_gradients
from tests.optimizer_state.test_streaming import LAYERS, WIDTH, all_tensors, made, non_resident, same, streaming
from tests.training import session_of


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
    num_moved, num_raised, before = len(non_resident(model, optimizer)), 0, sys.gettrace()
    for point in itertools.count(1, stride):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        backward(model)
        trace, counts = interrupt_at(point)
        with handling():
            sys.settrace(trace)
            try:
                optimizer.step()
            except Stop:
                num_raised += 1
            finally:
                sys.settrace(before)
                torch.set_grad_enabled(True)  # torch's own step leaves it off if it is interrupted as it ends
        if counts[0] < point:
            break
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        backward(model)
        optimizer.step()
        assert same(all_tensors(model, optimizer), expected), point
        assert len(non_resident(model, optimizer)) == num_moved, point
        assert not state._fetched
    assert num_raised > 500 / stride
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
    num_raised, before = 0, sys.gettrace()
    for point in itertools.count(1, stride):
        loss = model(torch.ones(4, WIDTH))
        trace, counts = interrupt_at(point)
        with handling():
            sys.settrace(trace)
            try:
                loss.backward()  # adds to earlier gradients
            except Stop:
                num_raised += 1
            finally:
                sys.settrace(before)
        if counts[0] < point:
            break
        model.zero_grad(set_to_none=bool(num_raised % 2))
        model(torch.ones(4, WIDTH)).backward()
        assert same(gradients(model), expected), point
        assert len(test_gradients.non_resident_gradients(model)) == LAYERS, point
        assert not session_of(model).gradients._fetched
    assert num_raised > 500 / stride
