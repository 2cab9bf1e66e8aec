import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.unet3d.console import ProgressView, print_study
from benchmarks.unet3d.synthetic import DATA_KIND
from benchmarks.unet3d.verdict import judge
from tests.benchmarks.unet3d.runs import MIB, good_runs, make_configuration, make_study, on_emulated_gpu, swapped_only


def printed(width, runs=None):
    console = Console(file=io.StringIO(), width=width)
    study = make_study(*(runs or good_runs()))
    print_study(console, study, judge(study))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_no_figure_is_cut_off(width):
    text = printed(width)
    assert "…" not in text
    row = next(line.split() for line in text.splitlines() if line.startswith("128³ swapped  "))
    assert row == ["128³", "swapped", "0.98", "0.97", "0.87", "4.50", "0.10", "0.29", "0.29", "0.10", "-0.5000"]


def test_figures_of_large_images_are_whole_in_a_terminal():
    runs = [replace(run, step_seconds=(90.0, 120.0, 140.0), peak_bytes=2**37) for run in (*good_runs(), swapped_only())]
    table, _, _ = printed(80, runs).partition(" ✓")
    assert "130.00" in table and "128.00" in table and "…" not in table
    assert [line[-7:] for line in table.splitlines() if line.startswith("128³")] == ["-0.5000"] * 4


def test_copies_of_every_run_within_the_budget_are_in_the_table():
    text = printed(140, [*good_runs(), swapped_only()])
    row = next(line.split() for line in text.splitlines() if line.startswith("128³ swapped-only  "))
    assert row == ["128³", "swapped-only", "0.98", "0.96", "0.86", "3.00", "0.10", "0.29", "0.29", "0.00", "-0.5000"]


def test_the_output_names_the_data_of_the_losses():
    assert printed(200).count(DATA_KIND) == 2


def test_the_title_names_the_gpu_or_that_it_was_emulated():
    assert "3D U-Net, batch 1, whole images, on Emulated GPU" in printed(200, on_emulated_gpu(good_runs()))


def test_progress_shows_loss_and_memory_of_each_run():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    configuration = make_configuration()
    with ProgressView(console) as view:
        view.on_event(configuration, {"event": "memory", "bytes": 700 * MIB})
        view.on_event(configuration, {"event": "step", "step": 2, "loss": -0.123456, "seconds": 1.0})
        view.on_event(make_configuration(size=96), {"event": "failed", "message": "was killed"})
    text = console.file.getvalue()
    assert all(part in text for part in ("128³ plain", "-0.1235", "700.00 MiB", "2/3", "96³ plain", "failed"))
    assert "…" not in text


def test_a_log_gets_a_line_for_each_step_when_it_happens():
    console = Console(file=io.StringIO(), width=80)
    configuration = make_configuration()
    with ProgressView(console) as view:
        view.on_event(configuration, {"event": "step", "step": 2, "loss": -0.123456, "seconds": 1.0})
        assert console.file.getvalue() == "128³ plain: step 2 of 3, loss -0.1235, 1.00 s\n"
        view.on_event(make_configuration(size=96), {"event": "failed", "message": "was killed"})
    assert console.file.getvalue().splitlines()[1:] == ["96³ plain: failed: was killed"]
