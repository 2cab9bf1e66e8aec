"""Weights that do not fit are non-resident between steps, and results are those of plain torch."""

import copy
import multiprocessing
import time

import numpy as np
import pytest
import torch
from torch import nn

import lmswap
from lmswap.api import _session
from lmswap.errors import NotManaged, OptionError
from tests.training_state.adapted import network, same, tokens, train

# The least budget is that of the first plan: where the process gives back some MiB afterwards, weights fit in them.
pytestmark = pytest.mark.usefixtures("resident")
LEAST = {"budget": "1%", "weights": "swap", "min_swap_bytes": "512KiB"}


def enabled(model, **options):
    return lmswap.enable(model, **(LEAST | options))


def host_copies(model):
    """How many storages of the model are in their host copies."""
    return len(_session(model).engine.host_copies)


def test_a_frozen_base_that_does_not_fit_trains_with_the_same_bits():
    expected = train(network(), 6)
    model = enabled(network())
    found = train(model, 6)
    report = lmswap.report(model)
    assert same(found, expected)
    assert report.swapped_in_bytes > 4 * 2**20
    assert report.swapped_out_bytes == 0  # host copies of what is only read stay valid
    assert report.measured_peak_bytes <= report.budget_bytes
    assert "weights" in str(report)


def test_weights_that_fit_stay_resident():
    model = enabled(network(), budget="2GiB")
    assert same(train(model, 3), train(network(), 3))
    assert host_copies(model) == 0
    assert lmswap.report(model).swapped_in_bytes == 0


def test_verification_passes_with_swapped_weights():
    model = enabled(network(), verify=True)
    assert same(train(model, 3), train(network(), 3))
    assert lmswap.report(model).verified is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_fetch_weights(context):
    plain = network().eval()
    model = enabled(network().eval())
    for step in range(4):
        with context():
            assert torch.equal(model(tokens(step)), plain(tokens(step)))
    report = lmswap.report(model)
    assert report.swapped_in_bytes > 4 * 2**20
    assert report.measured_peak_bytes <= report.budget_bytes


def test_a_model_that_could_be_trained_is_swapped_in_inference():
    plain, model = network(trained="").eval(), enabled(network(trained="").eval())
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(model(tokens(step)), plain(tokens(step)))
    assert lmswap.report(model).swapped_in_bytes > 4 * 2**20


def validate(model, step):
    model.eval()
    with torch.no_grad():
        outputs = model(tokens(100 + step))
    model.train()
    return outputs


def test_validation_between_training_steps():
    model = enabled(network(), budget="30%")  # beside the step the outputs are kept
    assert same(train(model, 6, validate), train(network(), 6, validate))


def test_training_after_inference_keeps_what_is_trained_resident():
    def run(model):
        with torch.no_grad():
            outputs = [model(tokens(9))]
        return [*outputs, *train(model, 4)]

    model = enabled(network(trained="down"))
    assert same(run(model), run(network(trained="down")))
    find = _session(model).engine.host_copies.find
    for name, parameter in model.named_parameters():
        assert not (parameter.requires_grad and find(parameter.untyped_storage())), name


def unfreeze(model, step):
    if step == 2:
        model.layers[5].requires_grad_(True)


def test_gradual_unfreezing():
    def run(model):
        train(model, 3, unfreeze)
        return train(model, 3)

    assert same(run(enabled(network())), run(network()))


def test_disabling_makes_weights_resident():
    model, plain = enabled(network()), network()
    train(model, 2)
    expected = train(plain, 2)
    assert host_copies(model) > 0
    held = model.layers[0].up.weight
    lmswap.disable(model)
    assert held is model.layers[0].up.weight
    assert same([*model.parameters()], expected[2:])
    assert same(train(model, 2), train(plain, 2))


def test_a_weight_whose_address_is_known_elsewhere_stays():
    model = network()
    array = model.layers[0].up.weight.detach().numpy()
    enabled(model)
    train(model, 3)
    report = str(lmswap.report(model))
    assert "'layers.0.up.weight'" in report.replace("\n", " ")
    array[0, 0] = 3
    assert model.layers[0].up.weight[0, 0].item() == 3


def test_tensors_outlive_the_model():
    model = enabled(network())
    train(model, 2)
    weight = model.layers[0].up.weight
    expected = network().layers[0].up.weight.detach()
    alias = weight.detach()
    del model
    assert torch.equal(weight, expected)
    assert torch.equal(alias, expected)


def test_a_copy_of_the_model_is_resident_and_apart():
    model = enabled(network())
    train(model, 2)
    copied = copy.deepcopy(model.layers[1])
    with torch.no_grad():
        copied.up.weight.zero_()
    assert torch.equal(model.layers[1].up.weight, network().layers[1].up.weight)


def test_a_state_dict_is_as_plain(tmp_path):
    model, plain = enabled(network()), network()
    train(model, 2)
    train(plain, 2)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert list(loaded) == list(plain.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in plain.state_dict().items())
    assert (tmp_path / "state.pt").stat().st_size < 1.1 * sum(p.nbytes for p in plain.parameters())


@pytest.mark.parametrize("given", [{"compiler": "eager"}, {"tier": "compressed"}])
def test_what_cannot_swap_weights_is_refused(given):
    with pytest.raises(OptionError, match="weights='swap' needs"):
        enabled(network(), **given)


def test_a_parameter_without_plain_bytes_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.Linear(4, 4)
            self.sparse = nn.Parameter(torch.eye(512).to_sparse(), requires_grad=False)

        def forward(self, x):
            return self.plain(x).sum()

    model = enabled(Odd(), min_swap_bytes=1)
    assert any("'sparse'" in note and "without plain bytes" in note for note in _session(model).all_notes)


def test_an_unknown_choice_is_refused():
    with pytest.raises(OptionError, match="unknown weights 'always'"):
        enabled(network(), weights="always")


class Tagger(nn.Module):
    """A frozen LSTM, whose flat weights are one storage, under a trained head."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(512, 512, num_layers=3, batch_first=True), nn.Linear(512, 1000)
        self.embed = nn.Embedding(1000, 512)

    def forward(self, batch):
        return self.head(self.lstm(self.embed(batch))[0])


def test_recurrent_layers_outside_of_graphs_read_weights_in_place():
    def tagger():
        torch.manual_seed(0)
        made = Tagger()
        made.lstm.requires_grad_(False)
        made.embed.requires_grad_(False)
        return made

    model = enabled(tagger())
    assert same(train(model, 4), train(tagger(), 4))
    assert host_copies(model) > 0


SMALL = {"policy": "swap_all", "weights": "swap", "min_swap_bytes": 512}


def small():
    """A frozen layer under a trained one, after a step with swapped weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model
            self.layers[0].requires_grad_(False)

        def forward(self, x):
            return self.layers(x).square().mean()

    return Loss()


def one_step(model):
    loss = model(torch.ones(3, 32))
    loss.backward()
    return loss.item()


def child_of(weight, connection):
    """Write a part of ``weight``, and send the rest once the parent has freed its own memory of it."""
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    weight[0].fill_(7)
    connection.send("written")
    connection.recv()
    connection.send((weight[:2] + 0).tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_weights_of_its_own():
    model = lmswap.enable(small(), "1GiB", **SMALL)
    one_step(model)
    weight = model.layers[0].weight
    before, context = weight.clone(), multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=child_of, args=(weight, there), daemon=True)
    assert host_copies(model) == 1
    child.start()
    assert here.recv() == "written"
    assert torch.equal(weight, before)
    del weight
    lmswap.disable(model)
    here.send("freed")
    assert here.poll(30), "the child has ended"
    assert here.recv() == [[7.0] * 32, before[1].tolist()]
    child.join()
    assert child.exitcode == 0
    assert torch.equal(model.layers[0].weight, before)


def grandchild_of(weight, connection):
    connection.send(weight[0].tolist())


def child_with_a_model(weight, connection):
    """Write a part of ``weight``, and send it from a child of this process, then with an enabled model of its own."""
    torch.set_num_threads(1)
    weight[0].fill_(7)
    context = multiprocessing.get_context("fork")
    grandchild = context.Process(target=grandchild_of, args=(weight, connection))
    grandchild.start()
    grandchild.join()
    model = lmswap.enable(nn.Linear(1024, 1024), "1GiB", **SMALL)
    for _ in range(20):  # pages of its own host copies are mapped again and again, and trimmed
        model.weight.sum()
        time.sleep(0.005)
    connection.send(weight[0].tolist())


@pytest.mark.cpu_only("children cannot use a GPU that the parent uses")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_forked_child_writes_outlives_its_own_children_and_models():
    model = lmswap.enable(small(), "1GiB", **SMALL)
    one_step(model)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=child_with_a_model, args=(model.layers[0].weight, there))
    child.start()
    for _ in range(2):
        assert here.poll(30), "the child has ended"
        assert here.recv() == [7.0] * 32
    child.join()
    assert child.exitcode == 0


def test_what_dlpack_exports_stays_where_it_is():
    model = lmswap.enable(small(), "1GiB", **SMALL)
    one_step(model)
    weight = model.layers[0].weight
    array = np.from_dlpack(weight)
    one_step(model)
    with pytest.warns(NotManaged, match="stay in the memory of the disk tier"):
        lmswap.disable(model)
    assert array.ctypes.data == weight.data_ptr()
    array[0, 0]  # still mapped


def test_memory_that_a_file_shares_stays_there(tmp_path):
    path = str(tmp_path / "weight")
    model = small()
    weight = torch.from_file(path, shared=True, size=32 * 32).view(32, 32)
    weight.copy_(model.layers[0].weight)
    model.layers[0].weight = nn.Parameter(weight, requires_grad=False)
    del weight
    lmswap.enable(model, "1GiB", **SMALL)
    one_step(model)
    model.layers[0].weight.fill_(2)
    lmswap.disable(model)
    assert torch.all(torch.from_file(path, shared=True, size=32 * 32) == 2)


def test_a_refused_enable_leaves_weights_as_they_were():
    model = small()
    address = model.layers[0].weight.data_ptr()
    with pytest.raises(OptionError, match="more than the device has"):
        lmswap.enable(model, "900TiB", **SMALL)
    assert model.layers[0].weight.data_ptr() == address


def test_a_replaced_weight_is_placed_again_when_the_next_step_begins():
    model = lmswap.enable(small(), "1GiB", **SMALL)
    one_step(model)
    state = {"layers.0.weight": torch.ones(32, 32)}
    model.load_state_dict(state, strict=False, assign=True)
    model.layers[0].weight.requires_grad_(False)
    del state
    one_step(model)
    assert _session(model).engine.host_copies.find(model.layers[0].weight.untyped_storage()) is not None
    assert host_copies(model) == 1
