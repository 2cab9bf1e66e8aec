"""What is tried in the first hour on a GPU, and by which command? In the order of what decides most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FULL = 144  # images on a real GPU; smaller ones are for a rehearsal
# In which every step is a CPU's: those of the U-Net, of one size only, are 10 to 20 s long.
_REHEARSED = ("--small", "--networks", "resnet50", "gpt")
_PATIENT = ("--seconds", "600")  # some tests take a minute and a half there, where nothing else runs


@dataclass(frozen=True)
class Part:
    """One process. ``title`` is what the page calls it; what it finds it writes to ``result``."""

    name: str
    title: str
    command: Sequence[str]  # of python
    result: Path


def parts(folder: Path, small: int, large: int) -> list[Part]:
    """All parts, for images of ``small``³ and ``large``³; each writes into a folder of its own below ``folder``."""
    own, sizes = "benchmarks.first_hour", (str(small), str(large))
    facts, suite, speed, cards, repeats, compared, study, peers = (
        folder / name / f"{file}.json"
        for name, file in (
            ("facts", "facts"),
            ("tests", "tests"),
            ("speed", "speed"),
            ("cards", "cards"),
            ("repeats", "repeats"),
            ("compared", "compared"),
            ("case-study", "results"),
            ("peers", "gpt"),
        )
    )
    rehearsed, patient = (_REHEARSED, _PATIENT) if large < _FULL else ((), ())
    compare = ("-m", "lmswap", "bench", "unet3d", "compare", "--sizes", *sizes)
    case_study = ("-m", "benchmarks.case_study", "--sizes", *sizes, "--ladder", "--repeats", "1")
    return [
        Part("facts", "The machine, and what its calls cost", ("-m", f"{own}.facts", str(facts)), facts),
        Part(
            "tests",
            "The tests of the GPU, each in a process of its own",
            ("-m", f"{own}.suite", str(suite), "tests/gpu", *patient),
            suite,
        ),
        Part(
            "speed",
            "What budgets cost in time",
            ("-m", f"{own}.speed", str(speed), *rehearsed),
            speed,
        ),
        Part(
            "cards",
            "Networks on cards of their budgets",
            ("-m", f"{own}.cards", str(cards), *rehearsed),
            cards,
        ),
        Part(
            "repeats",
            "Ops that do not repeat their bits, from a second thread too",
            ("-m", f"{own}.repeats", str(repeats), "--size", sizes[0]),
            repeats,
        ),
        Part(
            "compared",
            f"{large}³ in the memory of {small}³",
            (*compare, "--folder", str(compared.parent), "--json", str(compared)),
            compared,
        ),
        Part("case-study", "The case study", (*case_study, "--output", str(study.parent)), study),
        Part(
            "peers",
            "What PyTorch offers besides",
            ("-m", "benchmarks.peers", "--models", "gpt", "--budgets", "50", "--output", str(peers.parent)),
            peers,
        ),
    ]
