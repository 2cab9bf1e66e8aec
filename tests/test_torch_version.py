"""Untested versions of torch are warned of once."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap import torch_version
from lmswap.errors import UntestedTorch


def test_the_tested_versions_are_those_that_pip_installs():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (wanted,) = (text for text in project["dependencies"] if re.match(r"torch\b", text))
    first, before = torch_version.FIRST, torch_version.BEFORE
    assert wanted == f"torch>={first[0]}.{first[1]},<{before[0]}.{before[1]}"


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cu130", "3.0.0a0+git1234", "unknown"])
def test_another_torch_is_warned_of_once(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_version, "_warned_of", set())
    with pytest.warns(UntestedTorch, match=re.escape(f"torch {version} is not tested")) as caught:
        model = lmswap.enable(nn.Linear(2, 2))
    assert caught[0].filename == __file__
    lmswap.disable(lmswap.enable(model))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.1a0"])
def test_a_tested_torch_is_not_warned_of(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    lmswap.disable(lmswap.enable(nn.Linear(2, 2)))
