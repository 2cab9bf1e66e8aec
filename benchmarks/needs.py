"""The needs of a way of training that is measured: a GPU, or another package."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Base of ways: a GPU if ``needs_cuda``, and ``package``."""

    needs_cuda: bool = False
    package: str = "torch"

    def refusal(self, device: str) -> str | None:
        """Why this way cannot be measured on ``device``, "cpu" or "cuda"; None if it can."""
        if self.needs_cuda and device != "cuda":
            return "needs a GPU"
        return None if importlib.util.find_spec(self.package) else f"needs {self.package}, which is not installed"
