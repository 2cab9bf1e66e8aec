"""Optimizer state on a GPU: what does not fit streams, and what torch reserves stays within the budget."""

import pytest
import torch
from torch import nn

import lmswap
from tests.training import session_of
from tests.training_state.test_streaming import non_resident, same

MIB = 2**20
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


def made():
    torch.manual_seed(0)
    layers = (layer for _ in range(48) for layer in (nn.Linear(512, 512), nn.Tanh()))
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=5):
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().cpu())
    return [*seen, *(parameter.detach().cpu() for parameter in model.parameters())]


def on_host(saved):
    """``saved``, of an optimizer, copied to the CPU."""
    state = {number: {key: value.cpu() for key, value in values.items()} for number, values in saved["state"].items()}
    return {**saved, "state": state}


def test_state_that_does_not_fit_streams_within_the_budget():
    plain, plain_optimizer = made()
    expected = train(plain, plain_optimizer)
    expected_after = train(plain, plain_optimizer, 2)
    del plain, plain_optimizer
    torch.cuda.empty_cache()
    held_bytes = torch.cuda.memory_reserved()
    budget_bytes = held_bytes + 200 * MIB  # parameters and gradients take 96, the state as much
    model, optimizer = made()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(1.02 * budget_bytes / torch.cuda.mem_get_info()[1])
    try:
        lmswap.enable(model, budget_bytes, optimizer=optimizer)
        found = train(model, optimizer)
        saved = {key: value.cpu() for key, value in model.state_dict().items()}, on_host(optimizer.state_dict())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        resumed = train(model, optimizer, 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report = lmswap.report(model)
    assert same(found, expected)
    assert same(resumed, expected_after)
    assert non_resident(model, optimizer)
    assert report.state_in_bytes == report.state_out_bytes > 0
    assert torch.cuda.max_memory_reserved() <= budget_bytes
    assert report.highest_peak_bytes <= budget_bytes
    lmswap.disable(model)
    assert same([parameter.cpu() for parameter in model.parameters()], expected_after[2:])


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_training_state_larger_than_the_card_streams_within_the_budget(backwards):
    def trained(enable):
        torch.manual_seed(0)
        layers = (layer for _ in range(48) for layer in (nn.Linear(512, 512), nn.Tanh()))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        enable(model, optimizer)
        seen = []
        for step in range(5):
            for number in range(backwards):
                torch.manual_seed(backwards * step + number)
                loss = model(torch.randn(64, 512, device="cuda")).square().mean()
                loss.backward()
                seen.append(loss.detach().cpu())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 3)
        state = [value.cpu() for values in optimizer.state.values() for value in values.values()]
        return model, optimizer, [*seen, *(parameter.detach().cpu() for parameter in model.parameters()), *state]

    expected = trained(lambda model, _: model.cuda())[2]
    torch.cuda.empty_cache()
    budget_bytes = torch.cuda.memory_reserved() + 128 * MIB  # of 192
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(1.02 * budget_bytes / torch.cuda.mem_get_info()[1])
    try:
        model, optimizer, found = trained(
            lambda model, optimizer: lmswap.enable(model, budget_bytes, device="cuda", optimizer=optimizer)
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same(found, expected)
    assert torch.cuda.max_memory_reserved() <= budget_bytes
    find = session_of(model).engine.host_copies.find
    assert all(find(value.untyped_storage()) for value in optimizer.state[model[0].weight].values() if value.ndim)


def test_an_update_of_resident_parameters_takes_temporaries_of_a_part():
    """As the budget reserves them where plans may place parameters; of all they would be 48 MiB."""
    model, optimizer = made()
    lmswap.enable(model, "4GiB", optimizer=optimizer, weights="swap")
    train(model, optimizer, 2)
    assert not non_resident(model, optimizer)
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() <= before_bytes + 16 * MIB


def test_loading_takes_no_more_than_a_part_of_the_state():
    model, optimizer = made()
    lmswap.enable(model, "4GiB", optimizer=optimizer)
    updates = session_of(model).updates
    updates.stream_state(updates.state_bytes // 4)
    train(model, optimizer, 2)
    saved = on_host(optimizer.state_dict())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() <= before_bytes + 16 * MIB  # of 96
    found = on_host(optimizer.state_dict())["state"]
    assert all(same([*values.values()], [*found[number].values()]) for number, values in saved["state"].items())
