"""A report can be made at any time, and what it says is of the step that it names."""

import importlib.util
import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.errors import OptionError
from lmswap.hardware.memory import device_memory
from lmswap.ir.timeline import Lane
from lmswap.session.session import UNPLANNED
from tests.both_paths import PATHS, Break, EagerInside, Net, batch, swapping
from tests.models import quick_of
from tests.session.training import train
from tests.training import session_of

MIB = 2**20


class Alternating(nn.Module):
    sign = 1

    def forward(self, x):
        return x.sigmoid().exp() * x if self.sign > 0 else torch.tanh(x)


class Packed(nn.Module):
    """Sequences of varying lengths: every batch saves other tensors."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 50)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(output)


def look(model, tmp_path, *, draws=False):
    """Make every kind of report of ``model``; return the report."""
    report = lmswap.report(model)

    assert json.loads(report.to_json())["steps"] == report.steps
    if report.measured is not None:
        report.to_chrome_trace(tmp_path / "trace.json")
        if draws:
            report.plot(tmp_path / "picture.png")
    if session_of(model).plans.newest() is None:
        with pytest.raises(OptionError, match="nothing is planned yet"):
            lmswap.explain(model)
    else:
        assert str(lmswap.explain(model))
        assert lmswap.program(model).ops
    return report


def middles():
    return {"plain": None, "break": Break(), "branch": Alternating(), "outside": EagerInside()}


class Loop:
    """What people do to a model, in any order."""

    def __init__(self, model, middle, draw):
        self.model, self.middle, self.draw = model, middle, draw

    def train(self):
        self.model(batch(self.draw.choice((2, 4, 8)), self.draw.choice((8, 16)))).square().mean().backward()

    def train_other_branch(self):
        if isinstance(self.middle, Alternating):
            self.middle.sign *= -1
        self.train()

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            for _ in range(2):
                self.model(batch())
        self.model.train()

    def forward_only(self):
        self.model(batch(self.draw.choice((4, 8))))

    def two_forwards(self):
        losses = [self.model(batch(size)).square().mean() for size in (8, self.draw.choice((4, 8)))]
        self.draw.shuffle(losses)
        for loss in losses:
            loss.backward()

    def backward_twice(self):
        loss = self.model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def keep_and_train(self):
        early = self.model(batch(4)).square().mean()
        self.train()
        early.backward()

    def fail(self):
        with pytest.raises(RuntimeError):
            self.model(torch.randn(4, 5, 16, 16))

    def look_in_mid_step(self):
        loss = self.model(batch()).square().mean()
        lmswap.report(self.model)
        loss.backward()


ACTIONS = [name for name in vars(Loop) if not name.startswith("_")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", quick_of(["plain", "break", "branch", "outside"], ["break"]))
def test_reports_are_complete_after_any_sequence_of_calls(path, kind, tmp_path):
    torch.compiler.reset()
    draw, middle = random.Random(kind), middles()[kind]
    model = swapping(Net(middle), path)
    loop = Loop(model, middle, draw)
    look(model, tmp_path)
    actions = [*draw.sample(ACTIONS, len(ACTIONS)), *draw.choices(ACTIONS, k=3)]
    for action in actions:
        getattr(loop, action)()
        look(model, tmp_path, draws=action == "keep_and_train")
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_reports_are_complete_for_steps_that_save_different_tensors(path, tmp_path):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = swapping(Packed(), path)
    for _ in range(8):
        lengths = torch.randint(5, 12, (16,), device="cpu")
        lengths[0] = 12
        model(torch.randint(0, 50, (16, 12)), lengths).square().mean().backward()
        look(model, tmp_path)
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_of_another_size_is_reported_by_its_own_plan(path):
    torch.compiler.reset()
    model = swapping(nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]), path)
    for rows in (64, 64, 64, 32, 64, 32, 64, 32):
        model(torch.randn(rows, 64)).square().mean().backward()
        report = lmswap.report(model)
        if report.predicted is not None:
            assert report.predicted.lane_bytes(Lane.OUT) == report.swapped_out_bytes
        # Each is moved once out and once in, or stays where hooks have no plan yet.
        moved = {span.nbytes for span in report.measured.spans if span.nbytes}
        assert moved <= {rows * 64 * 4}
    assert moved
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_validation_leaves_the_report_of_the_training_step(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    for _ in range(3):
        model(batch()).square().mean().backward()
    trained, plan = lmswap.report(model), session_of(model).current_step()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(batch(4))
    model.train()
    report = lmswap.report(model)
    assert (report.step, report.trains, report.measured) == (3, True, trained.measured)
    assert (report.swapped_out_bytes, report.measured_peak_bytes) == (
        trained.swapped_out_bytes,
        trained.measured_peak_bytes,
    )
    assert session_of(model).current_step() is plan
    if path == "fx":  # hooks do not see a call without gradients
        assert report.steps == 5
        assert "the model ran 2 times without one, as in validation" in " ".join(str(report).split())
    lmswap.disable(model)


def test_before_training_the_report_is_of_the_last_call():
    torch.compiler.reset()
    model = swapping(Net(), "fx")
    with torch.no_grad():
        model(batch())
        model(batch())
    report = lmswap.report(model)
    assert (report.step, report.trains) == (2, False)
    assert "step 2, which had no backward, as none so far" in " ".join(str(report).split())
    lmswap.disable(model)


def test_steps_under_hooks_that_save_only_small_tensors_are_counted_and_the_reason_given():
    model = lmswap.enable(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), compiler="eager")
    for num_steps in range(1, 4):
        model(torch.randn(2, 4)).square().mean().backward()
        report = lmswap.report(model)
        assert (report.steps, report.trains) == (num_steps, True)
    text = " ".join(str(report).split())
    assert "after 3 steps" in text
    assert "Nothing was swapped in step 3: it fits the budget" in text
    assert text.count("saved no tensor of at least 1.00 MiB (min_swap_bytes): nothing of it can be swapped") == 1
    lmswap.disable(model)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        return self.layer(x) if depth == 0 else self(self(x, 0), depth - 1)


@pytest.mark.parametrize("path", PATHS)
def test_a_call_without_gradients_is_one_run_if_the_model_calls_itself(path):
    model = swapping(Recursive(), path)
    with torch.no_grad():
        model(torch.randn(2, 4))
    recorder = session_of(model).recorder
    assert (recorder.num_steps, recorder.pending_sequence) == (0, ((UNPLANNED, "inference"),))
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_the_measured_peak_is_the_last_steps_and_the_highest_is_named(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    peaks = []
    for step in range(1, 6):
        beside, briefly = [torch.ones(n * MIB, dtype=torch.uint8) if step == 3 else None for n in (128, 16)]
        loss = model(batch()).square().mean()
        del briefly  # the fourth begins where the third ended, and that is lower
        session_of(model).memory.trim()
        loss.backward()
        report = lmswap.report(model)
        peaks.append(report.measured_peak_bytes)
        del beside
        session_of(model).memory.trim()
    assert peaks[2] > 120 * MIB > 2 * peaks[4]
    assert (report.highest_peak_step, report.highest_peak_bytes) == (3, peaks[2])
    assert "in step 3" in str(report)
    lmswap.disable(model)


@pytest.mark.cpu_only("a GPU has one peak, which each step resets")
def test_other_peak_trackers_are_not_disturbed():
    torch.compiler.reset()
    model = swapping(Net(), "fx")
    memory = device_memory(torch.device("cpu"))
    beside = torch.ones(128 * MIB, dtype=torch.uint8)
    del beside
    memory.trim()
    for _ in range(3):
        model(batch()).square().mean().backward()
        lmswap.report(model)
    assert min(memory.peak_tensor_bytes(), *memory.lap_peaks()) > 120 * MIB
    memory.close()
    lmswap.disable(model)


def test_the_tier_peak_is_the_last_steps():
    torch.compiler.reset()
    model = swapping(Net(), "fx")
    for size in (16, 16, 4, 4):
        model(batch(size)).square().mean().backward()
    report = lmswap.report(model)
    assert 0 < 4 * report.tier_peak_bytes == report.tier_highest_bytes
    lmswap.disable(model)


MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x
"""


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_lines_are_the_users_for_any_folder_name(compiler, tmp_path):
    path = tmp_path / "torch" / "lmswap" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODEL)
    spec = importlib.util.spec_from_file_location("model_in_folders", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.compiler.reset()
    model = lmswap.enable(module.Model(), "2GiB", policy="swap_all", min_swap_bytes=1, compiler=compiler)
    for _ in range(2):
        model(torch.randn(8, 32)).square().sum().backward()
    sources = {op.source.split()[0] for op in lmswap.program(model).ops if op.source}
    assert "model.py:11" in sources
    assert all(source.startswith("model.py:") for source in sources)
    lmswap.disable(model)


class Experts(nn.Module):
    """Runs those experts that tokens ask for: graphs break at each, and one of them serves several."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.route(x).softmax(-1).topk(2, -1)
        out = x.clone()
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.experts[expert](x[token]) * weights[token, place, None])
        return out


def test_of_abandoned_graphs_only_results_of_the_first_step_are_reported():
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(nn.Sequential(Experts(), Experts()), budget="8GiB", min_swap_bytes=4096)
    for _ in range(3):
        model(torch.randn(48, 64)).square().mean().backward()
    report = lmswap.report(model)
    lmswap.disable(model)
    assert any(note.startswith("path: saved-tensor hooks for the whole model") for note in report.notes)
    assert not any("may exceed the budget" in note for note in report.notes)
    rounded = [note for note in report.notes if "by rounding" in note]
    assert rounded and all(note.startswith("step 1 ran by graphs: ") for note in rounded)
    assert "Nothing was swapped in step 3: it fits the budget of 8.00 GiB as it is." in str(report)


@pytest.mark.cpu_only("what a GPU's tensors hold at each moment is not recorded")
@pytest.mark.usefixtures("resident")
@pytest.mark.parametrize("reserved", [0, 48 * MIB])
def test_the_measured_curve_has_the_measured_peak(reserved, monkeypatch):
    costs = OpProfiler.costs
    monkeypatch.setattr(OpProfiler, "costs", lambda *args: replace(costs(*args), first_run_bytes=reserved))
    other = lmswap.enable(nn.Linear(4, 4), "1GiB")  # whose heap has tensors that the next model does not count
    held = torch.zeros(2**20)
    for _ in range(2):  # the second start reserves them
        report = train(num_steps=3)[1]
    del held
    lmswap.disable(other)
    assert report.measured is not None
    assert max(nbytes for _, nbytes in report.measured.memory) == report.measured_peak_bytes
