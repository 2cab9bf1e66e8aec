"""One trace serves calls of all sizes: one plan those whose steps need no swaps, and one each bucket of the others."""

import functools
import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.api import _session
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.session import budget
from lmswap.session.graph_sizes import BorrowedPlans

pytestmark = [
    pytest.mark.cpu_only("on a GPU tensors have offsets, which are those of one size"),
    pytest.mark.usefixtures("resident"),
]
LENGTHS = (24, 40, 31, 12, 64, 24, 7, 80)


class Tokens(nn.Module):
    """A transformer with tied weights, dropout and statistics of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(64, 128), nn.Embedding(128, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True, norm_first=True)
        self.norm = nn.BatchNorm1d(128)

    def forward(self, ids, cuts=()):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(ids) + self.position(torch.arange(length))
        x = self.layer(x, mask, is_causal=True)
        x = self.norm(x.flatten(0, 1)).view_as(x) / length**0.5
        if cuts:
            x = torch.cat([part.cumsum(1) for part in x.split([*cuts], 1)], 1)
        return x @ self.embedding.weight.T


def calls(lengths=LENGTHS):
    return [(torch.randint(0, 64, (8, length)),) for length in lengths]


LOSSES = {
    "mean": lambda logits: logits.square().mean(),
    "sum": lambda logits: logits.sum(),
    "cross entropy": lambda logits: nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 64
    ),
}


def enabled(model, **options):
    torch.compiler.reset()
    return lmswap.enable(model, **({"budget": "4GiB", "min_swap_bytes": 4096} | options))


def trained(model, batches, loss=LOSSES["mean"], *, after=lambda step: None):
    """Losses, gradients and buffers after each step."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), 1e-3), []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        value = loss(model(*batch))
        value.backward()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        optimizer.step()
        after(step)
    return found


def made():
    torch.manual_seed(0)
    return Tokens()


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss", ["mean", "sum", pytest.param("cross entropy", marks=pytest.mark.slow)])
def test_lengths_that_vary_are_traced_three_times_and_have_plain_bits(loss):
    model, batches = enabled(made()), calls()
    assert same(trained(model, batches, LOSSES[loss]), trained(made(), batches, LOSSES[loss]))
    assert len(_session(model).graphs) == 3  # those of two lengths, and one for all
    assert not any("gradients entered a backward" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


class Masked(Tokens):
    """Takes a mask of the same length."""

    def forward(self, ids, mask):
        return super().forward(ids) * mask[..., None]


def test_inputs_of_one_length_that_varies_share_a_trace():
    torch.manual_seed(0)
    plain = Masked()
    torch.manual_seed(0)
    model = enabled(Masked())
    batches = [(ids, torch.rand(ids.shape)) for (ids,) in calls([24, 40, 31, 12])]
    assert same(trained(model, batches), trained(plain, batches))
    assert len(_session(model).graphs) == 3
    lmswap.disable(model)


@pytest.mark.parametrize("cut", [slice(None, -1), pytest.param(slice(1, -2), marks=pytest.mark.slow)])
def test_parts_of_larger_tensors_are_traced_three_times_and_have_plain_bits(cut):
    model = enabled(made())
    batches = [(ids[:, cut],) for (ids,) in calls([length + 3 for length in LENGTHS])]
    assert not batches[0][0].is_contiguous()
    assert same(trained(model, batches), trained(made(), batches))
    assert len(_session(model).graphs) == 3
    lmswap.disable(model)


def test_whole_numbers_that_cut_tensors_are_traced_three_times_and_have_plain_bits():
    model, ids = enabled(made()), calls([48] * 8)
    cuts = [[first, 40 - first, 8] for first in (10, 25, 33, 12, 5, 8, 31, 20)]
    batches = [(*given, cut) for given, cut in zip(ids, cuts, strict=True)]
    assert same(trained(model, batches), trained(made(), batches))
    assert len(_session(model).graphs) == 3
    lmswap.disable(model)


class Resampled(nn.Module):
    """Resamples features, by a factor or to a size."""

    def __init__(self, num_sides, mode, factor=None):
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[num_sides - 1]
        self.convolution, self.mode, self.factor = kind(2, 4, 3, 2, 1), mode, factor

    def forward(self, x):
        to = {"scale_factor": self.factor} if self.factor else {"size": x.shape[2:]}
        x = torch.tanh(self.convolution(x)).exp()
        return torch.tanh(nn.functional.interpolate(x, mode=self.mode, **to)).exp()


RESAMPLED = [
    *((2, "nearest", None), (2, "bilinear", 2), (1, "nearest", 1.7), (1, "linear", None), (2, "bilinear", 0.6)),
    *((2, "bicubic", None), (2, "area", None), (2, "nearest-exact", 2), (3, "nearest", 2), (3, "trilinear", None)),
    *((1, "nearest-exact", None), (3, "nearest-exact", None)),
]


@pytest.mark.parametrize("how", [*RESAMPLED[:2], *(pytest.param(how, marks=pytest.mark.slow) for how in RESAMPLED[2:])])
@pytest.mark.parametrize("channels_last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_images_of_several_sizes_that_are_resampled_are_traced_three_times_and_have_plain_bits(how, channels_last):
    models, num_sides = [], how[0]
    kept = [torch.channels_last, torch.channels_last_3d][num_sides - 2] if channels_last else torch.contiguous_format
    if channels_last and num_sides == 1:
        pytest.skip("there is no such format")
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Resampled(*how).to(memory_format=kept))
    plain, model = models
    enabled(model)
    sides = ((16, 10, 6), (24, 15, 9), (33, 9, 8), (27, 13, 7), (12, 20, 9))
    batches = [(torch.randn(2, 2, *each[:num_sides]).to(memory_format=kept),) for each in sides]
    assert same(trained(model, batches), trained(plain, batches))
    assert len(_session(model).graphs) == 3
    lmswap.disable(model)


def test_two_sizes_are_two_traces_of_their_own():
    """As of a last batch that is smaller: what is planned for the others is not captured again."""
    model, batches = enabled(made()), calls([64, 64, 40, 64, 64, 40])
    assert same(trained(model, batches), trained(made(), batches))
    graphs = _session(model).graphs
    assert [graph.program.name for graph in graphs] == ["Tokens"] * 2
    assert not any(graph.sizes.vary for graph in graphs)
    lmswap.disable(model)


@functools.cache
def least_bytes(length):
    return unmoved_bytes(made, *calls([length])[0])


@pytest.fixture
def _small_margins(monkeypatch):
    for kind in ("_MARGIN", "_MARGIN_UNMOVED", "_MARGIN_SETTLED"):
        monkeypatch.setitem(vars(budget)[kind], "cpu", budget._Margin(64 * 2**10))


def planned_sizes(model):
    """Of each plan by symbolic sizes, those that it was made for, in the order in which they were made."""
    return [tuple(graph.sizes.of_program.values()) for graph in _session(model).graphs if graph.sizes.of_program]


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of first steps, by what their losses take
@pytest.mark.usefixtures("_small_margins")
def test_sizes_whose_steps_do_not_fit_share_the_plans_of_their_buckets():
    between_bytes = (least_bytes(48) + least_bytes(128)) // 2
    batches = calls([24, 40, 31, 113, 33, 120, 16, 128, 48, 127])
    model, moved = enabled(made(), budget=between_bytes), {}

    def note(step):
        report = lmswap.report(model)
        moved[batches[step][0].shape[1]] = report.swapped_out_bytes + report.recomputed_bytes

    assert same(trained(model, batches, after=note), trained(made(), batches))
    assert moved[113]
    assert moved[120]
    assert moved[128]
    assert not any(moved[length] for length in (31, 33, 16, 48))
    assert planned_sizes(model) == [(31,), (128,)]
    assert lmswap.report(model).num_sized_plans == 2
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_parts_of_larger_tensors_share_the_plans_of_their_buckets():
    batches = [(ids[:, :-1],) for (ids,) in calls([25, 41, 32, 114, 121, 128])]
    model = enabled(made(), budget=(least_bytes(48) + least_bytes(128)) // 2)
    assert same(trained(model, batches), trained(made(), batches))
    assert planned_sizes(model) == [(31, 32), (127, 128)]
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
@pytest.mark.parametrize("pays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_smaller_sizes_run_by_the_plan_of_larger_ones_until_one_of_their_own_pays(pays, monkeypatch):
    monkeypatch.setattr(BorrowedPlans, "have_cost_a_plan", lambda self, sizes: pays)
    batches = calls([24, 40, 31, 128, 104, 100])
    model = enabled(made(), budget=(least_bytes(48) + least_bytes(128)) // 2)
    assert same(trained(model, batches), trained(made(), batches))
    assert planned_sizes(model) == [(31,), (128,), *[(112,)] * pays]
    report = lmswap.report(model)
    assert report.swapped_out_bytes + report.recomputed_bytes
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_declared_largest_sizes_are_planned_first_and_serve_the_others():
    batches = calls([24, 104, 128, 110, 31, 70])
    torch._dynamo.mark_dynamic(batches[0][0], 1, min=2, max=128)
    model = enabled(made(), budget=(least_bytes(48) + least_bytes(128)) // 2)
    assert same(trained(model, batches), trained(made(), batches))
    assert planned_sizes(model) == [(24,), (128,)]
    lmswap.disable(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_the_seconds_of_ops_of_a_new_bucket_are_scaled_from_measured_steps_of_another(monkeypatch):
    known, costs = [], OpProfiler.costs

    def note(self, program, graphs, known_seconds=()):
        known.append(sum(known_seconds))
        return costs(self, program, graphs, known_seconds)

    monkeypatch.setattr(OpProfiler, "costs", note)
    batches = calls([24, 40, 31, *[96] * 5, 110])
    model = enabled(made(), budget=(least_bytes(64) + least_bytes(112)) // 2)
    known.clear()
    assert same(trained(model, batches), trained(made(), batches))
    assert planned_sizes(model) == [(31,), (96,), (112,)]
    session = _session(model)
    step = session.plans[session.graphs[-2].follows]
    assert known == [0, 0, 0, 0, pytest.approx(112 / 96 * step.costs.free_seconds, rel=0.2)]
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins", "unmoved_margin")
def test_later_buckets_are_planned_with_a_smaller_margin_once_a_step_of_their_trace_has_moved_tensors(monkeypatch):
    monkeypatch.setitem(budget._MARGIN, "cpu", budget._Margin(2**20))
    batches = calls([24, 40, 31, 96, 110])
    model = enabled(made(), budget=(least_bytes(64) + least_bytes(112)) // 2 + 2**20)
    assert same(trained(model, batches), trained(made(), batches))
    session = _session(model)
    first, second = (session.plans[graph.follows] for graph in session.graphs[-2:])
    assert planned_sizes(model) == [(31,), (96,), (112,)]
    assert first.moves
    assert first.made_with.margin_bytes == 2**20
    assert second.made_with.margin_bytes == 64 * 2**10
    assert second.room.spared_margin_bytes == 0  # it is the plan of its first steps
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_a_size_that_no_plan_fits_runs_by_the_plan_that_takes_the_least(monkeypatch):
    batches, budget_bytes = calls([24, 40, 31, 128]), (least_bytes(48) + least_bytes(128)) // 2
    model = enabled(made(), budget=budget_bytes)

    def leave_no_room(step):
        if step == 2:
            monkeypatch.setitem(budget._MARGIN, "cpu", budget._Margin(budget_bytes))

    assert same(trained(model, batches, after=leave_no_room), trained(made(), batches))
    session = _session(model)
    step = session.plans[session.graphs[-1].follows]
    least_step_bytes = session.planner.least_bytes(step.merged.program, step.costs, step.allowance)
    assert step.excess_bytes > 0
    assert step.tensor_peak_bytes <= least_step_bytes - step.allowance.fixed_bytes
    lmswap.disable(model)


class Cropped(nn.Module):
    """Convolutions down and up again, whose result would be cropped if a size was odd; running statistics."""

    def __init__(self):
        super().__init__()
        self.whole, self.down = nn.Conv2d(2, 12, 3, padding=1), nn.Conv2d(12, 24, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(24, 12, 2, 2), nn.Conv2d(24, 3, 1)
        self.norm, self.other_norm = nn.BatchNorm2d(12), nn.InstanceNorm2d(24, affine=True)

    def forward(self, x):
        x = torch.relu(self.norm(self.whole(x)))
        up = self.up(torch.relu(self.other_norm(self.down(x))))
        return self.head(torch.cat([x, up[..., : x.shape[2], : x.shape[3]]], 1))


class Strided(nn.Module):
    """Attention between strided convolutions: no size of its results is one of its inputs."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(8, 48, 5, 2, 2), nn.GELU(), nn.Conv1d(48, 48, 5, 2, 2))
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, 0.1, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(self.convolutions(x).transpose(1, 2))


class Gated(nn.Module):
    """Experts with a gate, a scan, and every second place of its result."""

    def __init__(self):
        super().__init__()
        self.given, self.gate, self.norm = nn.Linear(16, 48), nn.Linear(48, 2), nn.GroupNorm(4, 48)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(2))

    def forward(self, x):
        x = torch.tanh(self.given(x))
        weights = self.gate(x).softmax(-1)
        x = x + sum(weights[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return (x.flip(1).cumsum(1) / x.shape[1])[:, ::2]


SIZED = {
    "tokens": (Tokens, lambda size: torch.randint(0, 64, (4, size))),
    "cropped": (Cropped, lambda size: torch.randn(2, 2, size // 4 * 2, (size + 9) // 4 * 2)),
    "strided": (Strided, lambda size: torch.randn(4, 8, 4 * size)),
    "gated": (Gated, lambda size: torch.randn(4, size, 16)),
    "resampled": (functools.partial(Resampled, 2, "bilinear", 2), lambda size: torch.randn(4, 2, size, 3 * size // 2)),
}


QUICK = [("tokens", "recompute"), ("strided", "swap_all"), ("cropped", "recompute"), ("gated", "swap_all")]
UNMOVED = [("resampled", "auto")]  # its steps fit
OTHERS = [case for case in itertools.product(SIZED, ("auto", "swap_all", "recompute")) if case not in QUICK + UNMOVED]


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
@pytest.mark.parametrize(
    ("name", "policy"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_plans_that_move_tensors_run_other_sizes_with_plain_bits(name, policy):
    make, batch = SIZED[name]
    lengths = (48, 62, 95, 61, 90, 57, 94)
    batches = [(batch(length),) for length in lengths]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    plain, model = models
    step = itertools.count()

    def loss(result):  # the gradients that enter have strides of 0 in every second step
        return result.sum() / 64 if next(step) % 2 else result.square().mean()

    budget_bytes = unmoved_bytes(make, batch(95)) * (24 if policy == "swap_all" else 17) // 20
    model = enabled(model, budget=budget_bytes, policy=policy)
    found = trained(model, batches, loss)
    step = itertools.count()
    assert same(found, trained(plain, batches, loss))
    session = _session(model)
    shared = [graph for graph in session.graphs if graph.sizes.fitting and session.plans[graph.follows].moves]
    assert shared
    assert all(graph.sizes.are_kept for graph in shared)
    assert not any("gradients entered a backward" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
@pytest.mark.parametrize("policy", ["swap_all", pytest.param("recompute", marks=pytest.mark.slow)])
def test_each_size_of_a_shared_plan_is_verified(policy):
    batches = calls([24, 40, 120, 104, 128, 97])
    model = enabled(made(), budget=(least_bytes(48) + least_bytes(128)) // 2, policy=policy, verify=True)
    counts = []

    def count(_):
        found = lmswap.report(model).verified
        counts.append((found.num_plain_gradients, found.num_gradients))

    assert same(trained(model, batches, after=count), trained(made(), batches))
    (*_, before, last), num_parameters = counts, len([*model.parameters()])
    assert [after - first for first, after in zip(before, last, strict=True)] == [num_parameters] * 2
    assert planned_sizes(model) == [(120,), (128,)]
    assert lmswap.report(model).verified.num_differences == 0
    lmswap.disable(model)


class Adapted(Tokens):
    """Its embedding and layer are frozen; a small one is trained beside it."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(128, 8, bias=False), nn.GELU(), nn.Linear(8, 128, bias=False))

    def forward(self, ids, cuts=()):
        logits = super().forward(ids, cuts)
        return logits + self.adapter(self.embedding(ids)) @ self.embedding.weight.T


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
@pytest.mark.parametrize("kind", ["frozen weights", "training state"])
def test_plans_that_place_weights_run_other_sizes_with_plain_bits(kind):
    make = Adapted if kind == "frozen weights" else Tokens
    models, optimizers, found = [], [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
        trained_ones = [p for p in models[-1].parameters() if p.requires_grad]
        optimizers.append(torch.optim.Adam(trained_ones, 1e-3))
    own = {"optimizer": optimizers[1]} if kind == "training state" else {"weights": "swap"}
    batches = calls([48, 62, 95, 61, 90, 94])
    enabled(models[1], budget="9MiB" if kind == "training state" else "5MiB", **own)
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            losses.append(model(*batch).square().mean())
            losses[-1].backward()
            optimizer.step()
        found.append([*(loss.detach() for loss in losses), *(p.detach().clone() for p in model.parameters())])
    assert same(*found)
    session = _session(models[1])
    assert any(graph.sizes.fitting and session.plans[graph.follows].moves for graph in session.graphs)
    assert lmswap.report(models[1]).swapped_in_bytes
    lmswap.disable(models[1])


def unmoved_bytes(make, batch):
    """The budget that a step of this batch needs without swaps."""
    torch.compiler.reset()
    model = lmswap.enable(make(), "4GiB", policy="none")
    trained(model, [(batch,)])
    report = lmswap.report(model)
    lmswap.disable(model)
    return report.predicted_peak_bytes + report.margin_bytes


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_a_plan_that_has_to_move_tensors_from_now_on_serves_its_bucket(resident):
    need_bytes = least_bytes(64)
    batches = calls([64, 60, 56, 64, 62, 50, 64, 56, 50, 62, 64])
    model = enabled(made(), budget=need_bytes + 2**25)

    def grow(step):
        resident.other_bytes += (2**25 + need_bytes // 8) * (step == 4)

    assert same(trained(model, batches, after=grow), trained(made(), batches))
    report = lmswap.report(model)
    assert report.swapped_out_bytes + report.recomputed_bytes > 0
    lmswap.disable(model)


class Expert(nn.Module):
    """Of a mixture: it takes the tokens that are routed to it, another number in each step."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, token, place, weights):
        return self.down(torch.tanh(self.up(x[token]))) * weights[token, place, None]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.experts = nn.Linear(16, 2), nn.ModuleList([Expert(), Expert()])

    def forward(self, x):
        weights, chosen = self.route(x).softmax(-1).topk(1, -1)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)  # one tensor's columns
            x = x.index_add(0, token, expert(x, token, place, weights))
        return x


def test_experts_are_traced_three_times_each_and_have_plain_bits():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Experts())
    plain, model = models
    batches = [(torch.randn(64, 16),) for _ in range(7)]
    assert same(trained(enabled(model), batches), trained(plain, batches))
    assert len(_session(model).graphs) == 6
    lmswap.disable(model)


def test_sizes_that_share_memory_which_is_written_are_captured_by_themselves():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            x += 1
            return (x * y).sum() * self.weight

    def sums(model):
        torch.manual_seed(1)
        return [model(one[:size], one[4 : 4 + size]).detach() for size in (9, 11, 12, 13) for one in (torch.randn(40),)]

    model = enabled(Writes())
    assert same(sums(model), sums(Writes()))
    lmswap.disable(model)


def test_sizes_that_share_memory_with_others_are_captured_by_themselves():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            return (x * y).sum() * self.weight

    def sums(model):
        torch.manual_seed(1)
        pairs = ((torch.randn(40), torch.randn(40)) for _ in itertools.count())
        return [
            model(one[:size], (one if shares else other)[4 : 4 + size]).detach()
            for size, shares, (one, other) in zip((9, 11, 12, 12, 13, 13), (0, 0, 0, 1, 0, 1), pairs, strict=False)
        ]

    model = enabled(Adds())
    assert same(sums(model), sums(Adds()))
    lmswap.disable(model)


def test_the_report_predicts_the_sizes_of_the_last_step():
    model, batches = enabled(made()), calls([24, 40, 31, 128, 8])
    trained(model, batches)
    small = lmswap.report(model)
    trained(model, calls([128]))
    large = lmswap.report(model)
    assert large.predicted_peak_bytes > 1.5 * small.predicted_peak_bytes
    lmswap.disable(model)


def test_evicted_captures_are_traced_again():
    model, batches = enabled(made()), calls()
    expected = trained(made(), batches)
    found = trained(model, batches, after=lambda step: step == 5 and _session(model).traces.evict_complete())
    assert same(found, expected)
    lmswap.disable(model)
