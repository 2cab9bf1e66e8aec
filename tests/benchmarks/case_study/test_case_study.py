"""Measuring: the runs of a stage, and its use of them. The runs themselves are made by hand."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.case_study import __main__ as command
from benchmarks.case_study import findings
from benchmarks.case_study import ladder as ladder_stage
from benchmarks.case_study import links as links_stage
from benchmarks.case_study import replicas as replicas_stage
from benchmarks.case_study import runner as runner_module
from benchmarks.case_study.published import AC922, SYSTEMS, X86
from benchmarks.case_study.ratios import Spread, overhead
from benchmarks.case_study.results import Evaluation, Results
from benchmarks.case_study.runner import WARM_UP_STEPS, Runner, Trial, sharing_cores
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.fresh import RunFailed
from benchmarks.unet3d.measured import Failure
from benchmarks.unet3d.scores import Score, read_scores, write_scores
from lmswap.errors import OptionError
from lmswap.ir.machine import Link, Machine, Rate, Tier
from tests.benchmarks.case_study.studies import SETTINGS, make_ladder, make_results, predictions, swapped, unswapped
from tests.benchmarks.unet3d.runs import MIB, make_configuration, make_run


class Silent:
    def print(self, *_, **__):
        pass


class FakeRunner:
    """Stands for `Runner`: answers each configuration at once, or fails those that ``fails`` picks."""

    def __init__(self, settings=SETTINGS, fails=lambda _: False):
        self.settings, self.console, self.asked, self.fails = settings, Silent(), [], fails
        self.needed_bytes = []

    def configuration(self, size, policy, *, is_planned=False, **changes):
        return replace(make_configuration(size=size, policy=policy), warm_up_steps=1 if is_planned else 2, **changes)

    def attempt(self, configuration, runs, failures):
        self.asked.append(configuration)
        if self.fails(configuration):
            failures.append(Failure(configuration, "was killed"))
            return None
        runs.append(make_run(configuration, peak_bytes=1000 * MIB))
        return runs[-1]

    def compare(self, trials, needed_bytes):
        self.needed_bytes.append(needed_bytes)
        for trial in trials:
            self.attempt(*trial)

    def run_together(self, configurations, environments):
        self.asked.append(configurations)
        if self.fails(configurations[0]):
            raise RunFailed("was killed")
        return tuple(make_run(configuration) for configuration in configurations)


@pytest.fixture
def disk(monkeypatch):
    """A machine whose disk takes 3 GB/s and gives 1 GB/s."""
    link = Link(Rate.constant(3e9), Rate.constant(1e9))
    machine = Machine("here", 2**35, 1e11, 1e10, 0.0, (Tier("disk", 2**40, link),))
    monkeypatch.setattr(links_stage, "describe_machine", lambda _device, _tier: machine)


def test_sizes_alternate_without_a_budget_and_under_the_small_ones_peak():
    runner = FakeRunner(replace(SETTINGS, ladder=(112,)))
    ladder = ladder_stage.climb(runner)
    assert ladder.budget_bytes == 1000 * MIB
    plain, *rest = [(c.size, c.policy, c.budget_bytes) for c in runner.asked]
    assert plain == (96, None, None)
    once = [(size, *how) for size in (96, 112, 128) for how in (("none", None), ("auto", 1000 * MIB))]
    assert rest == once + once[2:]  # the small size fits
    assert len(ladder.of(128, "swapped")) == len(ladder.of(128, "unswapped")) == 2


def test_a_size_that_does_not_fit_unswapped_is_swapped_and_not_retried():
    runner = FakeRunner(fails=lambda c: (c.size, c.policy) == (128, "none"))
    ladder = ladder_stage.climb(runner)
    assert len(ladder.failures) == 1 and len(ladder.of(128, "swapped")) == 1
    assert [c.size for c in runner.asked].count(96) == 3


def test_a_small_size_that_may_not_fit_a_given_budget_is_repeated_too():
    runner = FakeRunner(replace(SETTINGS, budget_bytes=500 * MIB))
    ladder = ladder_stage.climb(runner)
    assert len(ladder.of(96, "swapped")) == len(ladder.of(128, "swapped")) == SETTINGS.repeats


def test_without_a_budget_there_is_nothing_to_climb():
    runner = FakeRunner(fails=lambda c: c.policy is None)
    ladder = ladder_stage.climb(runner)
    assert len(runner.asked) == len(ladder.failures) == 1 and ladder.budget_bytes is None
    assert links_stage.compare_links(runner, ladder) is None


def test_links_are_paced_to_the_ratio_unless_they_are_slower(disk):
    basis = unswapped(5.0).swapping  # saves 800 MiB in a forward pass of 1.4 s
    slow, fast = links_stage.choose_links("cpu", basis)
    wanted = 800 * MIB / (3.3 * 1.4)
    assert slow.link == f"{wanted / 1e9:.4g}GB/s" and slow.ratio == pytest.approx(X86.ratio)
    assert slow.bytes_per_second == pytest.approx(wanted)
    assert fast.link is None and fast.bytes_per_second == pytest.approx(1e9)  # 1.2 GB/s are not available
    assert fast.ratio == pytest.approx(800 * MIB / (1e9 * 1.4)) and fast.ratio > AC922.ratio


def test_ratios_are_set_by_the_shortest_forward_pass():
    first, second = unswapped(5.0), unswapped(6.0)  # the step that was looked at may be none of the fastest
    second = replace(second, swapping=replace(second.swapping, forward_seconds=1.3))
    assert links_stage.basis_of([first, second]) is second.swapping
    assert links_stage.basis_of([]) is None


def test_every_repeat_runs_all_links_and_unlimited_memory(disk):
    runner = FakeRunner()
    links = links_stage.compare_links(runner, make_ladder())
    slow = links.links[0].link
    assert [(c.policy, c.link) for c in runner.asked] == [
        ("none", None), ("auto", slow), ("auto", None), ("tflms", slow), ("tflms", None),
        ("none", None), ("auto", slow), ("auto", None),
    ]  # fmt: skip
    ladder = make_ladder()
    assert [c.warm_up_steps for c in runner.asked] == 6 * [2] + 2 * [1]  # the second time plans are known
    free_bytes = ladder.of(128, "unswapped")[0].peak_bytes
    assert runner.needed_bytes == [free_bytes + count * ladder.budget_bytes for count in (4, 2)]
    assert {c.budget_bytes for c in runner.asked} == {None, make_ladder().budget_bytes}
    assert [len(links.of(system.key).of("auto")) for system in SYSTEMS] == [2, 2]
    drawn = [[bool(run.swapping.spans) for run in links.of(s.key).of("auto")] for s in SYSTEMS]
    assert drawn == [[False, True]] * 2


@pytest.fixture
def gpu(monkeypatch):
    """Makes a machine of a GPU whose link to the host, and whose own memory, copy that fast each way, in GB/s."""

    def make(host, device):
        tiers = [Tier(name, 2**36, Link(Rate.constant(r * 1e9), Rate.constant(r * 1e9)))
                 for name, r in (("host", host), ("device", device))]  # fmt: skip
        machine = Machine("gpu", 2**37, 1e13, 1e12, 0.0, tuple(tiers))
        monkeypatch.setattr(links_stage, "describe_machine", lambda _device, _tier: machine)
        return replace(unswapped(5.0).swapping, saved_bytes=12_000_000_000, forward_seconds=0.1)

    return make


def test_links_faster_than_the_gpus_own_use_spare_device_memory(gpu):
    found = {link.name: (link.link, link.tier) for link in links_stage.choose_links("cuda", gpu(50, 1000))}
    assert found["x86"] == ("36.36GB/s", "auto") and found["ac922"] == ("240GB/s", "device")
    assert found["pcie3"] == ("pcie3", "auto") and found["c2c"] == ("c2c", "device")


def test_links_too_fast_for_device_memory_are_left_out(gpu):
    found = {link.name: (link.link, link.tier) for link in links_stage.choose_links("cuda", gpu(11.5, 50))}
    assert found["x86"] == ("36.36GB/s", "device") and found["ac922"] == (None, "auto")
    assert found["pcie3"] == ("pcie3", "device")  # 10.9 GB/s in, but 11.7 out
    assert found.keys() == {"x86", "ac922", "pcie3", "pcie4"}


def test_skipped_links_are_reported():
    results = make_results()
    assert "Left out" not in findings.link_table(results).note
    on_gpu = replace(results, settings=replace(results.settings, device="cuda"))
    reported = findings.link_table(on_gpu).note
    assert "Left out, as this device copies nothing as fast, its own memory included: pcie3, pcie4," in reported


def links_of(runner):
    """Links as the stage before left them; the requests to it are dropped."""
    links = links_stage.compare_links(runner, make_ladder())
    runner.asked.clear()
    return links


def test_concurrent_trainings_share_links_unlike_single_ones(monkeypatch, disk, tmp_path):
    monkeypatch.setattr(replicas_stage.torch.cuda, "device_count", lambda: 0)
    stale = tmp_path / "x86.link"
    stale.write_bytes(b"of another rate")
    runner = FakeRunner()
    links = links_of(runner)
    found = replicas_stage.run_replicas(runner, make_ladder(), links, tmp_path)
    assert [(t.row, t.system, len(t.runs)) for t in found.together] == [
        ("small", None, 1), ("small_each", None, 2), ("large", "x86", 1), ("large_each", "x86", 2),
        ("large_contended", "x86", 2), ("large", "ac922", 1), ("large_contended", "ac922", 2),
    ]  # fmt: skip
    assert found.of("small", "x86").runs[0].step_ends == make_ladder().of(96, "unswapped")[-1].step_ends
    alone = found.of("large", "x86")
    assert alone.runs[0].configuration == links.of("x86").of("auto")[-1].configuration
    assert alone.seconds == (alone.runs[0].seconds_per_step,) and not alone.runs[0].swapping.spans
    assert [[c.seed for c in together] for together in runner.asked] == 4 * [[0, 1]]
    own, shared = runner.asked[1][0], runner.asked[2][0]
    assert own.link == shared.link and own.link_file is None and shared.link_file == str(stale)
    # Only what shares a paced link has a plan of its own.
    assert [together[0].warm_up_steps for together in runner.asked[1:]] == [1, 2, 1]
    assert not stale.exists()
    assert replicas_stage._contended(own, links.links[0], AC922, tmp_path).link == "0.121GB/s"  # two thirds


def test_a_concurrent_training_that_fails_fails_its_row_only(disk, tmp_path):
    runner = FakeRunner(fails=lambda c: c.link_file is not None)
    found = replicas_stage.run_replicas(runner, make_ladder(), links_of(runner), tmp_path)
    assert found.of("large_contended", "x86") is None and found.of("large_contended", "ac922") is not None
    (failure,) = found.failures
    assert failure.message == "2 at once: was killed"


def test_a_training_that_failed_alone_is_not_run_concurrently(disk, tmp_path):
    runner = FakeRunner()
    links = links_of(runner)
    slow, fast = links.links
    found = replicas_stage.run_replicas(
        runner, make_ladder(), replace(links, links=(replace(slow, runs=()), fast)), tmp_path
    )
    assert {(t.row, t.system) for t in found.together if t.system} == {
        ("large", "ac922"), ("large_contended", "ac922")
    }  # fmt: skip


def test_steps_count_while_all_trainings_run():
    configuration = replace(make_configuration(), warm_up_steps=1)
    slow = replace(make_run(configuration), step_seconds=(9, 1, 2, 9), step_ends=(9, 10, 12, 21))
    quick = replace(make_run(configuration), step_seconds=(9, 1, 1, 1), step_ends=(9, 11, 12, 13))
    assert replicas_stage.seconds_while_all_train([slow, quick]) == (1.5, 1)
    late = replace(slow, step_seconds=(9, 5, 5, 5), step_ends=(9, 14, 19, 24))
    assert replicas_stage.seconds_while_all_train([late, quick])[0] == 5  # none ended in time: all of its own


def make_runner(monkeypatch, **fakes):
    """A runner that begins no processes: ``fakes`` stand for the functions that do."""
    for name, fake in fakes.items():
        monkeypatch.setattr(runner_module, name, fake)
    runner = Runner.__new__(Runner)
    runner.settings = SETTINGS
    runner.console, runner._folder = runner_module.Console(quiet=True), Path("logs")
    return runner


class FakeFreshRun:
    """Stands for `FreshRun`: records its orders, and dies in the turn ``dies``, 0 being its warm-up."""

    def __init__(self, configuration, logs, note, dies):
        self.seed, self.logs, self.note, self.dies, self.turn = configuration.seed, logs.name, note, dies, 0

    @property
    def has_died(self):
        return self.dies is not None and self.turn > self.dies

    @property
    def has_ended(self):
        return self.has_died or self.turn == 2

    def warm_up(self):
        self.take_turn()

    def take_turn(self):
        if not self.has_ended:
            self.note("warm-up" if self.turn == 0 else f"turn {self.turn}", self.seed, self.logs)
            self.turn += 1

    def finish(self):
        while not self.has_ended:
            self.take_turn()
        if self.has_died:
            raise RunFailed("no luck")
        return self.seed


def fake_warmed_up(happened, dies=None):
    """Stands for `warmed_up`; the run of seed 1 dies in the turn ``dies``."""

    @contextmanager
    def warmed_up(configuration, logs, _on_event, environment=None):
        def note(*what):
            happened.append((*what, environment))

        run = FakeFreshRun(configuration, logs, note, dies if configuration.seed == 1 else None)
        run.warm_up()
        yield run
        happened.append(("closed", run.seed, run.logs, environment))

    return warmed_up


@pytest.mark.parametrize("trial_fails", [False, True])
def test_results_of_a_trial_go_to_the_given_output(monkeypatch, trial_fails):
    def run_compared(configurations, logs, on_event, needed_bytes):
        assert needed_bytes == 7
        return [Failure(each, "no luck") if trial_fails else make_run(each) for each in configurations]

    runner, runs, failures = make_runner(monkeypatch, run_compared=run_compared), [], []
    configurations = [replace(make_configuration(), seed=seed) for seed in range(2)]
    runner.compare([Trial(each, runs, failures) for each in configurations], 7)
    assert [run.configuration for run in runs] == ([] if trial_fails else configurations)
    assert [failure.configuration for failure in failures] == (configurations if trial_fails else [])


def test_trainings_warm_up_one_after_another_and_start_together(monkeypatch):
    happened = []
    runner = make_runner(monkeypatch, warmed_up=fake_warmed_up(happened))
    configurations = [replace(make_configuration(), seed=seed) for seed in range(3)]
    assert runner.run_together(configurations, [{"N": str(n)} for n in range(3)]) == (0, 1, 2)
    assert happened[:3] == [("warm-up", n, f"replica-{n}", {"N": str(n)}) for n in range(3)]
    assert sorted(what[:2] for what in happened[3:6]) == [("turn 1", n) for n in range(3)]


@pytest.mark.parametrize(("dies", "warmed"), [(0, 2), (1, 3)])
def test_when_one_training_fails_the_others_do_not_stand_for_all(monkeypatch, dies, warmed):
    happened = []
    runner = make_runner(monkeypatch, warmed_up=fake_warmed_up(happened, dies))
    with pytest.raises(RunFailed, match="no luck"):
        runner.run_together([replace(make_configuration(), seed=seed) for seed in range(3)], [{}] * 3)
    assert [what for what, *_ in happened].count("warm-up") == warmed


def test_overhead_is_the_median_of_pairs_that_ran_concurrently():
    spread = overhead([swapped(5.5), swapped(6.9), swapped(4.0)], [unswapped(5.0), unswapped(6.0), unswapped(4.0)])
    assert spread == Spread(pytest.approx(1.1), pytest.approx(1.0), pytest.approx(1.15), 3)
    assert overhead([], [unswapped(5.0)]) is None


def test_of_steps_that_took_turns_the_overhead_is_that_of_neighbours():
    configuration = replace(make_configuration(), warm_up_steps=1, takes_turns=True)
    free = replace(make_run(configuration), step_seconds=(9.0, 4.0, 8.0, 5.0))
    budgeted = replace(free, step_seconds=(9.0, 4.4, 8.0, 6.0))
    assert overhead([budgeted], [free]).median == pytest.approx(1.1)  # of the medians: 1.2


def test_results_survive_json_also_with_a_nan_dice(tmp_path):
    score = Score("a", 64, 96, "Synthetic_00001", 0.5, 0.25, math.nan)
    results = make_results(evaluation=Evaluation("there", "made", (score,)))
    path = tmp_path / "results.json"
    results.write(path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["schema"] == "lmswap.case_study/2"
    again = Results.read(path)
    assert replace(again, evaluation=None) == replace(results, evaluation=None)
    assert math.isnan(again.evaluation.scores[0].enhancing_tumour)
    assert replace(again.evaluation.scores[0], enhancing_tumour=0.0) == replace(score, enhancing_tumour=0.0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data | {"schema": "other/1"}, "its schema is not"),
        (lambda data: data | {"more": 1}, "damaged.*more"),
        (lambda data: data | {"origin": {}}, "damaged.*origin"),
        (lambda data: [], "its schema is not"),
    ],
)
def test_a_results_file_that_is_none_is_refused(tmp_path, damage, said):
    path = tmp_path / "results.json"
    make_results(ladder=None, links=None, replicas=None, predictions=None).write(path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=said):
        Results.read(path)


def test_a_missing_or_cut_results_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.json"):
        Results.read(tmp_path / "nothing.json")
    (tmp_path / "cut.json").write_text('{"schema": "lmsw')
    with pytest.raises(DataError, match=r"cut\.json"):
        Results.read(tmp_path / "cut.json")


def test_the_simulator_given_ibms_method_gives_ibms_measurements():
    """Overheads of 2.87 and 1.26, 20 to 24 GB each way: far off, the model's other answers would be worth little."""
    for system, machine in (("x86", "v100_gen3"), ("ac922", "v100_nvlink2")):
        found = predictions().find(machine, "TFLMS of 2018")
        published = next(s for s in SYSTEMS if s.key == system)
        assert found.step_seconds / found.free_seconds == pytest.approx(published.overhead, rel=0.1)
        assert 18e9 < found.out_bytes < 25e9 and 18e9 < found.in_bytes < 25e9
        ours = predictions().find(machine, "lmswap")
        assert ours.bound_seconds <= ours.step_seconds <= 1.01 * ours.free_seconds
        assert ours.spans and not found.spans


def test_published_overheads_are_those_of_the_epochs():
    assert X86.overhead == pytest.approx(2.87, abs=0.01) and AC922.overhead == pytest.approx(1.26, abs=0.01)


@pytest.fixture
def stages(monkeypatch, tmp_path):
    """Replaces every stage by one that counts its calls."""
    called = []

    def stage(name, result):
        def run(*_):
            called.append(name)
            if result is None:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(command, name, run)

    class NoRunner(FakeRunner):
        subjects, data = (), "made"

    whole = make_results()
    monkeypatch.setattr(command, "Runner", lambda settings, *_: NoRunner(settings))
    monkeypatch.setattr(command, "write_pages", lambda *_: [])
    for name, field in (
        ("measure_boxes", "boxes"), ("predict", "predictions"), ("climb", "ladder"), ("compare_links", "links"),
        ("run_replicas", "replicas"),
    ):  # fmt: skip
        stage(name, getattr(whole, field))
    return called, stage, ["--sizes", "96", "128", "--output", str(tmp_path / "out")]


def test_an_aborted_case_study_goes_on_where_it_stopped(stages):
    called, stage, arguments = stages
    stage("compare_links", None)
    assert command.main(arguments) == 130
    assert called == ["measure_boxes", "predict", "climb", "compare_links"]
    called.clear()
    stage("compare_links", make_results().links)
    assert command.main(arguments) == 0
    assert called == ["compare_links", "run_replicas"]


def test_results_of_other_settings_are_not_overwritten(stages, capsys):
    called, _, arguments = stages
    assert command.main(arguments) == 0
    called.clear()
    assert command.main([*arguments, "--seed", "7"]) == 2
    assert not called
    said = capsys.readouterr().err
    assert "holds another case study" in said and "give another --output" in said


@pytest.mark.parametrize("sizes", [("128", "96"), ("96", "96")])
def test_sizes_that_are_no_pair_are_refused(stages, sizes):
    with pytest.raises(OptionError, match="the size that just fits, then a larger one"):
        command._settings(command._parser().parse_args(["--sizes", *sizes]))
    assert command.main(["--sizes", *sizes, "--output", stages[2][-1]]) == 2


def test_scores_are_those_that_evaluate_wrote(tmp_path):
    scores = (
        Score("a", 64, 96, "Synthetic_00001", 0.5, 0.25, 1.0),
        Score("b", 96, 96, "Synthetic_00001", 0.75, 0.0, 0.5),
    )
    write_scores(tmp_path / "scores.csv", scores)
    assert read_scores(tmp_path / "scores.csv") == scores
    assert command._evaluation(tmp_path).data == "synthetic tumours, not BraTS"
    write_scores(tmp_path / "scores.csv", [replace(scores[0], subject="Brats17_1", tumour_core=math.nan)])
    assert command._evaluation(tmp_path).data == "BraTS layout, as given"
    assert math.isnan(read_scores(tmp_path / "scores.csv")[0].tumour_core)
    (tmp_path / "scores.csv").write_text("model,size\na,b\n")
    with pytest.raises(DataError, match=r"scores\.csv cannot be read as scores"):
        read_scores(tmp_path / "scores.csv")
    with pytest.raises(DataError, match="No such file"):
        command._evaluation(tmp_path / "nothing")


def test_a_run_warms_up_until_the_last_planning():
    from lmswap.session.planned_step import Phase

    assert len(Phase) == WARM_UP_STEPS  # of which the runs of a step leave one after the other, but for the first


def test_each_training_has_a_gpu_of_those_that_are_visible(monkeypatch, disk, tmp_path):
    monkeypatch.setattr(replicas_stage.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = []

    class Remembering(FakeRunner):
        def run_together(self, configurations, environments):
            seen.append([environment["CUDA_VISIBLE_DEVICES"] for environment in environments])
            return super().run_together(configurations, environments)

    runner = Remembering(replace(SETTINGS, replicas=3))
    found = replicas_stage.run_replicas(runner, make_ladder(), links_of(runner), tmp_path)
    assert found.devices == 2
    assert seen == 4 * [["3", "5", "3"]]


@pytest.mark.parametrize(("num_trainings", "threads"), [(1, 6), (2, 3), (9, 1)])
def test_cpu_trainings_share_the_cores_and_leave_one_to_the_copies(num_trainings, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        with sharing_cores("cpu", num_trainings):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 7
        with sharing_cores("cuda", num_trainings):
            assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
