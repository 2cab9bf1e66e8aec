import json

from lmswap.ir.plan import Decision
from lmswap.reporting import BufferDecision, Explanation, make_explanation
from tests.reporting.small_step import MIB, PLAN, PROGRAM

GOLDEN = """\
Small: decisions of policy 'swap_all', largest buffer first
step 5.50 s, at most 10.0 % above the best possible for this order of operations

    size  made                                  last used                      decision  why
3.00 MiB  small.py:8 convolution: x = self.co…  convolution_backward           swap      idle for 2 ops
2.00 MiB  small.py:9 relu: x = x.relu()         expand                         keep      never idle between its uses
2.00 MiB  expand                                small.py:8 convolution_backw…  keep
1.00 MiB  small.py:8 convolution_backward: x …  convolution_backward           keep      a gradient
     4 B  sum                                   sum                            keep
     4 B  outside the step                      expand                         keep

in all     buffers     bytes
keep             5  5.00 MiB
swap             1  3.00 MiB
recompute        0       0 B"""


def many(count: int) -> Explanation:
    rows = [
        BufferDecision(i, f"b{i}", (i + 1) * MIB, Decision.KEEP, "aten.relu.default", "", "", "", "")
        for i in range(count)
    ]
    return Explanation("Deep", "none", tuple(rows), 1.0, None)


def test_the_text_is_the_same_to_the_letter():
    assert str(make_explanation(PROGRAM, PLAN, policy="swap_all")) == GOLDEN


def test_the_largest_buffer_comes_first():
    sizes = [row.nbytes for row in many(100).decisions]
    assert sizes == sorted(sizes, reverse=True)


def test_a_long_table_is_cut_and_the_remainder_is_stated():
    text = str(many(100))
    assert "61.00 MiB" in text  # the 40th largest of 1 … 100 MiB
    assert " 60.00 MiB" not in text
    assert "in 60 smaller buffers, not shown" in text
    assert "1.79 GiB  in 60 smaller" in text  # 1 + … + 60 = 1830 MiB


def test_a_table_that_fits_has_no_remainder():
    assert "not shown" not in str(many(40))


def test_json_has_the_rows_that_the_text_cuts():
    data = json.loads(many(100).to_json())
    assert data["schema"] == "lmswap.explanation/1"
    assert [row["nbytes"] for row in data["decisions"]] == [n * MIB for n in range(100, 0, -1)]


def test_totals_cover_every_buffer():
    text = str(many(100))
    (kept,) = [line for line in text.splitlines() if line.startswith("keep ")]
    assert kept.split() == ["keep", "100", "4.93", "GiB"]  # 5050 MiB


def test_markup_in_source_lines_is_printed_as_it_is():
    row = BufferDecision(0, "x", 1, Decision.KEEP, "", "m.py:1 y = x[bold]", "", "m.py:2 z = y[/bold]", "")
    assert "m.py:1 outside the step: y = x[bold]" in str(Explanation("M", "none", (row,), 1.0, None))
