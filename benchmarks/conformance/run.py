"""Cases, each in a process of its own with limits of time and memory → an `Outcome` each."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running

from benchmarks.conformance.check import PATHS, VERDICTS, Finding
from benchmarks.unheard import unheard

PACKAGES = {
    "torch": "benchmarks.conformance.zoo.torch_modules",
    "operators": "benchmarks.conformance.zoo.torch_operators",
    "recurrent": "benchmarks.conformance.zoo.recurrent",
    "timm": "benchmarks.conformance.zoo.timm_models",
    "transformers": "benchmarks.conformance.zoo.transformers_models",
    "monai": "benchmarks.conformance.zoo.monai_networks",
    "torchvision": "benchmarks.conformance.zoo.torchvision_models",
    "smp": "benchmarks.conformance.zoo.smp_models",
}
# What torch tests itself with, and its recurrent networks: many cases, each of few bytes.
BREADTH = ("torch", "operators", "recurrent")
_SWAPPING = ("swap_all", "auto", "swap", "tflms")
_EVERY = {"graphs": (*_SWAPPING, "recompute"), "hooks": _SWAPPING}
_OF_MODELS = {"graphs": ("auto",), "hooks": ("swap_all",)}
_OF_OPERATORS = {"graphs": ("swap_all",), "hooks": ("swap_all",)}
# By package and path: the policies that are tried.
POLICIES = dict.fromkeys(PACKAGES, _OF_MODELS) | {
    "torch": _EVERY,
    "operators": _OF_OPERATORS,
    "recurrent": {"graphs": ("swap_all", "recompute"), "hooks": _SWAPPING},
}
LIMIT_SECONDS = 900
LIMIT_BYTES = 6 * 2**30  # of private memory, the libraries' included
_PRELOADED = (
    "benchmarks.conformance.run",
    "benchmarks.conformance.check",
    "lmswap.api",
    "torch._dynamo",
    "scipy.optimize",
)
# Starting a process also polls the exit codes of all others, and an answer can be read once.
_ending = threading.Lock()


@dataclass(frozen=True)
class Case:
    """A model by the name that its file in ``zoo`` has for it, and the path that it is to take."""

    package: str
    model: str
    path: str


@dataclass(frozen=True)
class Outcome:
    """What came out of a case: of its trials the worst, among those that passed the one with the largest step."""

    case: Case
    trials: int
    passed: int
    seconds: float
    finding: Finding
    commit: str = ""  # of the code that ran


def cases(packages: Sequence[str], models: Sequence[str] = (), paths: Sequence[str] = tuple(PATHS)) -> list[Case]:
    """All cases of the packages; with ``models``, only these."""
    return [
        Case(package, model, path)
        for package in packages
        for model in importlib.import_module(PACKAGES[package]).NAMES
        if not models or model in models
        for path in paths
    ]


def run_all(chosen: Sequence[Case], *, at_once: int) -> Iterator[Outcome]:
    """Runs the cases, ``at_once`` in parallel, and yields their outcomes in order."""
    context = multiprocessing.get_context("forkserver")
    of_packages = dict.fromkeys(PACKAGES[case.package] for case in chosen)
    context.set_forkserver_preload([*_PRELOADED, *of_packages])
    with unheard():
        ensure_running()  # the server, here in the main thread
    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(run_fresh, chosen)


def run_fresh(case: Case) -> Outcome:
    """Runs a case in a fresh process, which is ended at the time limit; returns the outcome in either case."""
    context, started = multiprocessing.get_context("forkserver"), time.perf_counter()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(case, sender), daemon=True)
    with _ending:
        process.start()
    sender.close()
    findings: list[Finding] = []
    while receiver.poll(max(0.0, LIMIT_SECONDS - (time.perf_counter() - started))):
        try:
            findings.append(receiver.recv())
        except EOFError:
            with _ending:
                process.join()
            if process.exitcode:
                findings.append(Finding("failed", f"its process ended with {process.exitcode}"))
            break
    else:
        process.kill()
        with _ending:
            process.join()
        findings.append(Finding("failed", f"took more than {LIMIT_SECONDS} seconds"))
    return _outcome(case, findings, time.perf_counter() - started)


def _run(case: Case, sender: Connection) -> None:
    """Sends the finding of each trial of the case through ``sender``; runs in the fresh process."""
    import torch  # noqa: PLC0415 - the process that starts these needs none of it

    from benchmarks.conformance.check import check_all  # noqa: PLC0415
    from benchmarks.conformance.memory import counting_tensors  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once; who has started it says so
    warnings.simplefilter("ignore")  # those of the models' authors
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    with counting_tensors() as memory:
        trials = importlib.import_module(PACKAGES[case.package]).trials(case.model)
        gc.freeze()  # what is there already: each training ends with a collection
        for finding in check_all(trials, case.path, POLICIES[case.package][case.path], memory):
            sender.send(finding)


def _outcome(case: Case, findings: Sequence[Finding], seconds: float) -> Outcome:
    passed = sum(finding.trials for finding in findings if finding.verdict == "passed")
    worst_first = sorted(findings, key=_badness, reverse=True)
    shown = worst_first[0] if worst_first else Finding("torch", "torch has no sample of it for this device")
    return Outcome(case, sum(finding.trials for finding in findings), passed, seconds, shown)


def _badness(finding: Finding) -> tuple[int, int]:
    """Samples that torch does not train, or in which nothing moves, say little of a case with others."""
    verdicts = list(VERDICTS)
    rank = verdicts.index(finding.verdict)
    if finding.verdict in ("unmoved", "torch"):
        rank = -len(verdicts) + rank
    return rank, finding.before.predicted_bytes if finding.before else 0
