"""`lmswap verify`: checks that a script computes the same as without lmswap, and that swaps restore all bytes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from lmswap.errors import OptionError, VerificationError
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.text import print_result, render_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmswap.cli import Commands
    from lmswap.verify.summary import Verified

_USAGE = "lmswap verify [--json FILE] train.py ...\n       lmswap verify [--json FILE] -m package ..."
SCHEMA = "lmswap.verified/1"
NOTHING_VERIFIED, DIFFERS = 3, 4


def add_to(commands: Commands) -> None:
    """Declare the command; arguments after the script are the script's."""
    parser = commands.add_parser(
        "verify",
        help="run a training script with every check of swapping on",
        usage=_USAGE,
        description="Runs the script as Python would, with verify=True for every model that it enables. "
        f"Exit code 0: verified; {NOTHING_VERIFIED}: nothing was swapped, or not all results were compared; {DIFFERS}: "
        "something differs; otherwise that of the script, if it failed.",
        epilog="example: lmswap verify train.py --epochs 1",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was checked there")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="train.py and its own arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script, report what was checked, and return the exit code described above."""
    if not options.script:
        raise OptionError(f"name a script: {' '.join(_USAGE.split())}")
    if not options.is_module and not Path(options.script[0]).is_file():
        raise OptionError(f"there is no script '{options.script[0]}'")
    if options.json:
        check_can_write(options.json)
    script_code, models = _run_verified([*(["-m"] if options.is_module else []), *options.script])
    code = DIFFERS if any(model.num_differences for model in models) else script_code
    if code == 0 and (not any(model.is_complete for model in models) or any(m.not_beside_plain for m in models)):
        code = NOTHING_VERIFIED
    for model in models:
        print_result(render_text(Text(f"{model.model}: {model}.")))
    print_result(render_text(Text(f"lmswap: {_verdict(code, models)}")))
    if options.json:
        found = {"schema": SCHEMA, "exit_code": code, "models": [asdict(model) for model in models]}
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return code


def _run_verified(command: list[str]) -> tuple[int, Sequence[Verified]]:
    """Return the script's exit code, as Python itself would give it, and the verification of each model."""
    from lmswap import api, options
    from lmswap.profiling.run import run_script

    code, before = 0, len(api.verified())
    options.always_verify = True
    try:
        run_script(command)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print_result(ended.code, sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except VerificationError as error:
        print_result(f"lmswap: {error}", sys.stderr)
        code = DIFFERS
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        options.always_verify = False
    return code, api.verified()[before:]


def _verdict(code: int, models: Sequence[Verified]) -> str:
    if code == 0:
        plain = _compared_with_plain_torch(models)
        return "verified: all results and all copies are the same with and without swaps" + plain
    if code == DIFFERS:
        return "NOT the same with swaps as without: do not train so"
    if code != NOTHING_VERIFIED:
        return f"the script failed with exit code {code}; what is said above is what was checked before"
    return _unverified(models)


def _unverified(models: Sequence[Verified]) -> str:
    if not models:
        return "nothing was verified: the script enabled no model"
    if not any(model.num_transfers for model in models):
        return "nothing was verified: no byte was swapped; a smaller budget would make lmswap swap"
    if any(model.is_complete for model in models):
        return (
            "swapping was verified: all results and all copies are the same with and without swaps; but some results, "
            "named above, were not compared with plain torch; compiler='eager' runs the model's own code"
        )
    return "only copies were verified: results are compared with compiler='fx', saved tensors with compiler='eager'"


def _compared_with_plain_torch(models: Sequence[Verified]) -> str:
    if not all(model.num_plain_outputs or model.num_saved for model in models):
        return ""
    is_partly = any(model.rounded_otherwise or model.may_go_another_way for model in models)
    but = ", but for what is named above" if is_partly else ""
    return f", and results are those of plain torch{but}"
