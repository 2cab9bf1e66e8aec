"""The parts of the first hour on a GPU and their commands, in the order of what decides most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.state.ways import WAYS

_FULL = 144  # side of an image on a real GPU; smaller ones are for a rehearsal
# On an emulated GPU every step takes a CPU's time: those of the U-Net at 144³, which has one size only, 10 to 20 s.
_REHEARSED = ("--small", "--networks", "resnet50", "gpt")
_PATIENT = ("--seconds", "600")  # some tests take a minute and a half there, where nothing else runs


@dataclass(frozen=True)
class Part:
    """One process, which writes ``result`` as it goes.

    ``limit_seconds`` is enough on an H200 with 16 cores; ``title`` is the heading of its section on the page.
    """

    name: str
    title: str
    command: Sequence[str]  # of python
    result: Path
    limit_seconds: float = 600.0


def parts(folder: Path, small: int, large: int) -> list[Part]:
    """All parts, for images of ``small``³ and ``large``³; each writes into a folder of its own below ``folder``."""
    own, sizes = "benchmarks.first_hour", (str(small), str(large))
    is_rehearsal = large < _FULL
    rehearsed, patient, emulated = (_REHEARSED, _PATIENT, ("--small",)) if is_rehearsal else ((), (), ())

    def part(name: str, title: str, seconds: float, module: str, *arguments: str) -> Part:
        result = folder / name / f"{name}.json"
        return Part(name, title, ("-m", module, str(result), *arguments), result, seconds)

    # As few tokens as are needed: a decoder's step takes a CPU's time.
    rehearsal = ("--size", "small", "--tokens", "32", "--share", "0.6")
    frozen_base = ("--size", "13b", "--tokens", "8192", "16384", "4096", "--budget", "24GiB")

    small_state = ("--size", "small", "--share", "0.9")
    vit_g = ("--size", "vit-g", "--share", "0.53")
    decoder_5b = ("--size", "5b", "--budget", "80GB", "24GiB")

    def study(name: str, title: str, seconds: float, *arguments: str) -> Part:
        result = folder / name / f"{name}.json"
        command = ("-m", f"{own}.studies", name, str(result), "--sizes", *sizes, *arguments)
        return Part(name, title, command, result, seconds)

    weights = folder / "weights" / "weights.json"
    in_both_ways = ("-m", "benchmarks.weights", "--tasks", "decoder", "--ways", "lmswap", "block swap")
    resumed = ("--steady", "2", "--timed", "3", "--resume", "--output")
    state, whole_state = (folder / name / f"{name}.json" for name in ("state", "whole-state"))
    peers = [way for way in ("torchao", "bitsandbytes") if WAYS[way].refusal("cuda") is None]
    beside_peers = ("-m", "benchmarks.state", "--tasks", "vit", "--ways", "lmswap", *peers)
    alone = ("-m", "benchmarks.state", "--tasks", "gpt", "--ways", "lmswap")
    compared, cases = folder / "compared" / "compared.json", folder / "case-study" / "results.json"
    compare = ("-m", "benchmarks.unet3d", "compare", "--sizes", *sizes)
    case_study = ("-m", "benchmarks.case_study", "--sizes", *sizes, "--repeats", "1")
    return [
        study("headline", f"{large}³ in the memory that plain torch reserves for {small}³", 200, *emulated),
        study("stalls", f"Stalls at {small}³, by Kineto", 120, *emulated),
        study("peers", "Other ways to need less memory, and lmswap at their peaks", 240, *emulated),
        study("links", "The case study's step over two links", 180, *emulated),
        part("tests", "The tests of the GPU", 150, f"{own}.suite", "-m", "not slow", "tests/gpu", *patient),
        part("mapped", "Kernels on pinned host memory", 60, f"{own}.mapped", *emulated),
        part("facts", "The machine, and what its calls cost", 60, f"{own}.facts"),
        Part(
            "weights",
            "A frozen base larger than its budget",
            (*in_both_ways, *(rehearsal if is_rehearsal else frozen_base), *resumed, str(weights)),
            weights,
            240,
        ),
        Part(
            "state",
            "Optimizer state that exceeds the budget",
            (*beside_peers, *(small_state if is_rehearsal else vit_g), *resumed, str(state)),
            state,
            300,
        ),
        Part(
            "whole-state",
            "Parameters, gradients and optimizer state that exceed the budget",
            (*alone, *(small_state if is_rehearsal else decoder_5b), *resumed, str(whole_state)),
            whole_state,
            300,
        ),
        study("speed", "What budgets cost in time", 240, *rehearsed),
        part("cards", "Networks on cards of their budgets", 600, f"{own}.cards", *rehearsed),
        part(
            "repeats",
            "Ops that do not repeat their bits, from a second thread too",
            120,
            f"{own}.repeats",
            "--size",
            sizes[0],
        ),
        Part(
            "compared",
            f"{large}³ in the memory of {small}³, by the benchmark's command",
            (*compare, "--folder", str(compared.parent), "--json", str(compared)),
            compared,
        ),
        Part("case-study", "The case study", (*case_study, "--output", str(cases.parent)), cases),
    ]
