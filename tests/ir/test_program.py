"""Programs: what the type refuses, what its files keep, and the graph it gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmswap.analyze.cost import roofline
from lmswap.errors import CaptureError, LmswapError
from lmswap.ir.plan import Recompute
from lmswap.ir.program import Buffer, BufferKind, Program, Segment
from lmswap.ir.schedule import schedule
from lmswap.planner import make_plan
from tests.ir.build import build, unit_machine
from tests.ir.damage import damaged
from tests.ir.strategies import steps

STEP = build(
    """
    forward
    f1 1: x W -> a
    f2 1: a -> b
    f3 1: a b -> y
    """,
    sizes={"a": 5},
    outputs="y",
)


@given(steps())
def test_json_keeps_every_program(step):
    assert Program.from_json(step.program.to_json()) == step.program


def test_buffers_have_names_and_in_older_files_those_of_their_first_values():
    named = replace(STEP.program, buffers=tuple(replace(b, name="block: add") for b in STEP.program.buffers))
    count = len(named.buffers)
    assert named.buffer_names == ("block: add", *(f"block: add #{number}" for number in range(2, count + 1)))
    assert Program.from_json(named.to_json()) == named
    data = json.loads(named.to_json())
    for record in data["buffers"]:
        del record["name"]
    assert Program.from_json(json.dumps(data)).buffer_names == STEP.program.buffer_names
    assert schedule(named, [Recompute(0, 2)]).program.buffer_names[count:] == ("block: add #3 (recomputed)",)


@given(st.data(), steps(max_ops=4))
def test_a_damaged_file_is_refused_or_still_a_program_that_can_be_planned(data, step):
    text = data.draw(damaged(step.program.to_json()))
    try:
        program = Program.from_json(text)
        assert Program.from_json(program.to_json()) == program
        machine = unit_machine()
        options = {"budget_bytes": 2**70, "tier": "host", "min_swap_bytes": 1}
        make_plan("none", program, roofline(program, machine), machine, **options)
    except LmswapError:
        return


@pytest.mark.parametrize("text", ["", "[]", "1", "{}", '{"schema": "lmswap.program/0"}', "[" * 100_000])
def test_text_that_is_not_a_program_file_is_rejected(text: str):
    with pytest.raises(CaptureError, match="not a program file"):
        Program.from_json(text)


def test_a_missing_field_is_named():
    data = json.loads(STEP.program.to_json())
    del data["ops"][1]["reads"]
    with pytest.raises(CaptureError, match="damaged: KeyError 'reads'"):
        Program.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("buffer ids must count from 0", {"buffers": STEP.program.buffers[1:]}),
        ("value ids must count from 0", {"values": STEP.program.values[1:]}),
        ("value 'y' names buffer 9", {"values": (replace(STEP.program.values[-1], id=0, name="y", buffer=9),)}),
        ("op 'f2' has index 1 at position 0", {"ops": STEP.program.ops[1:]}),
        ("op 'f1' names buffer 7", {"ops": (replace(STEP.program.ops[0], reads=(7,)),)}),
        ("does not begin where", {"segments": (Segment(0, "forward", 1, 3),)}),
        ("does not begin where", {"segments": (Segment(0, "forward", 0, -1),)}),
        ("segments cover 2 of 3 ops", {"segments": (Segment(0, "forward", 0, 2),)}),
    ],
)
def test_an_inconsistent_program_is_refused(message: str, changes):
    with pytest.raises(CaptureError, match=message):
        replace(STEP.program, **changes)


def test_an_impossible_buffer_or_segment_is_refused():
    for nbytes in (-1, 2**63):
        with pytest.raises(CaptureError, match=f"buffer 0 cannot have {nbytes} bytes"):
            Buffer(0, nbytes, BufferKind.INPUT)
    with pytest.raises(CaptureError, match="op 0 'f1' cannot have -1 flops"):
        replace(STEP.program.ops[0], flops=-1)
    with pytest.raises(CaptureError, match="'sideways', none of forward, backward, inference"):
        Segment(0, "sideways", 0, 3)


def test_the_graph_has_an_edge_for_each_read_of_another_op_s_write():
    graph = STEP.program.to_networkx()
    a, b = STEP.id("a"), STEP.id("b")
    assert set(graph.nodes) == {0, 1, 2}
    assert {(u, v): d["buffers"] for u, v, d in graph.edges(data=True)} == {(0, 1): (a,), (0, 2): (a,), (1, 2): (b,)}
    assert graph.nodes[2]["name"] == "f3"


def test_the_text_form_shows_segments_sizes_and_sources():
    text = str(STEP.program)
    assert text.splitlines()[:2] == ["program test: 3 ops, 5 buffers", "forward of graph 0: ops [0, 3)"]
    assert "0 %2:5 = test.f1(%0 %1)  test.py:1 f1" in text


def test_an_op_knows_its_segment():
    step = build("forward\nf1 1: x -> a\nbackward\ng1 1: a -> gx\ng2 1: gx -> gy")
    assert [step.program.segment_of(index).phase for index in range(3)] == ["forward", "backward", "backward"]
    with pytest.raises(IndexError):
        step.program.segment_of(3)
