"""JSON files that something went wrong with: cut off, a byte changed, a field of another type or missing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

_WRONG = st.sampled_from([None, True, -1, 0, 3, 2**80, 1.5, float("inf"), float("nan"), "", "x", [], [[]], {}, [-5]])


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    way = draw(st.sampled_from(["cut", "byte", "leaf", "missing"]))
    if way == "cut":
        return text[: draw(st.integers(0, len(text) - 1))]
    if way == "byte":
        place = draw(st.integers(0, len(text) - 1))
        return text[:place] + draw(st.characters()) + text[place + 1 :]
    data = json.loads(text)
    places = list(_places(data))
    container, key = draw(st.sampled_from(places))
    if way == "leaf":
        container[key] = draw(_WRONG)
    else:
        del container[key]
    return json.dumps(data)


def _places(node: Any):
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])
