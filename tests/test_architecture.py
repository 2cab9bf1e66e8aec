import re
import subprocess
import sys
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).parent.parent


def test_stages_import_only_lower_layers():
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_module_needs_itself_to_be_imported():
    modules, imports = grimp.build_graph("lmswap", exclude_type_checking_imports=True), networkx.DiGraph()
    for module in modules.modules:
        for other in modules.find_modules_directly_imported_by(module):
            found = modules.get_import_details(importer=module, imported=other)
            # An extension module is none that grimp knows, and is taken for its package.
            if not all(re.search(r"import _(C|core)$", detail["line_contents"]) for detail in found):
                imports.add_edge(module, other)
    assert imports.number_of_edges() > 500
    assert [circle for circle in networkx.strongly_connected_components(imports) if len(circle) > 1] == []


@pytest.mark.parametrize(
    "module",
    [
        *("lmswap", "lmswap.ir", "lmswap.analyze", "lmswap.planner", "lmswap.reporting", "lmswap.cli.entry"),
        *("lmswap.profiling.readers", "lmswap.profiling.profile"),
    ],
)
def test_planning_modules_import_no_torch(module):
    code = f"import importlib, sys; importlib.import_module('{module}'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_model_that_was_never_enabled_is_refused_without_importing_what_enabling_needs():
    code = """
import sys, lmswap
from torch import nn
from lmswap import report
lmswap.disable(nn.Linear(2, 2))
for refuse in (report, lmswap.explain, lmswap.least_budget, lmswap.program):
    try:
        refuse(nn.Linear(2, 2))
    except lmswap.errors.OptionError as error:
        assert str(error) == "Linear is not enabled: call lmswap.enable(model, budget=...) first"
assert "torch._dynamo" not in sys.modules
model = lmswap.enable(nn.Linear(2, 2))
assert str(report(model)) and str(lmswap.report(model))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_cpp_core_includes_no_foreign_header():
    foreign = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|Python\.h|nanobind|cuda\.h|cuda_runtime)')
    core = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]
    assert len(core) > 10
    offenders = [path.name for path in core if path.name != "bind.cpp" and foreign.search(path.read_text())]
    assert offenders == []


def test_the_cpp_core_includes_no_iostreams():
    streams = re.compile(r"#\s*include\s*<(iostream|fstream|sstream|istream|ostream|iomanip|locale|regex|filesystem)>")
    core = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]
    assert [path.name for path in core if streams.search(path.read_text())] == []
