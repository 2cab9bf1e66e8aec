"""Nested lists, tuples and dicts as torch flattens them."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only"]
