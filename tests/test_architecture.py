import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_stages_import_only_what_lies_below_them():
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module",
    [
        *("lmswap", "lmswap.ir", "lmswap.analyze", "lmswap.plan", "lmswap.reporting", "lmswap.cli"),
        *("lmswap.profiling.readers", "lmswap.profiling.profile"),
    ],
)
def test_importing_it_imports_no_torch(module):
    code = f"import importlib, sys; importlib.import_module('{module}'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_cpp_core_includes_no_foreign_header():
    foreign = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|Python\.h|nanobind|cuda\.h|cuda_runtime)')
    core = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]
    assert len(core) > 10
    offenders = [path.name for path in core if path.name != "bind.cpp" and foreign.search(path.read_text())]
    assert offenders == []
