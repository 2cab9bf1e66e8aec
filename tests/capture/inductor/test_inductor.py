"""compiler="inductor" end to end: Inductor's own graphs with swaps and recomputes.

Compiling is slow: models are tiny, and a kernel that comes again, in the same C++, is compiled once. Graphs are not
taken from a cache: each test has Inductor make its own.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config

import lmswap
from lmswap.capture.inductor import backend, kernel_order
from lmswap.errors import CaptureError
from lmswap.ir.plan import Plan
from lmswap.planner import simulate
from lmswap.runtime import ops
from tests.rewrite.random_planner import plan_at_random
from tests.rewrite.random_recomputes import recompute_all
from tests.training import same_bits


@pytest.fixture(autouse=True)
def fresh_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "lmswap"))
    without_graphs = functorch_config.patch(enable_autograd_cache=False)
    with config.patch(compile_threads=1, fx_graph_cache=False), without_graphs:
        yield
    torch.compiler.reset()


@pytest.fixture
def compiled(monkeypatch):
    """Every graph that Inductor compiles for lmswap: phase, fx graph, generated code."""
    graphs = []
    compile_graph = backend.compile_fx_inner

    def keep(graph, examples, **how):
        output = compile_graph(graph, examples, **how)
        phase = "inference" if how.get("is_inference") else "backward" if how.get("is_backward") else "forward"
        graphs.append((phase, graph.graph, output.source_code))
        return output

    monkeypatch.setattr(backend, "compile_fx_inner", keep)
    return graphs


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Dropout(0.2), nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64)
    )


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh())


class Heads(nn.Module):
    """Inductor would lay the three parts side by side where they were traced one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.parts(x).view(-1, 4, 3, 64).permute(2, 0, 1, 3).contiguous().unbind()
        return self.out(torch.tanh(a @ b.transpose(1, 2)) @ c)


CASES = {"dense": (dense, (128, 64)), "conv": (conv, (2, 3, 32, 32)), "heads": (Heads, (128, 64))}


def steps(model, call, shape, *, num_steps: int = 2, retain_graph: bool = False):
    """Losses, gradients, buffers and random draws."""
    torch.manual_seed(1)
    results = []
    for _ in range(num_steps):
        loss = (call(torch.randn(shape)) ** 2).mean()
        if retain_graph:
            loss.backward(retain_graph=True)
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]
    return results + [value.clone() for value in model.state_dict().values()]


def plain(name: str, **how):
    make, shape = CASES[name]
    model = make()
    with config.patch(backend.AS_TRACED):
        results = steps(model, torch.compile(model, dynamic=False), shape, **how)
    torch.compiler.reset()
    return results


def enabled(name: str, *, policy: str = "none", **how):
    make, shape = CASES[name]
    model = lmswap.enable(make(), policy=policy, compiler="inductor", min_swap_bytes=4096)
    return model, steps(model, model, shape, **how)


def swap_ops(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("lmswap")]


def test_logged_records_hold_no_tensors_of_a_step(caplog):
    model = lmswap.enable(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), compiler="inductor")
    with config.patch(fx_graph_cache=True):  # as it is by default
        steps(model, model, (4, 8), num_steps=1)
    assert [record for record in caplog.records if record.exc_info] == []
    lmswap.disable(model)


@pytest.mark.slow
def test_policies_have_plain_inductor_bits_also_for_retained_graphs(compiled):
    expected = plain("dense", retain_graph=True, num_steps=1)
    for policy in ("swap_all", "recompute"):
        model, actual = enabled("dense", policy=policy, retain_graph=True, num_steps=1)
        assert same_bits(actual, expected)
        if policy == "swap_all":
            assert all(swap_ops(graph) for _, graph, _ in compiled)
        lmswap.disable(model)


@pytest.mark.slow
def test_a_copy_that_splits_a_fused_reduction_changes_rounding_only():
    expected = plain("conv", num_steps=1)
    model, actual = enabled("conv", policy="swap_all", num_steps=1)
    assert lmswap.report(model).swapped_out_bytes > 0
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    lmswap.disable(model)


@pytest.mark.slow
def test_swapped_tensors_keep_their_traced_layout_until_the_copy_is_done(monkeypatch, compiled):
    expected = plain("heads", num_steps=1)
    # Plans of other seeds swap a view that does not fill its storage within the backward, which is refused.
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(1))
    model, actual = enabled("heads", num_steps=1)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    for _, _, code in compiled:
        moved = set(re.findall(r"lmswap\.swap_out_start\.default\((.+), \d+, \d+, '", code))
        awaited = set(re.findall(r"lmswap\.swap_out_wait\.default\(\w+, (.+), \d+\)", code))
        assert awaited <= moved or moved <= awaited  # a backward may wait for what its forward has started
    lmswap.disable(model)


def test_a_copy_out_of_a_view_that_does_not_fill_its_storage_is_refused_by_name():
    graph = torch.fx.Graph()
    part = graph.placeholder("part")
    part.meta["val"] = torch.empty(3, 8)[1:]
    graph.call_function(ops.swap_out_start, (part,))
    with pytest.raises(CaptureError, match=r"'part' does not fill its storage.*compiler=\"fx\""):
        backend._check_movable(graph)


@pytest.mark.slow
def test_a_graph_without_pressure_makes_the_calls_of_plain_inductor(compiled):
    model, _ = enabled("dense", num_steps=1)
    lmswap.disable(model)
    ours = [(phase, calls(code)) for phase, _, code in compiled]
    torch.compiler.reset()
    theirs = []
    compile_graph = torch._inductor.compile_fx.compile_fx_inner

    def keep(graph, examples, **how):
        output = compile_graph(graph, examples, **how)
        theirs.append(("backward" if how.get("is_backward") else "forward", calls(output.source_code)))
        return output

    make, shape = CASES["dense"]
    model = make()

    def backend(module, inputs):
        return torch._inductor.compile_fx.compile_fx(module, inputs, inner_compile=keep)

    with torch._functorch.config.patch(donated_buffer=False):  # retain_graph costs plain Inductor the same
        steps(model, torch.compile(model, backend=backend, dynamic=False), shape, num_steps=1)
    assert ours == theirs
    assert not any("lmswap" in name for _, names in ours for name in names)


def calls(code: str) -> list[str]:
    """What the generated function calls, in order; a parameter or a view of it may be what is saved."""
    body = code[code.index("def call(") : code.index("runner = ")]
    return re.findall(
        r"^ +(?:\w+ = )?(empty_strided\w*|cpp_\w+|extern_kernels\.\w+|torch\.ops[\w.]+)\(", body, re.MULTILINE
    )


@pytest.mark.slow
def test_a_forward_that_nothing_trains_in_gives_the_bits_of_plain_inductor(monkeypatch, compiled):
    make, shape = CASES["dense"]
    batch = torch.randn(shape)
    with config.patch(backend.AS_TRACED):
        expected = torch.compile(make().eval().requires_grad_(False), dynamic=False)(batch)
    torch.compiler.reset()
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(0, share=0.0))
    model = lmswap.enable(make().eval().requires_grad_(False), compiler="inductor", min_swap_bytes=4096)
    assert torch.equal(model(batch), expected)
    ((phase, graph, _),) = compiled
    assert phase == "inference"
    assert swap_ops(graph)
    lmswap.disable(model)


@pytest.mark.slow
def test_each_recompute_of_a_product_is_a_separate_call(monkeypatch, compiled, tmp_path):
    num_planned = 0

    def run_all_again(policy, program, costs, machine, *, budget_bytes, **limits):
        nonlocal num_planned
        recomputes = recompute_all(program)
        num_planned = sum("mm" in program.ops[recompute.op].target for recompute in recomputes)
        plan = Plan("all", budget_bytes, (), 0.0, 0, recomputes=recomputes)
        return replace(plan, predicted_peak_bytes=simulate(program, costs, machine, plan).peak_bytes)

    expected = plain("dense", num_steps=1)
    model, _ = enabled("dense", num_steps=1)
    lmswap.disable(model)
    torch.compiler.reset()
    monkeypatch.setattr("lmswap.session.planner.make_plan", run_all_again)
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "second"))
    model, actual = enabled("dense", num_steps=1)
    assert same_bits(actual, expected)
    before, after = (products(code) for phase, _, code in compiled if phase == "backward")
    assert after - before == num_planned > 3
    lmswap.disable(model)


def products(code: str) -> int:
    return len(re.findall(r"extern_kernels\.\w*mm\(", code))


@pytest.mark.slow
def test_code_that_swaps_at_another_place_is_refused(compiled):
    model, _ = enabled("dense", policy="swap_all", num_steps=1)
    lmswap.disable(model)
    _, graph, code = next(entry for entry in compiled if entry[0] == "backward")
    kernel_order.check_order(graph, code)
    lines = code.splitlines()
    swaps = [i for i, line in enumerate(lines) if re.search(r"lmswap\.in_(start|done)\.default\(", line)]
    products = [i for i, line in enumerate(lines) if "extern_kernels.mm(" in line]
    for swap in swaps:
        without = [line for i, line in enumerate(lines) if i != swap]
        for moved in (without, [*without[: products[-1]], lines[swap], *without[products[-1] :]]):
            with pytest.raises(CaptureError, match="Inductor reordered a swap"):
                kernel_order.check_order(graph, "\n".join(moved))


@pytest.mark.slow
def test_an_order_that_inductor_did_not_keep_stops_the_first_call(monkeypatch):
    compile_graph = backend.compile_fx_inner

    def lose_a_copy(graph, examples, **how):
        output = compile_graph(graph, examples, **how)
        output.source_code = output.source_code.replace("lmswap.swap_out_start", "lmswap.lost", 1)
        return output

    monkeypatch.setattr(backend, "compile_fx_inner", lose_a_copy)
    with pytest.raises(CaptureError, match="out_start"):
        enabled("dense", policy="swap_all", num_steps=1)
