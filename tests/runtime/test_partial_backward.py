"""A backward that is at work is one thread's at a time; any other that wants a part of it is refused in a sentence."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.runtime import partial_backward
from lmswap.runtime.partial_backward import ActiveBackwards

REFUSAL = r"Net was called while its backward runs in another thread.*take turns"


class Waiting:
    """A backward of three parts, of which the second waits until it may go on."""

    def __init__(self):
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()
        self.backwards = ActiveBackwards("Net")
        self.at_work = self.backwards.add(self._parts())

    def _parts(self):
        yield {0: "first"}
        self.is_inside.set()
        assert self.may_go_on.wait(60)
        yield {1: "second"}
        yield {2: "third"}


@pytest.fixture
def waiting():
    """A backward whose second part runs in another thread, and what that thread gets of it in the end."""
    backward = Waiting()
    with ThreadPoolExecutor(1) as threads:
        backward.given = threads.submit(list, backward.at_work)
        assert backward.is_inside.wait(60)
        yield backward
        backward.may_go_on.set()


@pytest.mark.parametrize("in_backward", [False, True], ids=["a forward", "a backward"])
def test_another_threads_step_is_refused_while_a_part_runs(waiting, in_backward, monkeypatch):
    if in_backward:
        monkeypatch.setattr(partial_backward, "current_graph_task_id", lambda: 1)
    with pytest.raises(OptionError, match=REFUSAL):
        waiting.backwards.end()
    with pytest.raises(OptionError, match=REFUSAL):
        next(waiting.at_work)
    waiting.may_go_on.set()
    assert waiting.given.result(60) == [{0: "first"}, {1: "second"}, {2: "third"}]


def test_an_error_of_a_part_is_its_own(monkeypatch):
    def parts():
        yield {}
        raise ValueError("generator already executing")  # the words of CPython, out of the model's code

    monkeypatch.setattr(partial_backward, "current_graph_task_id", lambda: 1)
    for take in (lambda backwards, work: list(work), lambda backwards, work: backwards.end()):
        backwards = ActiveBackwards("Net")
        work = backwards.add(parts())
        with pytest.raises(ValueError, match="generator already executing") as raised:
            take(backwards, work)
        assert not isinstance(raised.value, OptionError)


@torch.library.custom_op("lmswap_tests::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    """The identity; where two threads are to meet in it, its backward waits in the first and lets the second go on."""
    return x.clone()


@torch.library.custom_op("lmswap_tests::meet_backward", mutates_args=())
def meet_backward(gradient: torch.Tensor) -> torch.Tensor:
    """See `meet`."""
    if Meeting.now is not None:
        Meeting.now.come()
    return gradient.clone()


for op in (meet, meet_backward):
    op.register_fake(torch.empty_like)
meet.register_autograd(lambda _, gradient: meet_backward(gradient))


class Meeting:
    now = None

    def __init__(self):
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def come(self):
        if not self.is_inside.is_set():
            self.is_inside.set()
            assert self.may_go_on.wait(60)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return self.last(meet(torch.tanh(self.first(x))))


def test_overlapping_backwards_in_two_threads_are_refused():
    torch.manual_seed(0)
    model, data = Net(), torch.randn(2048, 256)
    model(data).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    lmswap.enable(model, policy="swap_all")
    for _ in range(2):
        model.zero_grad()
        model(data).square().mean().backward()
    losses = [model(data).square().mean() for _ in range(2)]
    Meeting.now = Meeting()
    model.zero_grad()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(losses[0].backward)
        try:
            assert Meeting.now.is_inside.wait(60)
            with pytest.raises(OptionError, match=REFUSAL):
                losses[1].backward()
        finally:
            Meeting.now.may_go_on.set()
        first.result(60)
    Meeting.now = None
    found = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))
    lmswap.disable(model)
