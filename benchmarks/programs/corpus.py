"""The stored steps and machines that plans are compared on: data/*.json.gz and machines/*.json."""

from __future__ import annotations

import gzip
from pathlib import Path

from lmswap.ir.machine import Machine
from lmswap.ir.program import Program

DATA = Path(__file__).with_name("data")
MACHINES = Path(__file__).with_name("machines")


def program_names() -> list[str]:
    """The stored programs, small files first."""
    paths = sorted(DATA.glob("*.json.gz"), key=lambda path: path.stat().st_size)
    return [path.name.removesuffix(".json.gz") for path in paths]


def machine_names() -> list[str]:
    """The described machines."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def load_program(name: str) -> Program:
    """Reads a stored program."""
    return Program.from_json(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()).decode())


def store_program(program: Program) -> Path:
    """Writes ``program`` under its name; equal programs give equal files."""
    path = DATA / f"{program.name}.json.gz"
    path.write_bytes(gzip.compress(program.to_json().encode(), mtime=0))
    return path


def load_machine(name: str) -> Machine:
    """Reads a described machine."""
    return Machine.from_json((MACHINES / f"{name}.json").read_text(encoding="utf-8"))
