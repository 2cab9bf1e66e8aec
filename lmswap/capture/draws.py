"""Which ops draw random numbers, and from what state of the generator? Forward fx graph → one that keeps the states.

With its state beside it, an op that draws can run a second time and give the same bits.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from lmswap.errors import CaptureError
from lmswap.execute import ops
from lmswap.execute.draws import STATE


def draw_in_place(memory: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Stands for ``memory.bernoulli_(p)``, by which eager torch drops out, in a trace."""
    if generator is not None:
        raise CaptureError("bernoulli_() draws from a generator of its own, whose state no graph can keep")
    layout = {"dtype": memory.dtype, "device": memory.device, "like": memory}
    return memory.copy_(ops.bernoulli(memory.shape, memory.stride(), p, **layout))


def settle_draws(joint: fx.Graph) -> None:
    """Lets what `draw_in_place` drew be used as it is, and be drawn without the memory that it stands for."""
    for node in list(joint.nodes):
        if node.target is not ops.bernoulli:
            continue
        drawn = node.meta["val"]
        for user in list(node.users):
            if (
                user.target is torch.ops.aten.copy.default
                and user.args[1] is node
                and user.meta["val"].stride() == drawn.stride()
            ):
                node.meta["val"] = user.meta["val"]  # whose memory views of it show
                user.replace_all_uses_with(node)
                joint.erase_node(user)
        node.args = (list(drawn.shape), list(drawn.stride()), node.args[2])
        memory, node.kwargs = node.kwargs["like"], {"dtype": drawn.dtype, "device": drawn.device}
        if memory.op == "call_function" and not memory.users and not is_random(memory):
            joint.erase_node(memory)


def save_drawn(joint: fx.Graph) -> None:
    """Lets what is drawn inside of `torch.utils.checkpoint` be saved; a plan may still have it drawn again.

    Torch would draw it again from a state whose size it leaves open.
    """
    for node in joint.nodes:
        if node.op == "call_function" and "recompute" in node.meta and is_random(node):
            results = [user for user in node.users if user.target is operator.getitem]
            for result in (node, *results):
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


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
