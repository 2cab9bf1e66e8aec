"""Commands and code of README and docs run, and their lists of options and errors are complete."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

import lmswap
from benchmarks.programs.corpus import load_machine, load_program
from benchmarks.unet3d import __main__ as unet3d
from lmswap import api, errors
from lmswap.cli import entry

ROOT = Path(__file__).parent.parent
PATHS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in PATHS}

ON_TWO_MACHINES = "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400"
BUNDLE = "examples/monai_bundle/train.json"
BY_CI = {"make demo", "make test", "make test-gpu", "make docs"}
RECIPES = "tests/benchmarks/distributed/test_recipes.py"
# What takes too long, or needs more packages: what runs it, or its parts at a small size.
ELSEWHERE = {
    "make lint": "make test",
    "make test-all": "tests/benchmarks/test_tests_kept.py",
    "make test-python": "make test",
    "make test-cpp": "make test",
    "python examples/frozen_base.py --weights swap --budget 700MiB": "tests/test_examples.py",
    "make case-study": "tests/benchmarks/case_study/test_case_study.py",
    "make distributed": RECIPES,
    'make distributed RECIPE=resnet50 ARGUMENTS="--ranks 1 2 4"': RECIPES,
    "python -m benchmarks.distributed allreduce --ranks 4 --ranks-per-node 2": RECIPES,
    "python -m benchmarks.distributed efficiency --ranks 1 2 4 --models unet3d resnet50": RECIPES,
    "python -m benchmarks.distributed scale --ranks 2": RECIPES,
    "python -m benchmarks.distributed predict program.json --budget 40% --ranks 16 --network ac922": (
        "tests/benchmarks/distributed/test_command.py"
    ),
    f"torchrun {ON_TWO_MACHINES} -m benchmarks.distributed.unet3d --budget 6GiB": RECIPES,
    "make conformance soak fuzz judge": "tests/benchmarks/test_judge.py",
    "make wheel": "tests/test_wheel.py",
    "pip install shtab": "pyproject.toml",
    "shtab lmswap.cli.entry.make_parser > ~/.local/share/bash-completion/completions/lmswap": (
        "tests/cli/test_commands.py"
    ),
    "pip install .": "tests/test_wheel.py",
    "pip install -e '.[bench]'": "Makefile",
    "make gpu-first-hour": "tests/benchmarks/test_first_hour.py",
    "make integrations": "tests/test_readme.py",  # the cases that are skipped where the libraries are missing
    f"python -m monai.bundle run --config_file {BUNDLE} --budget 1GiB --side 64": "tests/integrations/test_monai.py",
    "python -m benchmarks.programs": "tests/benchmarks/test_programs.py",
    "python -m benchmarks.peers": "tests/benchmarks/test_peers.py",
}
IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel"
# What needs a network and a machine of the reader's: how torch and lmswap are installed for a GPU.
TO_INSTALL = {
    "git clone URL lmswap && cd lmswap",
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126",
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130",
    "conda create --name lmswap --channel conda-forge python=3.12 cxx-compiler",
    "conda activate lmswap",
    f'docker run --rm -it --gpus all --ipc host -v "$PWD":/lmswap -w /lmswap {IMAGE} bash',
    "pip install --break-system-packages .",
}

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
LIBRARIES = {requirement.partition(">")[0] for requirement in EXTRAS["integrations"]}
MISSING = LIBRARIES - {distribution.name for distribution in distributions()}
# By torchrun, with one process.
AS_LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

# What pages leave out of their training loops.
PREAMBLE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 4))
loader = [(torch.randn(512, 256), torch.randn(512, 4)) for _ in range(10)]
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters())
"""

MODEL = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
"""


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    shown = [block for text in PAGES.values() for block in blocks("sh", text)]
    lines = [line.partition(" #")[0].strip() for block in shown for line in block.splitlines()]
    return sorted({line for line in lines if line})


def scripts() -> dict[str, str]:
    """Each page's code is one script; where others' libraries are used, each section's."""
    found = {page: "".join(blocks("python", text)) for page, text in PAGES.items() if page != "integrations"}
    for section in re.split(r"^## ", PAGES["integrations"], flags=re.MULTILINE):
        found[f"integrations: {section.splitlines()[0]}"] = "".join(blocks("python", section))
    return {name: code for name, code in found.items() if code}


def training_script() -> str:
    return PREAMBLE + scripts()["README"]


@pytest.mark.cpu_only("pages say for which device their code is")
@pytest.mark.parametrize("script", scripts())
def test_the_code_of_each_page_runs_as_printed(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for left in [*api._sessions]:  # by other tests: pages begin in a process of their own
        lmswap.disable(left)
    code = scripts()[script]
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    if imported & LIBRARIES and MISSING:
        pytest.skip(f"needs {', '.join(sorted(MISSING))}, which make integrations installs")
    if "init_process_group" in code:
        for name, value in AS_LAUNCHED.items():
            monkeypatch.setenv(name, value)
    names: dict[str, Any] = {"__name__": "__page__"}
    with warnings.catch_warnings():
        if script.startswith("integrations"):  # libraries warn of their own affairs
            warnings.simplefilter("ignore")
        exec(PREAMBLE + code, names)
    for model in [value for value in names.values() if hasattr(value, "_compiled_call_impl")]:
        lmswap.disable(model)


def test_the_model_is_given_back_at_the_end_of_the_loop():
    names: dict[str, Any] = {}
    exec(training_script(), names)
    with pytest.raises(lmswap.errors.OptionError, match="not enabled"):
        lmswap.report(names["model"])


def test_each_command_that_is_not_run_here_runs_elsewhere():
    others = {command for command in commands() if not command.startswith("lmswap ") and not is_benchmark(command)}
    assert others == BY_CI | set(ELSEWHERE) | TO_INSTALL
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(command in ci for command in BY_CI)
    assert all(where in BY_CI or (ROOT / where).is_file() for where in ELSEWHERE.values())


@pytest.mark.parametrize("command", sorted(c for c in {*BY_CI, *ELSEWHERE} if c.startswith("make")))
def test_make_knows_each_target(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_targets_compile_modules_in_every_environment(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    check = 'check: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"'
    reported = subprocess.run(
        ["make", "--no-print-directory", f"--eval={check}", "check"], cwd=ROOT, capture_output=True
    )
    assert reported.stdout == b"[]\n"


def write_plan(path: Path) -> None:
    names: dict[str, Any] = {}
    exec(PREAMBLE, names)
    model, (x, y) = lmswap.enable(names["model"], budget="6GiB"), names["loader"][0]
    names["criterion"](model(x), y).backward()
    lmswap.save_plan(model, path)
    lmswap.disable(model)


def is_benchmark(command: str) -> bool:
    return command.startswith("python -m benchmarks.unet3d ")


def run_here() -> list[Any]:
    """The commands of lmswap; two measure the whole machine, others differ from one that is quick in an argument."""
    plan = "lmswap plan program.json --budget"
    slow = {f"{plan} {how}" for how in ("2GiB", "40% --json")}
    slow |= {"lmswap doctor", "lmswap links", "lmswap diff one.json one.json", "lmswap verify train.py"}
    slow.add("lmswap profile --steps 5:10 -- python train.py")
    here = [command for command in commands() if command.startswith("lmswap")]
    assert slow < set(here)
    return [pytest.param(command, marks=[pytest.mark.slow] * (command in slow)) for command in here]


@pytest.mark.parametrize("command", run_here())
def test_each_command_runs(command, tmp_path):
    (tmp_path / "program.json").write_text(load_program("unet3d_96").to_json())
    script = training_script()
    if command.startswith("lmswap verify"):  # a model this small swaps nothing by itself, so nothing would be verified
        script = script.replace('"6GiB"', '"6GiB", policy="swap_all"')
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "h100.json").write_text(load_machine("h200_gen5").to_json())
    if command.startswith("lmswap diff"):
        write_plan(tmp_path / "one.json")
        (tmp_path / "other.json").write_bytes((tmp_path / "one.json").read_bytes())
    words = [str(Path(sys.executable).with_name("lmswap")), *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [c for c in commands() if is_benchmark(c)])
def test_the_benchmark_takes_the_options_shown(command):
    assert unet3d.make_parser().parse_args(shlex.split(command)[3:]).run


def test_each_command_has_its_section_and_the_site_its_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = re.findall(r"^    (\w+) ", entry.make_parser().format_help(), re.MULTILINE)
    shown = runpy.run_path(str(ROOT / "docs" / "tools" / "help.py"))["on_page_markdown"](PAGES["cli"])
    for name in ("", *names):
        assert not name or f"\n## lmswap {name}\n" in PAGES["cli"]
        with pytest.raises(SystemExit):
            entry.main([*name.split(), "--help"])
        assert f"```text\n{capsys.readouterr().out}```" in shown


def test_each_error_has_its_entry():
    raised = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    entries = re.findall(r"^### `(\w+)`\n\n(.*?)(?=\n#|\Z)", PAGES["errors"], re.DOTALL | re.MULTILINE)
    assert {name for name, _ in entries} == raised
    without_advice = {name for name, text in entries if "**Do:**" not in text}
    assert without_advice == {"VerificationError", "LmswapError"}  # the bases


def test_each_option_of_enable_is_explained():
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES["options"], re.MULTILINE))
    assert set(lmswap.enable.__annotations__) - {"model", "return", "unknown"} <= rows


@pytest.mark.parametrize("page", PATHS, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        # A site has no folders to look at.
        assert path.is_file() or (page.parent == ROOT and path.is_dir()), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:lmswap|csrc|tests|docs|benchmarks)/[\w./]+)`", PAGES["CONTRIBUTING"])))
)
def test_files_named_in_contributing_exist_and_have_the_named_functions(path):
    if path.endswith("NAME.py"):
        return
    assert (ROOT / path).exists()
    text = " ".join(PAGES["CONTRIBUTING"].split())
    for name in re.findall(rf"`(\w+)`(?: in| \() ?`{re.escape(path)}`", text):
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), name


def test_each_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {path.relative_to(ROOT / 'docs')}\n" in navigation for path in ROOT.glob("docs/*.md"))


def test_readme_is_a_screen_and_a_half():
    assert len(PAGES["README"].splitlines()) <= 90
