"""No file that lmswap or its benchmarks read can make them run code: no pickle, no eval, no shell."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("lmswap/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])

# By the last names of what is called; a call of any of these runs, or can run, what is in a file.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "cPickle.load",
        "dill.load",
        "cloudpickle.load",
        "joblib.load",
    ),
    *("marshal.load", "marshal.loads", "shelve.open", "pandas.read_pickle", "pd.read_pickle"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "jsonpickle.decode"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("runpy.run_path", "runpy.run_module", "importlib.import_module"),
    *("torch.jit.load", "torch.package.PackageImporter", "torch.hub.load"),
}
ALLOWED = {
    ("lmswap/profiling/run.py", "runpy.run_path"): "the user's own script, which the user has named",
    ("lmswap/profiling/run.py", "runpy.run_module"): "the same, as a module",
    ("lmswap/__init__.py", "importlib.import_module"): "our own modules",
    ("lmswap/runtime/codegen.py", "compile"): "code that torch.fx generates of a graph traced in this process",
    ("lmswap/runtime/codegen.py", "exec"): "the same",
    ("lmswap/torch_compat/sized_graphs.py", "eval"): "torch's text of a size in a graph traced in this process",
    ("benchmarks/conformance/run.py", "importlib.import_module"): "names that stand in the source",
    ("lmswap/cli/model.py", "importlib.import_module"): "the user's own module, which the user has named",
    ("benchmarks/unet3d/brats.py", "importlib.import_module"): "names that stand in the source",
    ("benchmarks/unet3d/memory.py", "importlib.import_module"): "names that stand in the source",
}


def dangerous_calls(source: str) -> set[str]:
    """Names of calls in ``source`` that could run what is in a file."""
    return {name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) for name in _danger(node)}


def _danger(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    found = [name] if name in FORBIDDEN else []
    if name == "torch.load" and given.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        found.append("numpy.load with pickle")
    if given.get("shell", "False") != "False":
        found.append("a shell")
    return found


def imported_as(source: str) -> set[str]:
    """Names under which a forbidden function was imported by itself or under another name."""
    modules = {name.rpartition(".")[0] for name in FORBIDDEN} - {""}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & FORBIDDEN
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules and alias.asname}
    return found


def test_the_scan_covers_the_readers():
    assert len(SOURCES) > 100


def test_no_reader_of_files_can_run_code():
    for path in SOURCES:
        source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        assert {call for call in dangerous_calls(source) if (name, call) not in ALLOWED} == set(), name
        assert imported_as(source) <= {call for file, call in ALLOWED if file == name}, name


def test_no_exception_outlives_its_reason():
    for name, call in ALLOWED:
        assert call in dangerous_calls((ROOT / name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize(
    "source",
    [
        *("pickle.load(f)", "eval(text)", "torch.load(path)", "torch.load(path, weights_only=False)"),
        *("np.load(f, allow_pickle=True)", "subprocess.run(command, shell=True)", "yaml.load(f)"),
        "x = [exec(line) for line in file]",
    ],
)
def test_the_scan_detects_pickle_eval_and_shell(source):
    assert dangerous_calls(source)


@pytest.mark.parametrize("source", ["from pickle import load", "import pickle as p", "from os import system"])
def test_the_scan_detects_aliases(source):
    assert imported_as(source)
