import torch

from benchmarks.unet3d.recipe import make_optimizer, make_schedule, should_stop


def optimizer():
    return make_optimizer([torch.nn.Parameter(torch.zeros(1))])


def test_is_adam_with_the_rate_of_the_case_study_and_the_eps_of_keras():
    (group,) = optimizer().param_groups
    assert (group["lr"], group["eps"], group["betas"], group["weight_decay"]) == (5e-4, 1e-7, (0.9, 0.999), 0)


def rates(losses):
    adam = optimizer()
    schedule = make_schedule(adam)
    seen = []
    for loss in losses:
        schedule.step(loss)
        seen.append(adam.param_groups[0]["lr"])
    return seen


def test_the_rate_halves_at_the_tenth_epoch_without_progress():
    assert rates([-0.5] + [-0.5] * 9) == [5e-4] * 10
    assert rates([-0.5] + [-0.5] * 10) == [5e-4] * 10 + [2.5e-4]
    assert rates([-0.5] + [-0.5] * 20)[-1] == 1.25e-4


def test_only_a_fall_of_more_than_1e_4_is_progress():
    assert rates([-0.5 - 0.9e-5 * epoch for epoch in range(11)])[-1] == 2.5e-4
    assert rates([-0.5 - 1.1e-4 * epoch for epoch in range(11)])[-1] == 5e-4


def test_training_stops_after_50_epochs_without_a_lower_loss():
    assert not should_stop([])
    assert not should_stop([-0.5] * 50)
    assert should_stop([-0.5] * 51)
    assert not should_stop([-0.5] * 50 + [-0.5 - 1e-9])
    assert should_stop([-0.5] * 3 + [-0.6] + [-0.55] * 50)
