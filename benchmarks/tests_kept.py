"""The last passing run of all tests, the slow ones included, with machine and commit.

    python -m benchmarks.tests_kept build/tests.xml

reads what pytest wrote with --junitxml, and keeps it in benchmarks/results/tests_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parent / "results" / "tests_cpu.json"


def read(path: Path) -> dict[str, object]:
    """Numbers of passed, skipped and failed tests, when they began, and their seconds."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    total = {
        name: sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "skipped", "failures", "errors")
    }
    failed = total["failures"] + total["errors"]
    return {
        "begun": suites[0].attrib["timestamp"],
        "passed": total["tests"] - total["skipped"] - failed,
        "skipped": total["skipped"],
        "failed": failed,
        "seconds": round(sum(float(suite.attrib["time"]) for suite in suites)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Stores the result of the file if nothing failed; returns 0, or 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tests_kept", description=__doc__)
    parser.add_argument("results", type=Path, help="what pytest wrote")
    found = read(parser.parse_args(argv).results)
    if found["failed"]:
        print_result(f"not kept: {found['failed']} tests failed", sys.stderr)
        return 1
    kept = {"schema": "lmswap.tests/1", **found, "machine": asdict(describe_machine())}
    write_text(RESULTS, json.dumps(kept, indent=1) + "\n")
    print_result(f"{found['passed']} tests passed, {found['skipped']} were skipped: kept in {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
