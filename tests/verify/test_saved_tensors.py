"""Verification under saved-tensor hooks: swapped tensors are compared with copies when they are unpacked."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import ResultDiffers
from lmswap.saved_tensors.saved_storage import SavedStorage
from tests.training import same_bits
from tests.verify.models import MODELS, SMALL, step

pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


@pytest.mark.parametrize("name", ["resnet", "encoder", "broken"])
def test_all_swapped_tensors_of_hooks_are_compared(name):
    case, runs = MODELS[name], []
    for verify in (False, True):
        torch.manual_seed(0)
        model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL, verify=verify, compiler="eager")
        runs.append([value for _ in range(3) for value in step(case, model)])
        report = lmswap.report(model)
        lmswap.disable(model)
    assert same_bits(*runs)
    assert 2 * report.verified.num_saved >= report.verified.num_transfers > 0  # out and in
    assert report.verified.num_differences == 0


@pytest.mark.cpu_only("torch's CUDA allocator rounds what is kept, and gives back what the run before it held")
def test_copies_for_the_comparison_are_not_part_of_the_planned_step():
    forward = []
    for verify in (False, True):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        lmswap.enable(model, policy="swap_all", verify=verify, compiler="eager")
        model(torch.randn(2**14, 64)).sum().backward()  # 4 MiB each
        model(torch.randn(2**14, 64)).sum().backward()
        planned = lmswap.api._sessions[model].plans.newest()
        forward.append(planned.costs.scratch_bytes[: planned.merged.program.segments[0].stop])
        lmswap.disable(model)
    assert forward[0] == forward[1]


@pytest.mark.parametrize("moment", ["the recorded step", "a planned step"])
def test_hooks_detect_a_wrong_view_of_right_bytes(moment, monkeypatch):
    case = MODELS["encoder"]
    torch.manual_seed(0)
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL, verify=True, compiler="eager")
    if moment == "a planned step":
        step(case, model)
    fetch = SavedStorage.fetch
    # Every byte arrives, but of the place where it belongs nothing is known.
    monkeypatch.setattr(SavedStorage, "fetch", lambda self: fetch(self).view(torch.uint8).flatten().roll(4))
    message = r"saved tensor unpacked by \w+Backward0.*made by module .*models\.py:\d+"
    with pytest.raises(ResultDiffers, match=message) as caught:
        step(case, model)
    assert caught.value.step == (1 if moment == "the recorded step" else 2)
    assert lmswap.api._sessions[model].verified.num_differences == 1
    monkeypatch.undo()
    step(case, model)
    lmswap.disable(model)
