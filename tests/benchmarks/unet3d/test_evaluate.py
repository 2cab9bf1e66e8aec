import csv
import math

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.unet3d import __main__ as cli
from benchmarks.unet3d import evaluate, predict, train
from benchmarks.unet3d.brats import DataError, read_subject
from benchmarks.unet3d.dataset import prepare_data
from benchmarks.unet3d.plot_scores import plot_scores
from benchmarks.unet3d.plot_slices import choose_subjects, plot_slices
from benchmarks.unet3d.predict import cube_affine, decide, put_back
from benchmarks.unet3d.preprocess import Place, load_labels, resample_labels
from benchmarks.unet3d.scores import Score, score_regions
from benchmarks.unet3d.split import draw_split
from tests.benchmarks.unet3d.killed import SMALL
from tests.benchmarks.unet3d.scans import make_subject, make_subjects

SIZES = (32, 48)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    for module in (train, predict):
        monkeypatch.setattr(module, "UNet3d", SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("scans")
    make_subjects(root / "scans", 10)
    return {size: prepare_data(root / "scans", size, root / "cubes", lambda done, total: None) for size in SIZES}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folders of two trainings, one of each size, with the weights that they began with."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "UNet3d", SMALL)
        patch.setattr(train.Training, "step", lambda self, *_: self.losses.append(0.0))
        for size in SIZES:
            settings = train.Settings(size, 1, 0, "conv", "fp32", "cpu", None, root / str(size))
            train.train(settings, data[size], draw_split(data[size].subjects, 0), lambda event: None)
    return [root / str(size) for size in SIZES]


@pytest.fixture
def perfect(monkeypatch):
    """Networks that predict the truth."""
    monkeypatch.setattr(evaluate, "_predict_file", lambda model, cube: load_labels(cube))


def evaluated(trained, data, output, swapping=None):
    return evaluate.evaluate(evaluate.load_all(trained, "cpu"), data, output, swapping, lambda *_: None)


def test_the_likeliest_label_wins_where_it_reaches_a_half():
    probability = torch.tensor([[0.6, 0.2, 0.49, 0.5, 0.1], [0.7, 0.1, 0.3, 0.2, 0.1], [0.1, 0.9, 0.2, 0.1, 0.1]])
    assert decide(probability).tolist() == [2, 4, 0, 1, 0]
    assert decide(probability).dtype == np.uint8


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=3, max_size=3), st.sampled_from([16, 32, 48])
)
def test_a_cube_is_aligned_with_its_scan(sides, size):
    box = tuple(slice(start, start + side) for start, side in sides)
    place = Place(box, tuple(side.stop + 3 for side in box))
    scan = np.array([[-1.0, 0, 0, 7], [0, -2, 0, 239], [0, 0.5, 3, 0], [0, 0, 0, 1]])
    cube = cube_affine(scan, place, size)
    starts, ends = np.array([side.start for side in box]), np.array([side.stop for side in box])
    for corner, of_cube, of_scan in ((0, np.full(3, -0.5), starts - 0.5), (1, np.full(3, size - 0.5), ends - 0.5)):
        np.testing.assert_allclose(cube @ [*of_cube, 1], scan @ [*of_scan, 1], atol=1e-9, err_msg=str(corner))


def test_labels_go_back_to_where_they_were_cut_from():
    place = Place((slice(1, 5), slice(0, 2), slice(3, 9)), (6, 4, 9))
    inside = np.random.default_rng(0).choice(np.array([0, 1, 2, 4], np.uint8), (4, 2, 6))
    volume = put_back(resample_labels(inside, (16, 16, 16)), place)
    assert volume.shape == (6, 4, 9)
    np.testing.assert_array_equal(volume[1:5, 0:2, 3:9], inside)
    assert (volume > 0).sum() == (inside > 0).sum()


def test_perfect_predictions_score_1_up_to_resizing(trained, data, tmp_path, perfect):
    result = evaluated(trained, data, tmp_path)
    assert (result.sizes, result.scored_size) == (SIZES, 48)
    assert len(result.scores) == 2 * 2
    for score in result.scores:
        regions = [score.whole_tumour, score.tumour_core, score.enhancing_tumour]
        if score.size == 48:
            assert regions == [1.0, 1.0, 1.0]
        else:
            small, large = (load_labels(data[size].cubes[score.subject]) for size in SIZES)
            grid = ((np.arange(48) + 0.5) * 32 / 48).astype(int)
            assert regions == list(score_regions(large, small[np.ix_(grid, grid, grid)]).values())
            assert 0 < score.whole_tumour < 1
    with (tmp_path / "scores.csv").open() as file:
        assert [float(row["whole_tumour"]) for row in csv.DictReader(file)] == [s.whole_tumour for s in result.scores]


def test_predictions_are_saved_aligned_with_scans_and_as_cubes(trained, data, tmp_path, perfect):
    result = evaluated(trained, data, tmp_path)
    for size in SIZES:
        for name in sorted({score.subject for score in result.scores}):
            subject, cube = data[size].subjects[name], data[size].cubes[name]
            scan, written = nibabel.load(subject.truth), nibabel.load(result.prediction(str(size), name))
            np.testing.assert_array_equal(written.affine, scan.affine)
            np.testing.assert_array_equal(written.dataobj, read_subject(subject).labels)  # the scans are smaller: exact
            as_cube = nibabel.load(evaluate.prediction_file(tmp_path, str(size), name, size))
            assert as_cube.shape == (size,) * 3 and as_cube.get_data_dtype() == np.uint8
            np.testing.assert_array_equal(as_cube.dataobj, load_labels(cube))


def test_swapped_predictions_are_those_of_plain_torch(trained, data, tmp_path):
    results = [
        evaluated(trained[:1], data, tmp_path / name, swapping)
        for name, swapping in (("plain", None), ("swapped", {"budget": "1GiB", "policy": "swap_all"}))
    ]
    plain, swapped = ([nibabel.load(r.prediction("32", s.subject)).get_fdata() for s in r.scores] for r in results)
    assert all(map(np.array_equal, plain, swapped))
    assert any(labels.any() for labels in plain)


def test_a_trained_network_predicts_as_it_validated(trained, data):
    (model,) = evaluate.load_all(trained[:1], "cpu")
    assert not model.network.training
    state = predict.load_state(trained[0] / "best.pt")
    assert state["validation subjects"] == list(draw_split(data[32].subjects, 0).validation)
    assert all(torch.equal(tensor, state["model"][name]) for name, tensor in model.network.state_dict().items())


def test_models_of_different_splits_are_not_compared(trained, data, tmp_path):
    split = draw_split(data[32].subjects, 1)
    settings = train.Settings(32, 1, 0, "conv", "fp32", "cpu", None, tmp_path / "other")
    train.train(settings, data[32], split, lambda event: None)
    with pytest.raises(DataError, match=r"other and 32 were trained with different splits"):
        evaluate.load_all([trained[0], tmp_path / "other"], "cpu")


def test_refuses_a_folder_without_weights_and_a_name_given_twice(trained, tmp_path):
    with pytest.raises(DataError, match=r"has no best\.pt"):
        evaluate.load_all([tmp_path], "cpu")
    with pytest.raises(DataError, match=r"two models have one name \(32, 32\)"):
        evaluate.load_all([trained[0], trained[0]], "cpu")


@pytest.fixture
def drawn(monkeypatch):
    """The words of the figures that were saved."""
    words, save = [], Figure.savefig

    def keep(self, *arguments, **options):
        words.append(" ".join(text.get_text() for text in self.findobj(Text)))
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return words


def test_pictures_name_scored_size_region_and_data(trained, data, tmp_path, perfect, drawn):
    result = evaluated(trained, data, tmp_path)
    plot_scores(result, tmp_path / "scores.png")
    plot_slices(result, tmp_path / "slices.png")
    boxes, slices = drawn
    assert "Dice on 2 validation subjects, scored at 48³" in boxes and "32³, 1 model" in boxes
    assert "Data: BraTS layout, as given" in boxes and "Predictions of 32³ are resized to 48³" in boxes
    assert "prediction, 32³" in slices and "WT 1.00 · TC 1.00 · ET 1.00" in slices
    for name in ("scores.png", "slices.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_the_worst_the_middle_and_the_best(tmp_path):
    values = {"a": 0.9, "b": 0.1, "c": 0.5, "d": 0.4, "e": 0.7}
    scores = [Score("m", 48, 48, name, value, value, math.nan) for name, value in values.items()]
    scores += [Score("n", 32, 48, name, 1 - value, 0, 0) for name, value in values.items()]
    assert choose_subjects(evaluate.Evaluation("", (32, 48), tuple(scores), {}, tmp_path)) == ["b", "c", "a"]
    assert choose_subjects(evaluate.Evaluation("", (48,), tuple(scores[:2]), {}, tmp_path)) == ["b", "a"]


@pytest.mark.slow
def test_made_subjects_are_trained_on_resumed_and_scored_at_two_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "--folder work"
    made = f"--subjects 2 {folder}"
    assert cli.main(f"train --size 32 {made} --output out/small --epochs 1".split()) == 0
    assert cli.main(f"train --size 32 {made} --output out/small --epochs 2".split()) == 0
    split = "--split out/small/split.json"
    assert cli.main(f"train --size 48 {made} --output out/large --epochs 1 {split}".split()) == 0
    assert cli.main(f"evaluate out/small out/large --output scores {folder}".split()) == 0
    said = capsys.readouterr().out
    assert "Complete after 2 epochs" in said and "synthetic tumours, not BraTS" in said
    assert [line.split(",")[0] for line in (tmp_path / "out/small/log.csv").read_text().split()] == ["epoch", "1", "2"]
    assert len((tmp_path / "scores" / "scores.csv").read_text().splitlines()) == 3
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {
        "scores.csv", "scores.png", "slices.png", "predictions"
    }  # fmt: skip


def test_damaged_subjects_end_a_training_unless_skipped(tmp_path, capsys):
    make_subjects(tmp_path / "scans", 4)
    (tmp_path / "scans" / "case_2" / "case_2_t2.nii.gz").write_bytes(b"")
    (tmp_path / "scans" / "case_0" / "case_0_t1.nii.gz").unlink()
    line = f"train --size 32 --data {tmp_path}/scans --output {tmp_path}/out --folder {tmp_path}/work --epochs 1"
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert "2 faults in 2 of 4 subjects" in said and "case_2_t2.nii.gz" in said and "no file for t1" in said
    assert not (tmp_path / "out").exists()
    assert cli.main([*line.split(), "--skip-damaged"]) == 0
    assert "left out: 2 faults in 2 subjects" in capsys.readouterr().out


def test_an_interrupted_training_states_how_to_continue(tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    make_subject(tmp_path / "scans", "case_1", 1)
    make_subject(tmp_path / "scans", "case_2", 2)
    monkeypatch.setattr(train.Training, "step", interrupt)
    line = f"train --size 32 --data {tmp_path}/scans --output {tmp_path}/out --folder {tmp_path}/work"
    assert cli.main(line.split()) == 130
    assert "The same command goes on" in capsys.readouterr().out


def test_a_training_whose_losses_are_no_numbers_names_no_weights(tmp_path, capsys, monkeypatch):
    make_subject(tmp_path / "scans", "case_1", 1)
    make_subject(tmp_path / "scans", "case_2", 2)
    monkeypatch.setattr(train, "_loss", lambda *_: math.nan)
    line = f"train --size 32 --data {tmp_path}/scans --output {tmp_path}/out --folder {tmp_path}/work --epochs 2"
    assert cli.main(line.split()) == 1
    said = capsys.readouterr().out
    assert "The validation loss is no number in any of 2 epochs" in said and train.BEST not in said
    assert not (tmp_path / "out" / train.BEST).exists()


@pytest.mark.parametrize("option", ["--output", "--folder", "--split"])
def test_an_unwritable_output_ends_the_training_with_its_path(tmp_path, capsys, option):
    make_subject(tmp_path / "scans", "case_1", 1)
    make_subject(tmp_path / "scans", "case_2", 2)
    (tmp_path / "file").write_text("in the way")
    given = {"--output": tmp_path / "out", "--folder": tmp_path / "work", option: tmp_path / "file" / "below"}
    line = ["train", "--size", "32", "--data", str(tmp_path / "scans"), "--epochs", "1"]
    assert cli.main([*line, *(str(word) for pair in given.items() for word in pair)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"unet3d: {tmp_path / 'file' / 'below'}")
    assert "Not a directory" in said or f"File exists: {tmp_path / 'file'}" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --size 32 --output x", "one of the arguments --data --subjects is required"),
        ("train --size 40 --subjects 2 --output x", "40 is not a multiple of 16"),
        ("train --size 32 --subjects 2 --data y --output x", "not allowed with argument"),
        ("evaluate --output x", "the following arguments are required: MODEL"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(capsys, line, said):
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--policy swap", "--policy has no effect without --budget"),
        ("--link 1GB/s", "--link has no effect without --budget"),
        ("--budget much", "budget 'much' is not a byte count"),
        ("--budget 1GiB --policy magic", "unknown policy 'magic'"),
    ],
)
def test_unsupported_arguments_are_refused_before_the_start(tmp_path, capsys, line, said):
    for command in ("train --size 32 --subjects 2", "evaluate nowhere"):
        assert cli.main([*command.split(), "--output", str(tmp_path / "out"), *line.split()]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
