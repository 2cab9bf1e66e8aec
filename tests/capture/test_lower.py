import copy
import re

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap.analyze.repeatable import repeatable_ops
from lmswap.capture.lower import lower
from lmswap.errors import CaptureError
from lmswap.ir.program import LOSS, BufferKind, Program
from lmswap.runtime.codegen import without_backward
from tests.capture.captured import capture
from tests.models import CASES, quick_of


def buffer_of(program: Program, name: str) -> int:
    return next(value.buffer for value in program.values if value.name == name)


def test_views_detach_and_their_base_are_one_buffer():
    def step(x):
        h = torch.tanh(x)
        return (h.view(-1).sin().sum() + h.detach().t().cos().sum() + h[1:].exp().sum()).unsqueeze(0)

    recording, _ = capture(step, torch.randn(8, 8, requires_grad=True))
    program = recording.lowered[0].program
    tanh = buffer_of(program, "tanh")
    assert program.buffers[tanh].nbytes == 8 * 8 * 4
    aliases = {value.name for value in program.values if value.buffer == tanh}
    assert {"tanh", "view", "t"} <= aliases
    assert all(op.is_view for op in program.ops if op.name in aliases - {"tanh"})


def test_values_saved_for_backward_are_the_same_buffer_in_both_graphs():
    recording, _ = capture(lambda x: torch.tanh(x).exp().sum().unsqueeze(0), torch.randn(8, 8, requires_grad=True))
    lowered = recording.lowered[0]
    forward, backward = lowered.graphs
    backward_inputs = {node.name: b for node, b in backward.buffer_of.items() if node.op == "placeholder"}
    forward_values = {node.name: b for node, b in forward.buffer_of.items()}
    shared = backward_inputs.keys() & forward_values.keys()
    assert shared
    assert all(backward_inputs[name] == forward_values[name] for name in shared)


def test_buffers_visible_to_the_caller_are_not_swappable():
    def step(x, w):
        h = torch.tanh(x @ w)
        return h, h.view(-1)[:3]

    recording, _ = capture(step, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    program = recording.lowered[0].program
    assert program.buffers[buffer_of(program, "tanh")].kind is BufferKind.OUTPUT
    for name in ("primals_1", "primals_2"):
        assert program.buffers[buffer_of(program, name)].kind is BufferKind.INPUT


def test_unused_outputs_of_an_op_are_counted():
    recording, _ = capture(lambda x: torch.max(x, dim=1).values.sum().unsqueeze(0), torch.randn(64, 64))
    program = recording.lowered[0].program
    op = next(op for op in program.ops if "max.dim" in op.target)
    assert sorted(program.buffers[b].nbytes for b in op.writes) == [64 * 4, 64 * 8]


@pytest.mark.parametrize("name", quick_of(CASES, ["encoder", "shared_views"]))
def test_in_place_ops_of_the_user_write_a_buffer_before_it_is_read(name):
    recording, _ = capture(CASES[name].make(), CASES[name].batch())
    program = recording.lowered[0].program
    written: set[int] = set()
    for op in program.ops:
        for buffer in op.reads:
            assert buffer in written or program.buffers[buffer].kind is not BufferKind.ACTIVATION, op
        written |= set(op.writes)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_layout_is_kept_in_the_values(memory_format):
    conv = nn.Conv3d(4, 8, 3, padding=1).to(memory_format=memory_format)
    x = torch.randn(1, 4, 8, 8, 8).to(memory_format=memory_format)
    recording, _ = capture(lambda x: F.relu(conv(x)).sum().unsqueeze(0), x)
    value = next(v for v in recording.lowered[0].program.values if v.name == "convolution")
    assert value.stride == conv(x).stride()


def test_sources_are_the_users_own_lines():
    recording, _ = capture(lambda x: torch.tanh(x).sum().unsqueeze(0), torch.randn(8, requires_grad=True))
    sources = {op.target: op.source for op in recording.lowered[0].program.ops}
    assert sources["aten.tanh.default"].startswith("test_lower.py:")
    assert "torch.tanh(x)" in sources["aten.tanh_backward.default"]  # backward ops name the forward line


def test_sources_are_the_users_own_lines_under_a_default_device_too():
    with torch.device("cpu"):
        recording, _ = capture(lambda x: torch.tanh(x).sum().unsqueeze(0), torch.randn(8, requires_grad=True))
    sources = {op.target: op.source for op in recording.lowered[0].program.ops}
    assert "torch.tanh(x)" in sources["aten.tanh.default"]


def test_random_ops_can_be_recomputed_from_a_state_that_is_read_once():
    recording, _ = capture(lambda x: F.dropout(x.exp(), 0.5).sum().unsqueeze(0), torch.randn(8, requires_grad=True))
    program = recording.lowered[0].program
    state, _ = [op for op in program.ops if not op.is_repeatable]  # the other one is the loss
    assert state.target == "lmswap.rng_state.default"
    drawing = program.ops[state.index + 1]
    assert drawing.target == "lmswap.bernoulli.default"
    assert state.writes == drawing.reads


def test_readers_of_running_statistics_are_recomputable_but_no_copies():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    program = capture(model, torch.randn(2, 3, 8, 8))[0].lowered[0].program
    repeatable = {op.target: flag for op, flag in zip(program.ops, repeatable_ops(program), strict=True)}
    assert repeatable["aten._native_batch_norm_legit_functional.default"]
    copies = [op for op in program.ops if op.target == "aten.clone.default"]
    assert [program.buffers[op.reads[0]].nbytes for op in copies] == [8, 16, 16]  # batch count, mean, variance
    assert not any(op.is_repeatable for op in copies)


def test_a_captured_step_has_eager_bits_and_running_statistics():
    case = CASES["resnet"]
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()
    twin = copy.deepcopy(model)
    recording, output = capture(model, batch)
    case.loss(output).backward()
    case.loss(twin(batch)).backward()
    assert len(recording.lowered) == 1
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_tensors_recomputed_by_torchs_checkpoint_are_separate_buffers():
    def step(x):
        return checkpoint(lambda x: x.exp().sin().exp(), x.tanh(), use_reentrant=False).sin()

    program = capture(step, torch.randn(8, requires_grad=True))[0].lowered[0].program
    for target, runs in (("aten.exp.default", 3), ("aten.sin.default", 3)):
        made = [op.writes for op in program.ops if op.target == target]
        assert len(made) >= runs - 1
        assert all(writes for writes in made) and len(set(made)) == len(made)


def test_flops_are_torchs_own_count():
    recording, _ = capture(lambda x: x @ x, torch.randn(32, 32))
    assert sum(op.flops for op in recording.lowered[0].program.ops) == 2 * 32**3


def test_a_pass_without_gradients_is_one_inference_segment():
    with torch.no_grad():
        recording, _ = capture(CASES["resnet"].make().eval(), CASES["resnet"].batch())
    program = recording.lowered[0].program
    assert [segment.phase for segment in program.segments] == ["inference"]


def test_programs_have_the_sizes_of_their_trace_where_these_may_change():
    def step(x):
        return torch.tanh(x).sum().unsqueeze(0)

    x = torch.randn(8, 8, requires_grad=True)
    expected, _ = capture(step, x)
    torch._dynamo.mark_dynamic(x, 0)
    actual, _ = capture(step, x)
    found = [recording.lowered[0].program for recording in (actual, expected)]
    assert [[b.nbytes for b in p.buffers] for p in found] == [[b.nbytes for b in found[1].buffers]] * 2
    assert [[op.target for op in p.ops] for p in found] == [[op.target for op in found[1].ops]] * 2


def test_saved_tensor_hooks_around_the_model_are_refused():
    with torch.autograd.graph.save_on_cpu(), pytest.raises(Exception, match="saved-tensor hooks surround"):
        capture(lambda x: torch.tanh(x).sum().unsqueeze(0), torch.randn(8, requires_grad=True))


@pytest.mark.parametrize("name", CASES)
def test_programs_survive_json_and_become_acyclic_graphs(name):
    import networkx

    recording, _ = capture(CASES[name].make(), CASES[name].batch())
    program = recording.lowered[0].program
    assert Program.from_json(program.to_json()) == program
    graph = program.to_networkx()
    assert graph.number_of_nodes() == len(program.ops)
    assert networkx.is_directed_acyclic_graph(graph)


def test_damaged_programs_are_refused():
    for text in ("", "[]", '{"schema": "other"}', '{"schema": "lmswap.program/1"}'):
        with pytest.raises(CaptureError):
            Program.from_json(text)


def test_ops_and_their_backward_belong_to_the_innermost_module():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))

        def forward(self, x):
            return self.blocks(x).exp()

    recording, _ = capture(Model(), torch.randn(2, 4))
    modules = {
        (segment.phase, op.target.split(".")[1]): op.module
        for program in [recording.lowered[0].program]
        for segment in program.segments
        for op in program.ops[segment.start : segment.stop]
        if op.module != "blocks.0"
    }
    assert modules["forward", "addmm"] == "blocks.1.0"
    assert modules["forward", "gelu"] == modules["backward", "gelu_backward"] == "blocks.1.1"
    assert modules["forward", "exp"] == modules["backward", "mul"] == ""


def test_buffers_are_named_by_module_operator_and_the_models_own_line():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())

        def forward(self, x):
            return self.blocks(x).exp() * 2

    recording, _ = capture(Model(), torch.randn(2, 4))
    program = recording.lowered[0].program
    names = set(program.buffer_names)
    assert {"blocks.0: addmm", "blocks.2: gelu", "blocks.2: gelu_backward", "blocks.0: mm (backward)"} <= names
    assert "gradient of an output" in names
    assert len(names) == len(program.buffers)  # those of batch norm are numbered
    (own,) = [name for name in names if name.startswith("exp ")]
    assert re.fullmatch(r"exp \(test_lower\.py:\d+\)", own)
    made = {buffer for op in program.ops for buffer in op.writes}
    assert [name for buffer, name in enumerate(program.buffer_names) if buffer in made and "getitem" in name] == []


def test_paths_begin_below_the_model_also_where_torch_itself_made_it():
    recording, _ = capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    ops = recording.lowered[0].program.ops
    assert {op.module for op in ops if op.target != LOSS} == {"0", "1"}


def test_paths_begin_below_an_enabled_model_whose_bound_forward_is_captured():
    model = lmswap.enable(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh()), budget="1GiB")
    model(torch.randn(2, 4)).sum().backward()
    assert {op.module for op in lmswap.program(model).ops if op.target != LOSS} == {"0.0", "1"}


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_needs_a_state_for_recomputing_only_with_dropout(dropout):
    recording, _ = capture(Attention(dropout), torch.randn(2, 8, 16))
    program = recording.lowered[0].program
    drawing = [op for op in program.ops if not op.is_repeatable and op.target != LOSS]
    assert bool(drawing) == bool(dropout)


def test_attention_multiplies_queries_keys_and_values():
    recording, _ = capture(Attention(0.0), torch.randn(2, 8, 16))
    program = recording.lowered[0].program
    (forward,) = [op for op in program.ops if "attention" in op.target and "backward" not in op.target]
    assert forward.flops == 2 * 2 * (2 * 4) * 8 * 8 * 4  # two products of 8 × 8 × 4 for each of 2 × 4 heads
    (backward,) = [op for op in program.ops if "attention" in op.target and "backward" in op.target]
    assert backward.flops > 2 * forward.flops


def test_cpu_tensors_are_not_part_of_a_gpu_step():
    graph, mode = fx.Graph(), FakeTensorMode()
    x, mask = graph.placeholder("x"), graph.call_function(torch.ops.aten.ones.default, ([1024],))
    moved = graph.call_function(torch.ops.aten._to_copy.default, (mask,), {"device": torch.device("cuda")})
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, moved))
    graph.output((graph.call_function(torch.ops.aten.sum.default, (product,)),))
    with mode:
        for node, device in ((x, "cuda"), (mask, "cpu"), (moved, "cuda"), (product, "cuda")):
            node.meta["val"] = torch.empty(1024, device=device)
        product.next.meta["val"] = torch.empty((), device="cuda")
    module = fx.GraphModule(nn.Module(), graph)
    program = lower((without_backward(module),), parameters={}, name="masked").program
    kinds = {value.name: program.buffers[value.buffer].kind for value in program.values}
    assert (kinds[mask.name], kinds[moved.name]) == (BufferKind.INPUT, BufferKind.ACTIVATION)


def graph_of_a_convolution(device: str) -> fx.GraphModule:
    """As a trace on that device gives it."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        x, weight = torch.empty(1, 4, 8, 8, device=device), torch.empty(4, 4, 3, 3, device=device)
        made = torch.empty(1, 4, 6, 6, device=device)
    given = [graph.placeholder("x"), graph.placeholder("weight")]
    sides = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    node = graph.call_function(torch.ops.aten.convolution.default, (*given, None, *sides))
    for each, value in zip((*given, node), (x, weight, made), strict=True):
        each.meta["val"] = value
    graph.output((node,))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("device", "is_on", "repeats"), [("cuda", True, False), ("cuda", False, True), ("cpu", True, True)]
)
def test_convolutions_are_recomputable_unless_cudnn_chooses_by_thread(device, is_on, repeats):
    with torch.backends.cudnn.flags(enabled=True, benchmark=is_on):
        lowered = lower((without_backward(graph_of_a_convolution(device)),), parameters={}, name="convolution")
    (op,) = lowered.program.ops
    assert op.is_repeatable == repeats
