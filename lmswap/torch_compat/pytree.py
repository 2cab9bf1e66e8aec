"""Nested lists, tuples and dicts as torch flattens them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["tensors", "tree_flatten", "tree_leaves", "tree_map_only"]


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
