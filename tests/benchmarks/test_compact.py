import json

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compact import to_json

numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    numbers | st.text(alphabet='[]{}",\n \\a1'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


@given(values)
def test_written_records_are_read_back(value):
    assert json.loads(to_json(value)) == value


@given(st.lists(numbers), st.lists(st.lists(numbers, min_size=1)))
def test_a_list_of_numbers_takes_one_line(flat, nested):
    assert to_json(flat).count("\n") == 1
    assert to_json(nested).count("\n") == (len(nested) + 2 if nested else 1)
