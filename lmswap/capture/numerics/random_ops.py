"""Random ops in graphs: makes them functional, and inserts reads of the RNG state before them.

With its RNG state kept, a random op can be recomputed with bitwise identical results. torch's own functionalization
leaves the size of that state open in graphs (torch 2.13; no upstream issue known), and a plan needs numbers.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lmswap.errors import CaptureError
from lmswap.runtime import ops
from lmswap.runtime.rng import STATE
from lmswap.torch_compat.operators import schema_of
from lmswap.torch_compat.pytree import tensors, tree_leaves
from lmswap.torch_compat.sized_graphs import constant_meta, value_meta


def bernoulli_in_place(
    memory: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return what ``memory.bernoulli_(p)`` returns, which eager dropout calls, by an op that a trace can contain.

    Raises:
        CaptureError: it draws from a generator of its own.
    """
    if generator is not None:
        raise CaptureError("bernoulli_() draws from a generator of its own, whose state no graph can keep")
    layout = {"dtype": memory.dtype, "device": memory.device, "like": memory}
    return memory.copy_(ops.bernoulli(memory.shape, memory.stride(), p, **layout))


def functionalize_random_ops(joint: fx.Graph) -> None:
    """Make the ops that `bernoulli_in_place` traced functional: remove the copies and the memory that they fill."""
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
                node.meta.update(value_meta(user))  # which shares memory with views of it
                user.replace_all_uses_with(node)
                joint.erase_node(user)
        if not any(isinstance(number, fx.Node) for numbers in node.args[:2] for number in tree_leaves(numbers)):
            node.args = (list(drawn.shape), list(drawn.stride()), node.args[2])
        memory, node.kwargs = node.kwargs["like"], {"dtype": drawn.dtype, "device": drawn.device}
        if memory.op == "call_function" and not memory.users and not is_random(memory):
            joint.erase_node(memory)


def mark_random_saved(joint: fx.Graph) -> None:
    """Mark random results inside `torch.utils.checkpoint` as saved; a plan may still recompute them.

    torch would recompute them from an RNG state whose size it leaves open.
    """
    for node in joint.nodes:
        if node.op == "call_function" and "recompute" in node.meta and is_random(node):
            results = [user for user in node.users if user.target is operator.getitem]
            for result in (node, *results):
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def insert_rng_reads(forward: fx.Graph) -> None:
    """Insert a read of the RNG state before each random op of ``forward``; unused reads cost nothing.

    `lmswap.rewrite` removes those that no recomputation uses.
    """
    for node in list(forward.nodes):
        device = _rng_device(node)
        if device is None:
            continue
        with forward.inserting_before(node):
            state = forward.call_function(ops.rng_state, (device,))
        state.meta.update({key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta})
        mode = next(leaf.fake_mode for leaf in tree_leaves(node.meta["val"]) if hasattr(leaf, "fake_mode"))
        with mode:
            state.meta.update(constant_meta(ops.rng_state(device)), is_repeatable=False)
        node.meta[STATE] = state


def is_random(node: fx.Node) -> bool:
    """Return whether the op is random in this call: fused attention is only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True


def _rng_device(node: fx.Node) -> torch.device | None:
    """Return the device whose default generator the op uses, if it is random."""
    if node.op != "call_function" or not is_random(node):
        return None
    devices = {made.device for made in tensors(node.meta.get("val"))}
    return devices.pop() if len(devices) == 1 else None
