"""Each private torch name that lmswap relies on, held to the behaviour it is relied on for."""

import copy
import gc
import logging
import threading
import weakref

import pytest
import torch
from torch import fx, nn
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.graph_compile import aot_joint_log
from torch.utils._python_dispatch import _disable_current_modes

from lmswap.capture.aot import compile_region
from lmswap.capture.numerics.tangents import CAST, COPIED
from lmswap.runtime.codegen import compile_boxed, copy_module
from tests.capture.captured import Recording, capture


class Probe(Recording):
    """Also records what torch shows while it passes the graphs."""

    def edit(self, graphs, parameters):
        super().edit(graphs, parameters)
        self.parameters = list(parameters)
        self.num_user_outputs = graphs[0].num_user_outputs
        with _disable_current_modes():
            self.real = torch.ones(3)
        self.fake = torch.ones(3)


def run(model, *inputs, is_copied=False):
    """``is_copied`` says whether what is compiled is a copy of Dynamo's graph, as it is where sizes are open."""
    torch.compiler.reset()
    probe = Probe()
    take = copy.deepcopy if is_copied else lambda module: module
    compiled = torch.compile(model, backend=lambda m, i: compile_region(take(m), i, probe), dynamic=False)
    return probe, compiled(*inputs)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
def test_parameters_are_distinguished_from_buffers_and_other_inputs(trains, is_copied):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(trains)
    model[0].weight.requires_grad_(False)
    with torch.set_grad_enabled(trains):
        probe, _ = run(model, torch.randn(8, 4), is_copied=is_copied)
    graph = probe.lowered[0].graphs[0].module.graph
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    found = sorted(tuple(inputs[i].shape) for i in probe.parameters)
    assert found == sorted(tuple(parameter.shape) for parameter in model.parameters())


def test_user_outputs_come_first_and_what_backward_needs_follows():
    probe, _ = run(lambda x: (x.tanh().exp(), x.sin()), torch.randn(8, requires_grad=True))
    forward, backward = probe.lowered[0].graphs
    (output,) = forward.module.graph.find_nodes(op="output")
    saved = [node.name for node in output.args[0][probe.num_user_outputs :]]
    inputs = [node.name for node in backward.module.graph.nodes if node.op == "placeholder"]
    assert probe.num_user_outputs == 2
    assert saved and saved == inputs[: len(saved)]


def test_fake_mode_can_be_left_to_time_real_ops():
    probe, _ = run(lambda x: x.tanh().exp(), torch.randn(8, requires_grad=True))
    assert type(probe.real) is torch.Tensor
    assert type(probe.fake) is not torch.Tensor


def test_storages_of_fakes_distinguish_aliases_from_copies():
    recording, _ = capture(lambda x: (x.tanh().view(-1), x.tanh().clone()), torch.randn(4, 4, requires_grad=True))
    values = {v.name: v.buffer for v in recording.lowered[0].program.values}
    assert values["view"] == values["tanh"]
    assert values["clone"] != values["tanh_1"]


def test_boxed_code_frees_inputs_and_values_at_their_last_use():
    alive = []
    seen: list[weakref.ref] = []

    def note(x):
        seen.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in seen))
        return x + 1

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(4):
        value = graph.call_function(note, (value,))
    graph.output((value,))
    function = compile_boxed(fx.GraphModule(nn.Module(), graph))
    arguments = [torch.ones(4)]
    function(arguments)
    assert arguments == []
    assert alive == [1, 1, 1, 1]


def test_boxed_code_calls_operators_directly_and_keeps_the_graph():
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Scalar, (x, 2.0))
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (doubled, x), {"alpha": 3}),))
    module = fx.GraphModule(nn.Module(), graph)
    function = compile_boxed(module)
    assert function([torch.ones(4)])[0].tolist() == [-1.0] * 4
    called = {function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    assert called == {torch.ops.aten.mul.Scalar._op, torch.ops.aten.sub.Tensor._op}
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.mul.Scalar, torch.ops.aten.sub.Tensor]


def test_boxed_code_holds_its_constants_only():
    from torch.fx.graph_module import _loader

    graph = fx.Graph()
    offset = graph.get_attr("inner.offset")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), offset)),))
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_buffer("offset", torch.full((2,), 3.0))
    region = fx.GraphModule(module, graph)
    num_texts = len(_loader.eval_cache)
    copied = copy_module(region)[0]
    function, held = compile_boxed(copied), weakref.ref(copied.graph)
    del copied
    gc.collect()
    assert held() is None
    assert len(_loader.eval_cache) == num_texts
    assert function([torch.ones(2)])[0].tolist() == [4.0, 4.0]


def test_an_edited_copy_of_a_module_runs_its_own_graph():
    graph = fx.Graph()
    doubled = graph.call_function(torch.ops.aten.mul.Scalar, (graph.placeholder("x"), 2.0))
    graph.output(doubled)
    copied, copies = copy_module(fx.GraphModule(nn.Module(), graph))
    copies[doubled].update_arg(1, 5.0)
    assert copied(torch.ones(1)).item() == 5.0


def test_backward_frees_saved_tensors_after_their_last_read():
    kept = []

    class Watching(Recording):
        def compiled(self, module, phase):
            function = super().compiled(module, phase)

            def watch(arguments):
                if phase == "backward":
                    kept.extend(weakref.ref(a) for a in arguments if isinstance(a, torch.Tensor))
                return function(arguments)

            return watch

    torch.compiler.reset()
    watching = Watching()
    step = torch.compile(
        lambda x: x.tanh().exp().sum(), backend=lambda m, i: compile_region(m, i, watching), dynamic=False
    )
    loss = step(torch.randn(8, requires_grad=True))
    loss.backward()
    gc.collect()
    assert kept and all(ref() is None for ref in kept)


def test_retain_graph_works_although_torch_would_donate_the_saved_tensors():
    x = torch.randn(8, requires_grad=True)
    _, y = run(lambda x: x.tanh().exp().sum(), x)
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, first + first)


def test_a_traced_graph_is_compiled_for_another_handler_without_retracing(monkeypatch):
    torch.compiler.reset()
    regions, handlers = [], [Recording(), Recording()]

    def backend(module, inputs):
        regions.append(compile_region(module, inputs, handlers[0]))
        return regions[0]

    x = torch.randn(8, requires_grad=True)
    expected = torch.compile(lambda x: x.tanh().exp().sum(), backend=backend, dynamic=False)(x)
    monkeypatch.setattr(aot_autograd, "aot_stage1_graph_capture", None)
    (actual,) = regions[0].compile_again(handlers[1])(x)
    gradients = [torch.autograd.grad(y, x)[0] for y in (actual, expected)]
    assert torch.equal(actual, expected) and torch.equal(*gradients)
    (one,), (other,) = (handler.lowered for handler in handlers)
    assert one.program == other.program
    assert all(a.module is not b.module for a, b in zip(one.graphs, other.graphs, strict=True))


def test_another_threads_aot_autograd_is_not_captured(monkeypatch):
    found = []
    trace = aot_autograd.aot_stage1_graph_capture

    def trace_beside_another(*arguments):
        if threading.current_thread() is threading.main_thread():
            own = aot_autograd.aot_function(torch.sin, fw_compiler=lambda graph, _: graph)
            thread = threading.Thread(target=lambda: found.append(own(torch.ones(3))))
            thread.start()
            thread.join()
        return trace(*arguments)

    monkeypatch.setattr(aot_autograd, "aot_stage1_graph_capture", trace_beside_another)
    x = torch.randn(8, requires_grad=True)
    _, outputs = run(lambda x: x.tanh(), x)
    assert torch.equal(outputs, x.tanh())
    assert torch.equal(found[0], torch.ones(3).sin())


def test_compile_in_place_leaves_a_switch_to_turn_it_off():
    model = nn.Linear(2, 2)
    model.compile(backend=lambda m, i: (_ for _ in ()).throw(AssertionError("compiled")))
    model._compiled_call_impl = None
    assert model(torch.ones(1, 2)).shape == (1, 2)


class Incoming(Recording):
    """Also notes how the gradients lie that come into a backward."""

    def compiled(self, module, phase):
        function = compile_boxed(module)

        def run(arguments):
            if phase == "backward":
                self.strides = arguments[-1].stride()
            return function(arguments)

        return run


def gradient(model, example):
    """Of a sum of what ``model`` makes, whose own gradient has strides of 0."""
    torch.compiler.reset()
    incoming = Incoming()
    compiled = torch.compile(model, backend=lambda m, i: compile_region(m, i, incoming), dynamic=False)
    compiled(example).sum().backward()
    return incoming, example.grad


def test_gradients_enter_a_backward_in_their_own_layout():
    incoming, _ = gradient(lambda x: x.tanh(), torch.randn(4, 6, requires_grad=True))
    assert incoming.strides == (0, 0)
    assert not incoming.notes


def test_gradients_in_unsupported_layouts_are_copied_which_a_note_states():
    example = torch.randn(4, 6, requires_grad=True)
    incoming, found = gradient(lambda x: torch.view_as_real(torch.complex(x, x.tanh())), example)
    assert incoming.strides == (12, 2, 1)
    assert incoming.notes == [COPIED]
    (expected,) = torch.autograd.grad(torch.view_as_real(torch.complex(example, example.tanh())).sum(), example)
    assert torch.equal(found, expected)


def test_a_backward_that_begins_under_autocast_is_noted():
    torch.compiler.reset()
    incoming = Incoming()
    compiled = torch.compile(lambda x: x.tanh(), backend=lambda m, i: compile_region(m, i, incoming), dynamic=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(torch.randn(4, requires_grad=True)).sum().backward()
    assert incoming.notes == [CAST]


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_graphs_are_written_out_only_for_a_log(level, monkeypatch):
    written = []
    monkeypatch.setattr(fx.GraphModule, "print_readable", lambda *_, **__: written.append("graph") or "")
    monkeypatch.setattr(aot_joint_log, "level", level)
    monkeypatch.setattr(aot_joint_log, "_cache", {})  # of levels
    run(lambda x: x.tanh().exp(), torch.randn(8, requires_grad=True))
    assert bool(written) == (level == logging.INFO)
