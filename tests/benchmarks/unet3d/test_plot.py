from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.unet3d.plot import plot_step
from benchmarks.unet3d.synthetic import DATA_KIND
from tests.benchmarks.unet3d.runs import MIB, good_runs, make_study, on_emulated_gpu, swapped_only


@pytest.fixture
def figure(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig

    def keep(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(*runs, size=128):
        path = tmp_path / "memory.png"
        plot_step(make_study(*runs), size, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def words(figure):
    return " ".join(text.get_text() for text in figure.findobj(Text))


def test_shows_plain_and_swapped_memory_and_the_copies(figure):
    drawn = figure(*good_runs())
    plain, swapped, lanes = drawn.axes
    assert plain.get_ylim() == swapped.get_ylim()
    assert [round(line.get_ydata()[0], 3) for line in swapped.lines if line.get_linestyle() == "--"] == [0.977]
    assert len(lanes.collections) == 3  # out, in, stalled
    text = words(drawn)
    assert "128³, 2.37 × the voxels, in the memory of 96³" in text
    assert "swap out  300.00 MiB" in text and "swap in  300.00 MiB" in text and "stalled  0.1 s" in text


def test_the_plot_states_how_much_was_recomputed_which_has_no_lane(figure):
    drawn = figure(*good_runs())
    titles = [axes.get_title(loc="left") for axes in drawn.axes]
    assert titles == ["128³ plain: peak 1.95 GiB", "128³ swapped: peak 990.00 MiB; 100.00 MiB recomputed", ""]


def test_the_picture_claims_the_smaller_memory_only_if_kept(figure):
    runs = good_runs()
    over = replace(runs[2], peak_bytes=1001 * MIB)
    for shown in ([*runs[:2], over], runs[:2]):
        text = words(figure(*shown))
        assert "2.37 × the voxels of 96³" in text and "in the memory of" not in text


def test_each_run_within_the_budget_is_drawn_with_the_copies_of_the_last(figure):
    drawn = figure(*good_runs(), swapped_only())
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in drawn.axes]
    assert titles == ["128³ plain", "128³ swapped", "128³ swapped-only", ""]
    assert "in the memory of 96³" in words(drawn)
    over = replace(swapped_only(), peak_bytes=1001 * MIB)
    assert "in the memory of" not in words(figure(*good_runs(), over))


def test_the_picture_names_the_data(figure):
    assert DATA_KIND in words(figure(*good_runs()))


def test_the_title_names_the_gpu_or_that_it_was_emulated(figure):
    assert "One training step at 128³ on Emulated GPU, 2.37 ×" in words(figure(*on_emulated_gpu(good_runs())))


def test_a_run_that_failed_is_left_out(figure):
    runs = good_runs()
    assert len(figure(*runs[:2]).axes) == 1
    assert len(figure(runs[0], *runs[2:]).axes) == 2


def test_an_empty_study_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="no run of 112³ finished"):
        plot_step(make_study(*good_runs()), 112, tmp_path / "memory.png")
    assert not list(tmp_path.iterdir())
