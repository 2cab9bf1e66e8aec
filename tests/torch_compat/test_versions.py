"""Another torch than the tested versions is warned of, once; one that lacks a name that lmswap uses is an error."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import UntestedTorch
from lmswap.torch_compat import versions

ROOT = Path(__file__).parents[2]


def test_the_tested_versions_are_those_that_pip_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (text for text in project["dependencies"] if re.match(r"torch\b", text))
    first, before = versions.FIRST, versions.BEFORE
    assert wanted == f"torch>={first[0]}.{first[1]},<{before[0]}.{before[1]}"


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cu130", "3.0.0a0+git1234", "unknown"])
def test_another_torch_is_warned_of_once(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(versions, "_reported", set())
    with pytest.warns(UntestedTorch, match=re.escape(f"torch {version} is not tested")) as caught:
        model = lmswap.enable(nn.Linear(2, 2))
    assert caught[0].filename == __file__
    lmswap.disable(lmswap.enable(model))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.1a0"])
def test_a_tested_torch_is_not_warned_of(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    lmswap.disable(lmswap.enable(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("break_torch", "missing"),
    [
        ("del torch._C._current_autograd_node", "_current_autograd_node"),
        ("import torch._prims_common as common; del common.suggest_memory_format", "suggest_memory_format"),
        ("import sys; sys.modules['torch._functorch._aot_autograd.descriptors'] = None", "descriptors"),
    ],
)
def test_a_missing_torch_name_raises_with_the_tested_versions(break_torch, missing):
    code = f"import torch; {break_torch}; import lmswap; lmswap.enable"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("ImportError: ") and missing in last
    assert f"torch {torch.__version__}" in last and f"torch {versions.tested_versions()}" in last
