"""Values that forward graphs pass to backward graphs."""

import torch
from torch import fx

from lmswap.runtime.codegen import SegmentGraph, drop_unread


def pair() -> tuple[SegmentGraph, SegmentGraph]:
    """A forward that returns one value and saves three, and a backward that reads the first and the third of them."""
    forward = fx.Graph()
    x = forward.placeholder("x")
    y, a, b, c = (forward.call_function(torch.add, (x, i)) for i in range(4))
    forward.output((y, a, b, c)).meta["desc"] = ["of y", "of a", "of b", "of c"]
    backward = fx.Graph()
    a, b, c = (backward.placeholder(name) for name in "abc")
    backward.output((backward.call_function(torch.add, (a, c)),))
    modules = [fx.GraphModule(torch.nn.Module(), graph) for graph in (forward, backward)]
    return SegmentGraph(modules[0], "forward", 1), SegmentGraph(modules[1], "backward", 0)


def test_saved_outputs_keep_their_descriptions_and_new_ones_have_none():
    forward, _ = pair()
    y, a, _, c = forward.output.args[0]
    with forward.fx_graph.inserting_before(forward.output):
        new = forward.fx_graph.call_function(torch.neg, (y,))
    forward.save([new, c, a])
    assert forward.output.args[0] == (y, new, c, a)
    assert forward.output.meta["desc"] == ["of y", None, "of c", "of a"]
    assert forward.saved == [new, c, a]


def test_values_unread_by_the_backward_are_neither_saved_nor_passed():
    forward, backward = pair()
    saved = drop_unread(backward, zip(forward.saved, backward.inputs, strict=True))
    forward.save(saved)
    assert [node.name for node in backward.inputs] == ["a", "c"]
    assert forward.output.meta["desc"] == ["of y", "of a", "of c"]
    assert forward.saved == saved
