"""Host memory that holds swapped tensors compressed: plain torch's bits, in fewer bytes, within the host budget."""

import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lmswap
from lmswap.errors import BudgetExceeded, TierError
from lmswap.runtime import _C
from tests.cases import cases
from tests.models import CASES, LARGE, Case, quick_of, tight_budget
from tests.training import loss_and_gradients, same_bits

SMALL = 4096
MIB = 2**20


class Rectified(nn.Module):
    """A chain of tensors of 1 MiB that are as sparse as its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.relu(x * self.scale)
        return x


class Mixing(nn.Module):
    """A chain whose tensors take far longer to compute than to swap, and are as sparse as its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.relu(x @ self.weight)
        return x


def sparse(width: int = 512) -> torch.Tensor:
    return torch.where(torch.rand(512, width) < 0.1, torch.randn(512, width), 0.0)  # a product would have -0.0


RECTIFIED, MIXING = Case(Rectified, sparse), Case(Mixing, partial(sparse, 2048))


def train(
    case: Case, *, batch=None, num_steps: int = 3, tier: str = "compressed", save=None, keeps: bool = True, **options
):
    """Losses and gradients of some steps, if it ``keeps`` them, and the report; ``save``: where the plan is written."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(case.make(), tier=tier, **{"budget": "4GiB", "min_swap_bytes": SMALL, **options})
    results = []
    for _ in range(num_steps):
        model.zero_grad()
        results += loss_and_gradients(model, case.loss(model((batch or case.batch)())))
        if not keeps:  # the budget counts them
            results.clear()
    report = lmswap.report(model)
    if save is not None:
        lmswap.save_plan(model, save)
    lmswap.disable(model)
    return results, report


@pytest.mark.parametrize("name", quick_of(CASES, ["shared_views"]))
def test_every_policy_gives_the_same_bits(name):
    expected, _ = train(CASES[name], policy="none")
    for policy in ("swap_all", "tflms"):
        actual, report = train(CASES[name], policy=policy)
        assert same_bits(actual, expected)
        if policy == "swap_all":
            assert report.swapped_out_bytes > 0
            assert report.tier_used_bytes == 0
            assert 0 < report.tier_resident_bytes <= report.tier_reserved_bytes


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_compiler_swaps_to_compressed_memory(compiler):
    _, report = train(CASES["encoder"], policy="swap_all", compiler=compiler)
    assert report.swapped_in_bytes > 0


@pytest.mark.parametrize("policy", quick_of(["auto", "swap"], ["auto"]))
def test_under_a_budget_policies_give_the_same_bits(policy):
    expected, unplanned = train(LARGE, policy="none")
    actual, report = train(LARGE, policy=policy, budget=tight_budget(unplanned))
    assert same_bits(actual, expected)
    assert report.swapped_out_bytes > 0 or policy == "auto"  # which may compute all of it again
    assert report.highest_peak_bytes <= report.budget_bytes


def test_verified_and_wiped_steps_are_the_same_steps():
    expected, _ = train(CASES["encoder"], policy="none")
    actual, report = train(CASES["encoder"], policy="swap_all", verify=True, wipe=True)
    assert same_bits(actual, expected)
    assert report.verified.num_transfers > 0
    assert report.verified.num_differences == 0


def test_tensors_take_less_memory_than_their_bytes_which_is_reported():
    _, report = train(RECTIFIED, policy="swap_all")
    assert report.tier_peak_bytes >= 7 * MIB
    assert 3 * report.tier_resident_bytes < report.tier_highest_bytes
    assert "Swapped tensors took " in str(report)
    assert " of host memory for 7." in str(report)


def test_tensors_count_uncompressed_before_the_first_step():
    with pytest.raises(TierError, match=r"has 3\.00 MiB.*count there as they are"):
        train(RECTIFIED, policy="swap_all", host_budget=3 * MIB)
    train(RECTIFIED, policy="swap_all", num_steps=4)
    # From here on it is remembered how well they do.
    _, report = train(RECTIFIED, policy="swap_all", host_budget=3 * MIB)
    assert report.plan_origin == "from cache"
    assert report.tier_planned_bytes >= 7 * MIB
    assert report.tier_resident_bytes <= report.host_budget_bytes


def test_tensors_that_compress_less_than_before_cause_a_reported_replan():
    _, unplanned = train(RECTIFIED, policy="none")
    train(RECTIFIED, policy="swap_all", num_steps=4)
    with pytest.warns(BudgetExceeded, match=r"more than its limit of 3\.00 MiB.*host_budget"):
        _, report = train(
            RECTIFIED, batch=lambda: torch.rand(512, 512), policy="swap_all", num_steps=4, host_budget=3 * MIB
        )
    assert any("compressed tensors took" in note for note in report.plan_notes)
    assert unplanned.tier_resident_bytes == 0


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
def test_a_plan_kept_despite_lower_compression_can_be_saved_and_followed(tmp_path):
    train(RECTIFIED, policy="swap_all", num_steps=4)
    options = {"batch": lambda: torch.rand(512, 512), "num_steps": 2, "host_budget": 3 * MIB}
    expected, report = train(RECTIFIED, **options, policy="swap_all", save=tmp_path / "plan.json")
    assert any(note.startswith("the plan stays as it was after step 1: compressed tens") for note in report.plan_notes)
    actual, _ = train(RECTIFIED, **options, plan=tmp_path / "plan.json")
    assert same_bits(actual, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("resident")
def test_a_plan_that_can_recompute_does_so_when_compression_gets_worse():
    _, unplanned = train(MIXING, policy="none", num_steps=2, keeps=False)
    options = {"policy": "auto", "budget": tight_budget(unplanned, 0.8), "keeps": False}
    _, sparse_ones = train(MIXING, **options, num_steps=4)
    assert sparse_ones.swapped_out_bytes > 0
    limit_bytes = sparse_ones.tier_planned_bytes // 4
    # No longer than until the plan of bytes has run: the next one is that of measured seconds.
    options |= {"num_steps": 3, "host_budget": limit_bytes, "batch": lambda: torch.rand(512, 2048)}
    with pytest.warns(BudgetExceeded, match="compressed tensors took "):
        _, report = train(MIXING, **options)
    (note,) = [note for note in report.plan_notes if "compressed tensors took " in note]
    assert note.startswith("replanned after step 1: compressed tensors took ")
    assert report.recomputed_bytes > 0
    assert report.tier_planned_bytes <= limit_bytes  # held at once, not moved over the step


def test_a_limit_that_is_kept_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetExceeded)
        train(RECTIFIED, policy="swap_all", num_steps=5, host_budget=9 * MIB, batch=lambda: torch.randn(512, 512))


def moved(engine: _C.Engine, values: torch.Tensor, offset: int) -> torch.Tensor:
    """The result of swapping ``values``."""
    token = torch.from_dlpack(engine.out_start(1, "compressed", offset, values.data_ptr(), values.nbytes, 0))
    engine.out_done(int(token), 0)
    back = torch.full_like(values, 7)
    engine.in_done(int(token), engine.in_start(1, int(token), back.data_ptr(), back.nbytes, 0), 0)
    return back


@st.composite
def arrays(draw) -> torch.Tensor:
    """Bytes as tensors of different types and sparsity have them, from any address on."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]))
    nbytes, shift = draw(st.integers(1, 5 * MIB)), draw(st.integers(0, 64))
    values = torch.randn(nbytes // dtype.itemsize + 1, generator=generator)
    values *= draw(st.sampled_from([0.0, 1e-30, 1.0, 1e4]))
    values[torch.rand(values.shape, generator=generator) < draw(st.sampled_from([0.0, 0.03, 0.5]))] = 0
    return torch.empty(nbytes + shift, dtype=torch.uint8)[shift:].copy_(values.to(dtype).view(torch.uint8)[:nbytes])


@cases(60)
@given(arrays(), st.integers(0, 64))
def test_any_bytes_are_restored_and_never_grow(values, page):
    engine = _C.Engine(driver="host")
    engine.open_compressed_tier(16 * MIB)
    engine.reserve("compressed", 8 * MIB)
    for _ in range(2):
        assert torch.equal(moved(engine, values, 4096 * page), values)
    assert engine.tier_stats("compressed").peak_resident_bytes <= -(-values.nbytes // 4096) * 4096
    engine.close()
