"""Retention of a step by its caller: the most is assumed first, then what was observed."""

import gc

import pytest
import torch
from torch import nn

from lmswap.ir.program import BufferKind
from lmswap.session.optimizer_memory import TrainableParameters
from lmswap.session.retention import RetentionEstimate

OUTPUT, GRADIENT = BufferKind.OUTPUT, BufferKind.GRADIENT


def run(retention, weight, *, at_begin, in_backward):
    weight.grad = torch.ones_like(weight) if at_begin else None
    retention.observe()
    weight.grad = torch.ones_like(weight) if in_backward else None
    retention.observe(in_backward=True)


@pytest.mark.parametrize(
    ("at_begin", "in_backward", "num_held"),
    [
        (True, True, {OUTPUT: 2, GRADIENT: 2}),
        (False, True, {OUTPUT: 2, GRADIENT: 2}),
        (True, False, {OUTPUT: 2, GRADIENT: 1}),
        (False, False, {OUTPUT: 2}),
    ],
)
def test_what_steps_have_shown_is_reckoned_with(at_begin, in_backward, num_held):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters([weight]))
    assert retention.num_held == {OUTPUT: 2, GRADIENT: 2}
    run(retention, weight, at_begin=False, in_backward=False)
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    run(retention, weight, at_begin=False, in_backward=False)
    assert retention.confirm() == (num_held != {OUTPUT: 2, GRADIENT: 2})
    assert retention.num_held == num_held
    run(retention, weight, at_begin=True, in_backward=True)  # observed no longer
    assert not retention.confirm()


def test_where_there_is_room_for_less_less_is_reckoned_with_and_no_more_after_steps_have_shown_more():
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters([weight]))
    found = []
    while retention.lower():
        found.append(retention.num_held)
    assert found == [{OUTPUT: 2, GRADIENT: 1}, {OUTPUT: 2}, {OUTPUT: 1}]
    run(retention, weight, at_begin=True, in_backward=False)
    assert not retention.confirm()
    assert retention.num_held == {OUTPUT: 1}


@pytest.mark.parametrize(
    ("num_less", "at_begin", "in_backward", "is_short"),
    [
        (0, True, True, False),
        (1, True, False, False),
        (1, True, True, True),
        (2, True, False, True),
        (3, True, False, True),
        (3, False, False, False),
    ],
)
def test_gradients_that_are_held_for_longer_than_there_is_room_for_are_seen(num_less, at_begin, in_backward, is_short):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters([weight]))
    for _ in range(num_less):
        retention.lower()
    assert not retention.is_short
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    assert retention.is_short == is_short


@pytest.mark.parametrize("with_arena", [False, True])
@pytest.mark.parametrize("num_less", [0, 1])
@pytest.mark.parametrize(("at_begin", "in_backward"), [(False, False), (True, False), (True, True)])
def test_gradients_may_be_added_up_if_a_backward_begins_with_some_or_if_both_had_no_room(
    with_arena, num_less, at_begin, in_backward
):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters([weight]))
    for _ in range(num_less):
        retention.lower()
    assert not retention.may_accumulate(with_arena=with_arena)
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    has_room = with_arena and num_less == 0
    assert retention.may_accumulate(with_arena=with_arena) == (in_backward or (at_begin and not has_room))
    retention.confirm()
    assert retention.may_accumulate(with_arena=with_arena) == in_backward


@pytest.mark.parametrize(("at_begin", "least"), [(True, {OUTPUT: 2, GRADIENT: 1}), (False, {OUTPUT: 1})])
def test_no_less_is_reckoned_with_than_steps_have_shown(at_begin, least):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters([weight]))
    run(retention, weight, at_begin=at_begin, in_backward=False)
    retention.confirm()
    while retention.lower():
        pass
    assert retention.num_held == least


def test_what_should_not_have_been_held_has_the_most_reckoned_with_once():
    retention = RetentionEstimate(TrainableParameters([]))
    assert retention.confirm()
    assert retention.raise_()
    assert retention.num_held == {OUTPUT: 2, GRADIENT: 2}
    assert retention.lower()
    assert not retention.raise_()


def test_no_parameter_is_kept_alive():
    trained = TrainableParameters([nn.Parameter(torch.ones(3))])
    gc.collect()
    assert not trained.have_gradients()
    assert trained.pending_optimizer_bytes() == 0
    assert trained.nbytes == 12
