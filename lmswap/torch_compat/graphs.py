"""fx graphs: modules whose code is generated at their first call, and code that empties its list of arguments."""

from __future__ import annotations

from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

__all__ = ["BoxedCodeGen", "LazyGraphModule"]
