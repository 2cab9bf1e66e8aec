"""Retention that plans assume: the most at first, then what steps have shown."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lmswap.ir.program import BufferKind
from lmswap.session.retention import Retention, RetentionEstimate
from lmswap.torch_compat.modules import named_parameters
from lmswap.training_state.optimizer_memory import TrainableParameters

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
def test_observed_retention_overrides_the_default(at_begin, in_backward, num_held):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters(lambda: [weight]).have_gradients)
    assert retention.assumed.num_held == {OUTPUT: 2, GRADIENT: 2}
    run(retention, weight, at_begin=False, in_backward=False)
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    run(retention, weight, at_begin=False, in_backward=False)
    retention.confirm()
    assert retention.assumed.num_held == num_held
    run(retention, weight, at_begin=True, in_backward=True)  # observed no longer
    retention.confirm()
    assert retention.assumed.num_held == num_held


def test_assumed_retention_stays_lowered_after_more_was_observed():
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters(lambda: [weight]).have_gradients)
    most, *fewer = retention.choices
    assert most is retention.assumed
    assert [choice.num_held for choice in fewer] == [{OUTPUT: 2, GRADIENT: 1}, {OUTPUT: 2}, {OUTPUT: 1}]
    retention.assume(fewer[-1])
    run(retention, weight, at_begin=True, in_backward=False)
    retention.confirm()
    assert retention.assumed.num_held == {OUTPUT: 1}


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
def test_gradients_held_longer_than_assumed_are_detected(num_less, at_begin, in_backward, is_short):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters(lambda: [weight]).have_gradients)
    retention.assume(Retention(num_less))
    assert not retention.is_short
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    assert retention.is_short == is_short


@pytest.mark.parametrize("with_arena", [False, True])
@pytest.mark.parametrize("num_less", [0, 1])
@pytest.mark.parametrize(("at_begin", "in_backward"), [(False, False), (True, False), (True, True)])
def test_accumulated_gradients_are_detected_at_a_backward_or_a_step(with_arena, num_less, at_begin, in_backward):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters(lambda: [weight]).have_gradients)
    retention.assume(Retention(num_less))
    assert not retention.may_accumulate(with_arena=with_arena)
    run(retention, weight, at_begin=at_begin, in_backward=in_backward)
    has_room = with_arena and num_less == 0
    assert retention.may_accumulate(with_arena=with_arena) == (in_backward or (at_begin and not has_room))
    retention.confirm()
    assert retention.may_accumulate(with_arena=with_arena) == in_backward


@pytest.mark.parametrize(("at_begin", "least"), [(True, {OUTPUT: 2, GRADIENT: 1}), (False, {OUTPUT: 1})])
def test_no_plan_may_assume_less_retention_than_observed(at_begin, least):
    weight = nn.Parameter(torch.ones(3))
    retention = RetentionEstimate(TrainableParameters(lambda: [weight]).have_gradients)
    run(retention, weight, at_begin=at_begin, in_backward=False)
    retention.confirm()
    assert retention.choices[-1].num_held == least


def test_unexpected_retention_restores_the_largest_assumption_once():
    retention = RetentionEstimate(lambda: False)
    retention.confirm()
    assert retention.assumed.num_held == {OUTPUT: 2}
    assert retention.assume_most()
    assert retention.assumed.num_held == {OUTPUT: 2, GRADIENT: 2}
    retention.assume(retention.choices[1])
    assert not retention.assume_most()


def test_parameters_are_not_kept_alive():
    model = nn.Linear(3, 3)
    found = weakref.ref(model)
    trained = TrainableParameters(lambda: named_parameters(found).values())
    del model
    gc.collect()
    assert not trained.have_gradients()
    assert trained.nbytes == 0
    assert not any(trained.measure())
