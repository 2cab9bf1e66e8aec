"""With ``wipe=True`` nothing of what was swapped is left in the file, however the model or the process ends."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import lmswap
from tests.models import CASES

pytestmark = pytest.mark.cpu_only("it looks into the disk tier's file; for a GPU see tests/gpu")
CASE = CASES["shared_views"]
SCRIPT = """
    import sys, torch, lmswap
    from tests.models import CASES
    case = CASES["shared_views"]
    model = {enable}
    loss = case.loss(model(case.batch()))  # what backward needs is away
    print("ready", flush=True)
    sys.stdin.readline()
    {end}
"""


def swap_files(process: str = "self") -> list[int]:
    """Descriptors of our own for the unnamed files that a process has open for direct I/O, as they are now."""
    files = [file for file in list(Path(f"/proc/{process}/fd").iterdir()) if file.exists()]
    return [os.open(file, os.O_RDONLY) for file in files if "(deleted)" in str(file.readlink()) and _is_direct(file)]


def _is_direct(file: Path) -> bool:
    flags = (file.parents[1] / "fdinfo" / file.name).read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def contents(file: int) -> bytes:
    with os.fdopen(file, "rb") as opened:
        return opened.read()


@pytest.mark.parametrize("wipe", [False, True])
def test_disable_leaves_zeros_and_training_stays_the_same(wipe):
    results = []
    for policy in ("none", "swap_all"):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = lmswap.enable(CASE.make(), policy=policy, min_swap_bytes=4096, wipe=wipe)
        for _ in range(2):
            loss = CASE.loss(model(CASE.batch()))
            before = swap_files() if policy == "swap_all" else []
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
        lmswap.disable(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert before
    assert all(contents(file).strip(b"\0") == b"" for file in before) == wipe


@pytest.mark.parametrize(
    ("enable", "end", "code"),
    [
        ("lmswap.enable(case.make(), policy='swap_all', min_swap_bytes=4096, wipe=True)", "raise RuntimeError", 1),
        pytest.param(
            "torch.compile(case.make(), backend='lmswap', "
            "options={'policy': 'swap_all', 'min_swap_bytes': 4096, 'wipe': True})",
            "sys.exit(3)",
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_end_of_the_process_leaves_zeros(enable, end, code):
    script = textwrap.dedent(SCRIPT.format(enable=enable, end=end))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        files = swap_files(str(process.pid))
        process.communicate("\n")
    assert process.returncode == code
    assert files
    assert all(contents(file).strip(b"\0") == b"" for file in files)
