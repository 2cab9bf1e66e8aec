"""TorchInductor; importing this takes seconds. Only `lmswap.capture.inductor` does."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config, ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.dependencies import WeakDep
from torch._inductor.lowering import make_fallback
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

__all__ = [
    "BaseSchedulerNode",
    "CustomPartitionerFn",
    "V",
    "WeakDep",
    "compile_fx",
    "compile_fx_inner",
    "config",
    "ir",
    "make_fallback",
    "min_cut_rematerialization_partition",
]

# The setting for a pass over the scheduler's nodes before fusion; torch 2.13 calls it a prototype.
PRE_FUSION_PASS = "_pre_fusion_custom_pass"


def unlifted_effect_tokens() -> AbstractContextManager[None]:
    """Return a context in which AOTAutograd leaves effect tokens out of graphs, as `compile_fx` runs it."""
    unlifted: AbstractContextManager[None] = functorch_config.patch(unlift_effect_tokens=True)
    return unlifted
