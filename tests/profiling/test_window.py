"""Steps and epochs of training loops that know nothing of being watched."""

import re

import pytest
import torch
from torch.utils.data import DataLoader

from lmswap.errors import OptionError
from lmswap.profiling.window import StepCounter, Window, parse_steps


class Loop:
    """A training loop of one parameter, with the counter's calls in ``seen``."""

    def __init__(self, steps_per_epoch=None):
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.seen, self.optimizers = [], []
        self.counter = StepCounter(
            lambda *step: self.seen.append(step), lambda name, *_: self.optimizers.append(name), steps_per_epoch
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.counter.close()

    def step(self, _batch=None):
        self.parameter.grad = torch.ones(1)
        self.optimizer.step()


def batches(count, **options):
    return DataLoader(torch.zeros(count, 1), batch_size=1, **options)


def validate():
    for _ in batches(3):
        pass


def test_an_epoch_is_one_pass_over_a_loader_with_steps_in_it():
    train = batches(3)
    with Loop() as loop:
        for _ in range(2):
            for batch in train:
                loop.step(batch)
            validate()
        assert loop.seen == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 3), (2, 1, 4), (2, 2, 5)]
        assert loop.counter.epochs == [3, 3]


def test_validation_in_the_middle_of_an_epoch_begins_no_new_one():
    with Loop() as loop:
        for number, batch in enumerate(batches(4)):
            loop.step(batch)
            if number % 2:
                validate()
        assert loop.counter.epochs == [4]


def test_recreated_and_persistent_loaders_start_epochs():
    with Loop() as loop:
        lasting = batches(2, num_workers=1, persistent_workers=True)
        for loader in (batches(3), batches(1), lasting, lasting):
            for batch in loader:
                loop.step(batch)
        assert loop.counter.epochs == [3, 1, 2, 2]


def test_two_loaders_side_by_side_are_one_epoch():
    with Loop() as loop:
        for _ in range(2):
            for batch in zip(batches(3), batches(3), strict=True):
                loop.step(batch)
        assert loop.counter.epochs == [3, 3]


def test_gradients_of_several_batches_are_one_step():
    with Loop() as loop:
        for number, batch in enumerate(batches(6)):
            if number % 3 == 2:
                loop.step(batch)
        assert loop.counter.epochs == [2]


def test_of_two_optimizers_the_first_counts_until_it_is_gone():
    with Loop() as loop:
        second = torch.optim.Adam([loop.parameter])
        for batch in batches(2):
            loop.step(batch)
            second.step()
        assert loop.counter.epochs == [2]
        assert loop.optimizers == ["SGD", "Adam", "SGD", "Adam"]
        loop.optimizer = second
        loop.step()
        assert loop.counter.epochs == [3]


def test_without_a_loader_the_number_of_steps_makes_epochs():
    with Loop(steps_per_epoch=2) as loop:
        for _ in range(5):
            loop.step()
        assert loop.seen[2:] == [(2, 0, 2), (2, 1, 3), (3, 0, 4)]
    with Loop() as loop:
        for _ in range(5):
            loop.step()
        assert loop.counter.epochs == [5]


def test_a_closed_counter_leaves_nothing_behind():
    with Loop() as loop:
        pass
    next_batch = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    for batch in batches(2):
        loop.step(batch)
    assert loop.seen == []
    assert not hasattr(next_batch, "__wrapped__")


@pytest.mark.parametrize("text", ["20", "20-50", "a:b", "", "1:2:3", "1.5:3"])
def test_steps_that_are_no_pair_of_numbers_are_refused(text):
    with pytest.raises(OptionError, match=re.escape(f"steps '{text}' are not FIRST:STOP")):
        parse_steps(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("0:5",), "the first must be at least 1"),
        (("5:5",), "the second larger than the first"),
        (("5:8", 0), "epochs count from 1"),
        (("20:50", 2, 49), "an epoch of at least 50 steps, --steps-per-epoch says 49"),
    ],
)
def test_windows_that_cannot_be_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        Window.parse(*given)


def test_a_refusal_states_how_many_steps_there_were():
    error = Window.parse("20:50", 2).error_for([60, 34])
    assert "did not have all steps 20 to 49 of epoch 2: epoch 1 had 60 steps, epoch 2 had 34 steps" in str(error)
    assert "no optimizer made a step" in str(Window().error_for([]))
    assert "did not have all steps 5 to 9: it had 7. Choose others with --steps" in str(Window().error_for([3, 3, 1]))
