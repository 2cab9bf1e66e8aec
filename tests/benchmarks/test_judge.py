"""The judge of budgets: what it draws, and what it says of a run."""

import pytest
import torch

from benchmarks.judge import __main__ as judge
from benchmarks.judge.networks import draw

MIB = 2**20
PLAIN = {"digest": "d", "grown_bytes": 100 * MIB}
KEPT = {
    "digest": "d",
    "highest_peak_bytes": 95 * MIB,
    "measured_peak_bytes": 94 * MIB,
    "predicted_peak_bytes": 94 * MIB,
    "measured_seconds": 1.0,
    "predicted_seconds": 1.05,
    "swapped_out_bytes": MIB,
    "recomputed_bytes": 0,
}


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_network_trains_and_is_the_same_each_time(seed):
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        network = draw(seed)
        model = network.make().train(mode=False)
        loss = model(network.batch()[:1]).square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        losses.append(loss.detach())
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("changed", "broken", "missed"),
    [
        ({}, (), ()),
        ({"refused": "it does not fit"}, ("refused",), ()),
        ({"digest": "e"}, ("other bits than plain torch",), ()),
        ({"highest_peak_bytes": 101 * MIB}, ("held 101.00 MiB",), ()),
        ({"highest_peak_bytes": 90 * MIB}, (), ("used 90.0%",)),
        ({"highest_peak_bytes": 90 * MIB, "swapped_out_bytes": 0}, (), ()),  # it fits as it is
        ({"predicted_peak_bytes": 90 * MIB}, (), ("peak predicted -4.3%",)),
        ({"predicted_seconds": 1.1}, (), ("seconds predicted +10.0%",)),
    ],
)
def test_a_run_is_held_against_promises_and_goals(changed, broken, missed, monkeypatch):
    monkeypatch.setattr(judge, "_run", lambda *_: KEPT | changed)
    verdict = judge.judge(0, 100 * MIB, PLAIN)
    assert (verdict.broken, verdict.missed) == (broken, missed)


def test_budgets_range_from_the_least_to_the_peak(monkeypatch):
    def run(_seed, steps, budget=None):
        if budget == "least":
            return {"least_bytes": 59 * MIB, "unplanned_bytes": 100 * MIB}
        if steps == 1:
            return {"refused": "too small", "needed_bytes": 60 * MIB}
        return PLAIN if budget is None else KEPT

    monkeypatch.setattr(judge, "_run", run)
    _, verdicts = judge.judge_network(0, 0.25)
    assert [verdict.budget_bytes // MIB for verdict in verdicts] == [64, 74, 84, 94, 104]
