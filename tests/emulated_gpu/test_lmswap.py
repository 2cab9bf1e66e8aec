"""lmswap's tests on the emulated GPU detect errors of synchronization."""

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import lmswap
from tests.models import CASES, quick_of

CASE = CASES["shared_views"]
SOUND_AND_BROKEN = """
    import torch

    def test_sound():
        assert torch.ones(3, device="cuda").sum().item() == 3

    def test_broken():
        x = torch.ones(3, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
"""


def steps(policy, compiler, tier):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(CASE.make().cuda(), policy=policy, compiler=compiler, tier=tier, min_swap_bytes=4096)
    results = []
    for _ in range(3):
        loss = CASE.loss(tuple(output.cuda() for output in model(CASE.batch().cuda())))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    lmswap.disable(model)
    return results


WAYS = {"host": ("a copy in", "a copy out"), "peer:1": ("a copy between devices",)}


@pytest.mark.parametrize(
    ("tier", "compiler"), quick_of(itertools.product(WAYS, ["fx", "eager"]), [("host", "fx"), ("peer:1", "eager")])
)
def test_an_engine_that_does_not_wait_for_late_copies_is_detected(compiler, tier, emulated_gpu):
    emulated_gpu.configure(jitter_seconds=0.002)
    expected = steps("none", compiler, tier)
    assert all(torch.equal(a, b) for a, b in zip(steps("swap_all", compiler, tier), expected, strict=True))
    assert emulated_gpu.take_violations() == []
    emulated_gpu.ignore_waits_of_the_driver(True)
    steps("swap_all", compiler, tier)
    violations = emulated_gpu.take_violations()
    for way in WAYS[tier]:
        assert any(way in violation for violation in violations)


def test_violations_fail_the_test_that_caused_them(tmp_path):
    (tmp_path / "test_both.py").write_text(textwrap.dedent(SOUND_AND_BROKEN))
    options = [
        "-p",
        "tools.emulated_gpu.plugin",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert "2 passed, 1 error" in done.stdout
    assert "ERROR at teardown of test_broken" in done.stdout
    assert "aten::add_.Tensor on stream" in done.stdout
    assert "with no order between them" in done.stdout
