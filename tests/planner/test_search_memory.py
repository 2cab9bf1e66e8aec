"""Searches give their memory back to the system: a step that is planned again keeps its budget."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmswap.analyze.memory import StepMemory
from lmswap.hardware.host_memory import peak_resident_bytes, release_free_memory, reset_peak_resident, resident_bytes
from lmswap.planner import search
from tests.ir.build import build
from tests.planner.problems import problem_of

ROOT = Path(__file__).parents[2]
MIB = 2**20
NUM_LAYERS = 8  # more than an exhaustive search has states for


def problem():
    draw = random.Random(NUM_LAYERS)
    names = [f"a{layer}" for layer in range(NUM_LAYERS)]
    lines = ["forward"]
    lines += [f"f{n} {draw.randint(1, 5)}: {names[n - 1] if n else 'X'} -> {name}" for n, name in enumerate(names)]
    lines += [f"loss 1: {names[-1]} -> y", "backward"]
    given = ["t", *(f"h{layer}" for layer in reversed(range(1, NUM_LAYERS))), "gx"]
    passed = zip(given, given[1:], reversed(names), strict=False)
    lines += [f"g_{name} {draw.randint(1, 5)}: {before} {name} -> {after}" for before, after, name in passed]
    sizes = {name: draw.randint(1, 9) for name in names}
    step = build("\n".join(lines), sizes=sizes, outputs="y", tangents="t", gradients="gx")
    return problem_of(step, int(0.5 * StepMemory(step.program, step.costs).peak.nbytes))


def growth_of_searches():
    """Bytes that two exhaustive searches in each of two threads take at most, and what they leave."""
    with ThreadPoolExecutor(2) as threads:
        found = [problem(), problem()]
        release_free_memory()
        reset_peak_resident()
        before = resident_bytes()
        for _ in range(2):
            assert [*threads.map(lambda each: search.plan_exactly(each, policy="auto"), found)] == [None, None]
        return peak_resident_bytes() - before, resident_bytes() - before


def test_exhaustive_searches_take_the_memory_of_one_and_leave_none():
    code = f"from {__name__} import growth_of_searches; print(*growth_of_searches())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    peak_bytes, left_bytes = map(int, done.stdout.split())
    assert 30 * MIB < peak_bytes < 75 * MIB
    assert left_bytes < 10 * MIB
