import json
from dataclasses import replace

from lmswap.ir.plan import Decision
from lmswap.reporting import BufferDecision, Explanation, make_explanation
from tests.reporting.small_step import MIB, PLAN, PROGRAM

GOLDEN = """\
Small: decisions of policy 'swap_all'
step 5.50 s, at most 10.0 % above the best possible for this order of operations

in all     buffers     bytes
keep             5  5.00 MiB
swap             1  3.00 MiB
recompute        0       0 B

    size  decision  buffer, and why
3.00 MiB  swap      conv  small.py:8 x = self.conv(x)
                    idle for 2 ops; last used by convolution_backward
2.00 MiB  keep      relu  small.py:9 x = x.relu()
                    never idle between its uses; last used by expand
2.00 MiB  keep      grad_relu
                    last used by convolution_backward (small.py:8)
1.00 MiB  keep      grad_x  small.py:8 x = self.conv(x)
                    a gradient; last used by convolution_backward
     4 B  keep      loss
                    last used by sum
     4 B  keep      grad_loss
                    last used by expand"""


def many(count: int) -> Explanation:
    """The least buffer is swapped."""
    rows = [
        BufferDecision(i, f"b{i}", (i + 1) * MIB, [*Decision][i == 0], "aten.relu.default", "", "", "", "")
        for i in range(count)
    ]
    return Explanation("Deep", "none", tuple(rows), 1.0, None)


def test_the_text_is_the_same_to_the_letter():
    assert str(make_explanation(PROGRAM, PLAN, policy="swap_all")) == GOLDEN


def test_the_largest_buffer_comes_first():
    sizes = [row.nbytes for row in many(100).decisions]
    assert sizes == sorted(sizes, reverse=True)


def test_the_ten_largest_are_printed_and_the_remainder_is_stated():
    text = str(many(100))
    assert "91.00 MiB" in text  # the tenth largest of 1 … 100 MiB
    assert " 90.00 MiB" not in text
    assert "90 more buffers, 4.00 GiB together, are not shown; all_buffers=True" in text  # 1 + … + 90 = 4095 MiB


def test_a_table_that_fits_has_no_remainder():
    assert "not shown" not in str(many(10))


def test_a_plan_that_moves_nothing_is_explained_in_a_sentence_unless_all_buffers_are_requested():
    kept = replace(many(100), decisions=many(100).decisions[:-1])
    sentence = "All 99 buffers, 4.93 GiB together, are kept; all_buffers=True or --all-buffers prints them."
    text = " ".join(str(kept).split())
    assert text.endswith(sentence) and "size" not in text
    assert len(str(replace(kept, all_buffers=True)).splitlines()) > 99


def test_all_buffers_are_printed_on_request():
    text = str(replace(many(100), all_buffers=True))
    assert {f"{n}.00" for n in range(1, 101)} <= set(text.split())
    assert "not shown" not in text


def test_a_terminal_of_80_columns_shows_it_whole():
    long = replace(many(1).decisions[0], name="encoder.blocks.0.convolution: " * 5, reason="it " * 60)
    assert max(map(len, str(replace(many(30), decisions=(long,) * 3)).splitlines())) <= 80


def test_json_has_the_rows_that_the_text_cuts():
    data = json.loads(many(100).to_json())
    assert data["schema"] == "lmswap.explanation/1"
    assert data == json.loads(replace(many(100), all_buffers=True).to_json())
    assert [row["nbytes"] for row in data["decisions"]] == [n * MIB for n in range(100, 0, -1)]


def test_totals_cover_every_buffer():
    text = str(many(100))
    (kept,) = [line for line in text.splitlines() if line.startswith("keep ")]
    assert kept.split() == ["keep", "99", "4.93", "GiB"]  # 5049 MiB


def test_markup_in_source_lines_is_printed_as_it_is():
    row = BufferDecision(0, "x", 1, Decision.KEEP, "", "m.py:1 y = x[bold]", "", "m.py:2 z = y[/bold]", "")
    assert "x  m.py:1 y = x[bold]" in str(Explanation("M", "none", (row,), 1.0, None, all_buffers=True))
