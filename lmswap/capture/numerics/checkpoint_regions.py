"""Refuses regions of `torch.utils.checkpoint` that have more effects in eager mode than in a trace.

Eager torch recomputes such a region in the backward, with all its effects: batch norm's running statistics are updated
twice (pytorch#96136), random numbers are drawn a second time unless the RNG state is preserved. A trace has the region
once, and a plan that recomputes its ops repeats none of these. A reentrant checkpoint of which no argument requires a
gradient yields none in eager mode, where a trace differentiates through it. torch.compile has these differences too,
without a warning (torch 2.13; no upstream issue known).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from lmswap.capture.lower import source_line
from lmswap.errors import CaptureError
from lmswap.torch_compat.dynamo import CHECKPOINT, observed_checkpoints
from lmswap.torch_compat.operators import OpOverload, TorchDispatchMode, enable_python_dispatcher, schema_of
from lmswap.torch_compat.pytree import tensors, tree_map_only
from lmswap.torch_compat.tensors import storage_id

_YIELDS_NONE = "lmswap_yields_no_gradients"  # in the meta of a node


@contextmanager
def marked_checkpoints() -> Iterator[None]:
    """Mark, in graphs that Dynamo captures, reentrant checkpoints of which no argument requires a gradient.

    The arguments of a node do not show it: they include what the region reads from closures and containers, which eager
    torch does not look into.
    """

    def mark(node: fx.Node, given: Sequence[Tensor]) -> None:
        if not any(tensor.requires_grad for tensor in given):
            node.meta[_YIELDS_NONE] = True

    with observed_checkpoints(mark):
        yield


def refuse_effects(region: fx.GraphModule) -> None:
    """Check the checkpoints in Dynamo's graph ``region``; nothing is recomputed without gradients.

    Raises:
        CaptureError: one has effects in eager mode that a trace has not.
    """
    if not torch.is_grad_enabled():
        return
    for part in region.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=CHECKPOINT):
                _refuse_node(part, node)


def _refuse_node(owner: fx.GraphModule, node: fx.Node) -> None:
    is_reentrant = node.kwargs.get("use_reentrant") is not False  # torch's default is True
    if is_reentrant and node.meta.get(_YIELDS_NONE):
        _refuse(node, "is reentrant and no argument requires a gradient: eager torch passes no gradient through it")
    effects = _effects_of(owner, node)
    if effects.written is not None:
        _refuse(node, f"writes into a buffer or an input ({effects.written}): eager torch does so twice in a step")
    if effects.drawn is not None and node.kwargs.get("preserve_rng_state") is False:
        _refuse(node, f"has preserve_rng_state=False and is random ({effects.drawn}): eager torch redraws each time")


def _refuse(node: fx.Node, does: str) -> None:
    raise CaptureError(
        f"torch.utils.checkpoint ({source_line(node)}) {does}, and a trace does not; saved-tensor hooks serve such a "
        'model: compiler="eager"'
    )


def _effects_of(owner: fx.GraphModule, node: fx.Node) -> _Effects:
    """Return the effects of a checkpoint's region, run once on fake tensors."""
    body, *given = node.args
    region = owner.get_submodule(body.target)  # type: ignore[union-attr, arg-type]
    mode = next(fake.fake_mode for fake in tensors(list(map(_example, given))) if hasattr(fake, "fake_mode"))
    with torch.no_grad(), mode:
        copies = [tree_map_only(Tensor, Tensor.clone, _example(argument)) for argument in given]
        effects = _Effects(tensors(copies))
        with enable_python_dispatcher(), effects:
            region(*copies)
    return effects


def _example(argument: Any) -> Any:
    return argument.meta["example_value"] if isinstance(argument, fx.Node) else argument


class _Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The last operator that writes into the given tensors, and the last that draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: str | None = None
        self.drawn: str | None = None
        self._storages = {storage_id(tensor.untyped_storage()) for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if any(storage_id(tensor.untyped_storage()) in self._storages for tensor in _written(func, args, kwargs)):
                self.written = str(func)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.drawn = str(func)
        return func(*args, **kwargs)


def _written(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments of a call that the operator's schema declares as written."""
    arguments = schema_of(func).arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    writes = [argument for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return tensors([given.get(argument.name) for argument in writes])
