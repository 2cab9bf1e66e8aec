"""What the README shows works: its Python runs, and each of its commands is run here or by continuous integration."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmswap

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BY_CI = {"make demo", "make test"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if line.strip()]


# What the README leaves out of its training loop.
PREAMBLE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 4))
loader = [(torch.randn(512, 256), torch.randn(512, 4)) for _ in range(10)]
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters())
"""


def training_script() -> str:
    (loop,) = blocks("python")
    return PREAMBLE + loop


def test_the_training_loop_runs_as_printed():
    names: dict[str, Any] = {}
    exec(training_script(), names)
    with pytest.raises(lmswap.errors.OptionError, match="not enabled"):
        lmswap.report(names["model"])


def test_ci_runs_the_make_targets():
    assert {command for command in commands() if command.startswith("make")} == BY_CI
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command in ci for command in BY_CI)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("lmswap") and "bench" not in c])
def test_each_command_runs(command, tmp_path):
    (tmp_path / "program.json").write_text((ROOT / "tests" / "data" / "program.json").read_text())
    script = training_script()
    if command.startswith("lmswap verify"):  # a model this small swaps nothing by itself, so nothing would be verified
        script = script.replace('"6GiB"', '"6GiB", policy="swap_all"')
    (tmp_path / "train.py").write_text(script)
    words = [str(Path(sys.executable).with_name("lmswap")), *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("lmswap bench")])
def test_the_benchmark_takes_the_options_shown(command):
    from benchmarks.unet3d.cli import make_parser

    assert make_parser().parse_args(shlex.split(command)[3:]).run


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
