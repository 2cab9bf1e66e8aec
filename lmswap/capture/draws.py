"""Which ops draw random numbers, and from what state of the generator? Forward fx graph → one that keeps the states.

With its state beside it, an op that draws can run a second time and give the same bits.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lmswap.execute import ops
from lmswap.execute.draws import STATE


def keep_states(forward: fx.Graph) -> None:
    """Puts a reading of the generator's state before each op of ``forward`` that draws; unread ones cost nothing.

    `lmswap.rewrite` takes those out again that no second run reads.
    """
    for node in list(forward.nodes):
        device = _drawn_on(node)
        if device is None:
            continue
        with forward.inserting_before(node):
            state = forward.call_function(ops.rng_state, (device,))
        state.meta.update({key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta})
        mode = next(leaf.fake_mode for leaf in pytree.tree_leaves(node.meta["val"]) if hasattr(leaf, "fake_mode"))
        with mode:
            state.meta.update(val=ops.rng_state(device), is_repeatable=False)
        node.meta[STATE] = state


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers in this call: fused attention does so only to drop some of its weights."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True


def _drawn_on(node: fx.Node) -> torch.device | None:
    """The device whose default generator the op draws from, if it does."""
    if node.op != "call_function" or not is_random(node):
        return None
    devices = {leaf.device for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)}
    return devices.pop() if len(devices) == 1 else None
