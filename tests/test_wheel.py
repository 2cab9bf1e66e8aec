"""A new user installs lmswap and gets a result with a script of their own, by the pages alone.

The wheel is built from the objects that the editable install has left in build/, and put into an environment of its
own. Its requirements are not installed again: the environment finds them among this one's packages, of which it sees
all but the editable lmswap.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("installing is the same everywhere")

ROOT = Path(__file__).parent.parent
BUILT_WITH_TOOLS = {**os.environ, "PYTHONPATH": str(ROOT / "build" / "tools")}  # as the editable install was
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libpthread.so.0"}


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments, **options):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, ROOT, env=BUILT_WITH_TOOLS)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """The folder of programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return folder / "bin"


@pytest.fixture
def elsewhere(fresh, tmp_path):
    """Runs a program of the fresh environment in a folder that knows nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return lambda program, *arguments: run(fresh / program, *arguments, cwd=tmp_path, env=environment)


@pytest.mark.slow
def test_a_users_script_written_by_the_page_trains_under_its_budget(elsewhere, tmp_path):
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^## A first result\n.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    said = elsewhere("python", "train.py")
    assert "Swapping is on" in said
    assert int(re.search(r"The measured peak is (\d+) % of the budget", said)[1]) <= 100


@pytest.mark.slow
def test_by_the_page_the_machine_is_described(elsewhere):
    assert "What lmswap will do here" in elsewhere("lmswap", "doctor")


def test_an_example_finds_the_network_in_its_checkout(elsewhere):
    assert "a NIfTI file" in elsewhere("python", ROOT / "examples" / "unet3d_volume.py", "--help")


def test_the_extra_that_an_error_recommends_is_found(fresh):
    pip("--python", fresh / "python", "install", "--dry-run", "--no-index", "lmswap[bench]")


def test_the_imported_package_is_that_of_the_wheel(elsewhere, fresh, wheel):
    said = elsewhere("python", "-c", "import lmswap; print(lmswap.__file__); print(lmswap.__version__)").split()
    assert Path(said[0]).is_relative_to(fresh.parent)
    assert said[1] == wheel.name.split("-")[1]


def test_the_wheel_holds_one_package_and_no_test(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    version = wheel.name.split("-")[1]
    assert {name.partition("/")[0] for name in names} == {"lmswap", f"lmswap-{version}.dist-info"}
    assert f"lmswap-{version}.dist-info/licenses/LICENSE" in names
    assert "lmswap/py.typed" in names


def test_the_wheel_links_neither_torch_nor_cuda(wheel, tmp_path):
    archive = zipfile.ZipFile(wheel)
    libraries = [name for name in archive.namelist() if ".so" in name]
    assert len(libraries) == 2
    for name in libraries:
        read = run("readelf", "--dynamic", archive.extract(name, tmp_path))
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", read))
        assert {library for library in needed if not library.startswith("ld-linux")} <= SYSTEM_LIBRARIES


@pytest.mark.slow
def test_the_sdist_holds_all_that_builds_and_nothing_of_the_benchmarks(tmp_path):
    run(
        sys.executable,
        "-c",
        f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})",
        cwd=ROOT,
        env=BUILT_WITH_TOOLS,
    )
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", "csrc", "lmswap", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT).splitlines()
    assert {*tracked, "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith(("benchmarks/", "tests/"))]
