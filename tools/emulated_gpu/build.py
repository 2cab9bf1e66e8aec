"""Builds the emulated libraries that replace NVIDIA's for torch's CUDA build.

Builds them into this environment, where torch looks for NVIDIA's: its RPATH. Of every function that torch imports and
that is not emulated a stub is made, which says its name when it is called. Usage: python -m tools.emulated_gpu.build
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / "emulated_gpu"
# Of CUDA 13.0, which torch is built with: 2 MB.
_HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
_OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\.so|ld-linux")
# Whose functions are which, where a library gives its symbols no version.
_PREFIXES = {
    "libcuda": "cu[A-Z]",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcufile": "cuFile",
    "libcurand": "curand",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libnvrtc": "nvrtc",
    "libnvshmem_host": "nvshmem",
}


@dataclass
class Imports:
    """What the libraries of torch ask of others."""

    libraries: set[str] = field(default_factory=set)
    version_of: dict[str, str] = field(default_factory=dict)  # library -> the version of its symbols
    symbols: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by version; "": without

    def of(self, library: str) -> set[str]:
        """The functions that torch imports from ``library``."""
        prefix = _PREFIXES.get(library.partition(".so")[0])
        plain = {name for name in self.symbols[""] if prefix and re.match(prefix, name)}
        return plain | self.symbols[self.version_of.get(library, library)]


def read_imports(torch_lib: Path) -> Imports:
    """Those of all shared libraries in a folder from outside of it and of the system."""
    found = Imports()
    for path in torch_lib.glob("*.so"):
        headers = _run("objdump", "-p", path)
        found.libraries |= set(re.findall(r"NEEDED\s+(\S+)", headers))
        for library, versions in re.findall(r"required from (\S+):\n((?:\s+0x\S+ 0x\S+ \d+ \S+\n)+)", headers):
            found.version_of[library] = versions.split()[-1]
        for name, version in re.findall(r" U (\w+)(?:@(\S+))?", _run("nm", "-D", "--undefined-only", path)):
            found.symbols[version].add(name)
    found.libraries -= {path.name for path in torch_lib.iterdir()}
    found.libraries = {name for name in found.libraries if not _OF_THE_SYSTEM.match(name)} | {"libcuda.so.1"}
    return found


def write_stubs(imports: Imports, folder: Path) -> None:
    """A C file and a version script for each library that torch is linked to."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for library in sorted(imports.libraries):
        stubs = ["int emulated_gpu_missing(const char*);\n"]
        stubs += [_STUB.format(name=name) for name in sorted(imports.of(library))]
        (folder / f"{library}.c").write_text("".join(stubs))
        version = imports.version_of.get(library, library)
        (folder / f"{library}.map").write_text(f"{version} {{ global: *; }};\n")


_STUB = '__attribute__((weak)) int {name}() {{ return emulated_gpu_missing("{name}"); }}\n'


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _refuse_real_libraries() -> None:
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    if "nvidia-cuda-runtime" in installed:
        sys.exit(f"{sys.prefix} has NVIDIA's libraries: the emulated ones want an environment of their own")


def _headers() -> Path:
    folder = _BUILD / "headers"
    if not folder.exists():
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *_HEADERS)
    return folder / "nvidia" / "cu13" / "include"


def main() -> None:
    """Builds all, and puts it into this environment."""
    _refuse_real_libraries()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed here")
    torch = Path(spec.origin).parent
    stubs, build, tools = _BUILD / "stubs", _BUILD / "cmake", Path(sys.prefix) / "bin"
    write_stubs(read_imports(torch / "lib"), stubs)
    where = [f"-DTORCH={torch}", f"-DSTUBS={stubs}", f"-DCUDA_HEADERS={_headers()}"]
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    _run(tools / "cmake", "-S", _HERE, "-B", build, *ninja, *where)
    _run(tools / "cmake", "--build", build, "--parallel", os.cpu_count() or 1)
    _run(tools / "cmake", "--install", build, "--prefix", torch.parent / "nvidia" / "cu13" / "lib")


if __name__ == "__main__":
    main()
