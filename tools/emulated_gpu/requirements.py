"""Requirements of an environment with torch's CUDA build and without NVIDIA's libraries.

Prints the requirements of torch without NVIDIA's, and all of lmswap's with its development tools, one a line for pip.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

_GROUPS = ("dev", "bench")


def of_torch() -> list[str]:
    """Those of torch on this platform, but for the libraries that the emulated ones take the place of."""
    required = [text for text in importlib.metadata.requires("torch") or [] if "extra ==" not in text]
    return [text for text in required if not re.match(r"nvidia|cuda", text)]


def of_lmswap(pyproject: Path) -> list[str]:
    """Those of itself and of its tests, but for torch and for lmswap itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    required = list(project["dependencies"])
    for group in _GROUPS:
        required += project["optional-dependencies"][group]
    return [text for text in required if not re.match(r"torch\b|lmswap\b", text)]


if __name__ == "__main__":
    required = of_torch() + of_lmswap(Path(__file__).parents[2] / "pyproject.toml")
    sys.stdout.writelines(f"{text}\n" for text in required)
