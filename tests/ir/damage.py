"""JSON files that something went wrong with: cut off, bytes changed, fields of another kind, missing, twice, deep."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

_DEEP = "deep"  # stands for lists within lists, more than any parser follows
_LONG = "long"  # stands for a number of more digits than Python reads
_WRONG = st.sampled_from(
    [
        *(None, True, -1, 0, 3, 2**31, 2**63, 2**80, 1.5, 1e308, 5e-324, float("inf"), float("nan"), float("-inf")),
        *("", "x", "1", "\ud800", "\0", [], [[]], {}, [-5], {"": {}}, [[1, 2], [3]], _DEEP, _LONG),
    ]
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """``text`` with one to three faults."""
    for _ in range(draw(st.integers(1, 3))):
        text = _damage(draw, text)
    return text


def _damage(draw: st.DrawFn, text: str) -> str:
    way = draw(st.sampled_from(["cut", "byte", "leaf", "leaf", "leaf", "missing", "twice", "swapped", "more"]))
    data = _parsed(text)
    places = list(_places(data))
    if not places or way in ("cut", "byte"):
        place = draw(st.integers(0, max(0, len(text) - 1)))
        return text[:place] if way == "cut" else text[:place] + draw(st.characters()) + text[place + 1 :]
    container, key = draw(st.sampled_from(places))
    if way == "leaf":
        container[key] = draw(_WRONG)
    elif way == "missing":
        del container[key]
    elif way == "swapped":
        other, other_key = draw(st.sampled_from(places))
        one, two = copy.deepcopy(container[key]), copy.deepcopy(other[other_key])
        container[key], other[other_key] = two, one
    elif isinstance(container, list):
        container.extend([container[key]] * (1 if len(text) > 10_000 else draw(st.sampled_from([1, 20]))))
    elif way == "twice":  # of two fields of one name the last one counts
        return json.dumps(data).replace("{", "{" + json.dumps(key) + ":" + json.dumps(draw(_WRONG)) + ",", 1)
    else:
        container[str(draw(_WRONG))] = container[key]
    return json.dumps(data).replace(f'"{_DEEP}"', "[" * 5000 + "]" * 5000).replace(f'"{_LONG}"', "9" * 5000)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _places(node: Any):
    pending = [node]
    while pending:
        node = pending.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield node, key
            pending.append(node[key])
