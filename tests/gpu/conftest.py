"""Fixtures of the tests on a CUDA device."""

import pytest
import torch


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels repeat their bits from run to run, where they have a form that does."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
