"""Plan files: the plans of a model as JSON that people can read and compare, and that another process can follow.

One line holds one decision, op or buffer. The decisions come first, with names and source lines of the model; they are
for reading, and must agree with the plan below them. A model that is enabled with such a file follows it or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from lmswap.errors import LmswapError, OptionError, PlanMismatch, without_path
from lmswap.files import read_text
from lmswap.ir.bytesize import format_bytes, parse_bytes
from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.json_io import as_json
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import BufferKind, Op, Program
from lmswap.options import Options, check_names, check_weights
from lmswap.planner.cache import DAMAGE, CachedPlan
from lmswap.reporting.decisions import buffer_decisions

SCHEMA = "lmswap.pinned/1"
_PINNED = ("budget_bytes", "policy", "tier", "compiler", "min_swap_bytes", "link", "weights")
_LONGEST_LINE = 1000  # characters; an op that reads a hundred buffers


@dataclass(frozen=True)
class PinnedPlans:
    """The steps of a model, and the plan of each; of its options those that plans depend on, `pinned_options`.

    Beside all of its steps the state of ``num_streamed`` parameters streams, and, if ``streams_gradients``, gradients.
    """

    model: str
    options: Options
    steps: tuple[tuple[Program, CachedPlan], ...]
    num_streamed: int = 0
    streams_gradients: bool = False

    def to_json(self) -> str:
        """Return the plans as JSON text, one decision per line; `from_json` restores an equal object."""
        steps = [
            {
                "decisions": _decisions(program, planned.plan),
                **json.loads(as_json(planned.to_data())),
                "program": json.loads(program.to_json()),
            }
            for program, planned in self.steps
        ]
        options = {name: asdict(self.options)[name] for name in _PINNED}
        streams = {"state_of": self.num_streamed, "gradients": self.streams_gradients}
        data = {"schema": SCHEMA, "model": self.model, "options": options, "streams": streams, "steps": steps}
        return _lines(data) + "\n"

    @staticmethod
    def from_json(text: str) -> PinnedPlans:
        """Read what `to_json` wrote, and check each plan by the verifier.

        Raises:
            OptionError: not JSON, of another schema, or damaged.
            PlanMismatch: a plan breaks a rule, or the decisions for people are not those of the plan.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise OptionError(f"expected schema '{SCHEMA}'")
            options = _options(data["options"])
            steps, streams = tuple(_step(step, options) for step in data["steps"]), data.get("streams", {})
            return PinnedPlans(
                str(data["model"]),
                options,
                steps,
                num_streamed=int(streams.get("state_of", 0)),  # files of earlier versions do not say it
                streams_gradients=bool(streams.get("gradients", False)),
            )
        except PlanMismatch:
            raise
        except (LmswapError, *DAMAGE) as error:
            raise OptionError(f"it is no plan that lmswap.save_plan wrote, or damaged: {error}") from error

    @staticmethod
    def read(path: str) -> PinnedPlans:
        """Read a file.

        Raises:
            OptionError, PlanMismatch: see `from_json`; or it cannot be read.
        """
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot read plan '{path}': {without_path(error)}") from error
        try:
            return PinnedPlans.from_json(text)
        except LmswapError as error:
            raise type(error)(f"plan '{path}' cannot be followed: {error}") from error

    def complete(self, given: Options) -> Options:
        """Return ``given`` with the file's values of all options that were left at their defaults.

        Raises:
            OptionError: an option was given another value.
        """
        defaults, unshared = Options.parse(), pinned_options(given)
        for field in _PINNED:
            wanted, pinned = getattr(unshared, field), getattr(self.options, field)
            if wanted not in (getattr(defaults, field), pinned):
                name = field.removesuffix("_bytes") if field == "budget_bytes" else field
                here, there = _said_apart(field, wanted, pinned)
                raise OptionError(
                    f"{name} was given as {here}, and plan '{given.plan}' was made with {there}: leave {name} out, or "
                    "make another plan"
                )
        if given.budget_share is not None:
            raise OptionError(f"a plan's budget is bytes: leave budget out beside plan '{given.plan}', or make another")
        pinned = {name: getattr(self.options, name) for name in _PINNED}
        return replace(given, **pinned | {"link": given.link or self.options.link})

    def check_device(self, machine: Machine) -> None:
        """Raise PlanMismatch if a plan was made for another device, or needs more of its tier than there is."""
        for _, planned in self.steps:
            if planned.machine.name != machine.name:
                raise PlanMismatch(f"the plan of {self.model} is for {planned.machine.name}; this is {machine.name}")
            for tier, nbytes in planned.plan.tier_bytes.items():
                present = replace(machine.tier(tier), ratio=planned.machine.tier(tier).ratio)
                if nbytes > present.held_bytes:
                    has = format_bytes(present.held_bytes)
                    raise PlanMismatch(f"the plan needs {format_bytes(nbytes)} of tier '{tier}', which has {has}")

    def find(self, program: Program) -> CachedPlan:
        """Return the plan of the step that computes the same as ``program``; names and source lines may differ.

        Raises:
            PlanMismatch: the file has no such step; states the difference from the most similar one.
        """
        alike = self.alike(program)
        if alike is not None:
            return alike[1]
        raise PlanMismatch(f"the plan of {self.model} has no step like this one: {self._nearest(program)}")

    def alike(self, program: Program) -> tuple[Program, CachedPlan] | None:
        """Return the step that computes the same as ``program``, if any."""
        wanted = _nameless(program)
        return next((step for step in self.steps if _nameless(step[0]) == wanted), None)

    def _nearest(self, program: Program) -> str:
        if not self.steps:
            return "it has none"
        return max((_difference(known, program) for known, _ in self.steps))[1]


def pinned_options(options: Options) -> Options:
    """Return ``options`` with all that plans do not depend on at its default.

    The link is unshared: the file that shares a link is chosen by the process that enables the model, as every path.
    """
    pinned = {name: getattr(options, name) for name in _PINNED}
    return replace(Options.parse(), **pinned | {"link": options.link.unshared if options.link else None})


def _options(data: Mapping[str, Any]) -> Options:
    link = None if data["link"] is None else EmulatedLink(**data["link"])
    if link is not None and link.shared_file is not None:
        raise OptionError(
            f"its link is shared by the file {link.shared_file!r}, which a plan must not choose: set shared_file to "
            "null there, and give enable() an EmulatedLink of these rates with that file"
        )
    options = replace(
        Options.parse(),
        budget_bytes=parse_bytes(data["budget_bytes"]),
        policy=str(data["policy"]),
        tier=str(data["tier"]),
        compiler=str(data["compiler"]),
        min_swap_bytes=parse_bytes(data["min_swap_bytes"], what="min_swap_bytes"),
        link=link,
        weights=str(data.get("weights", "auto")),  # files of earlier versions do not say it
    )
    check_weights(options.weights, options.compiler, options.tier)
    check_names(options.policy, options.tier, options.compiler)
    return options


def _step(data: Mapping[str, Any], options: Options) -> tuple[Program, CachedPlan]:
    program = Program.from_json(json.dumps(data["program"]))
    planned = CachedPlan.from_data(data, len(program.ops))
    try:
        planned.check(program, **options.swap_limits)
    except LmswapError as error:
        raise PlanMismatch(str(error)) from error
    for stated, actual in zip_longest(data["decisions"], _decisions(program, planned.plan)):
        if stated != actual:
            raise PlanMismatch(f"its decisions say {_said(stated)}, its plan {_said(actual)}")
    return program, planned


def _decisions(program: Program, plan: Plan) -> list[dict[str, Any]]:
    """Return the buffers that are not kept, for people."""
    modules = {buffer: op.module for op in reversed(program.ops) for buffer in op.writes}
    return [
        {
            "buffer": row.name,
            "decision": str(row.decision),
            "nbytes": row.nbytes,
            "made_by": row.made_by,
            "made_in": modules.get(row.buffer, ""),  # nothing in the step makes weights
            "made_at": row.made_at,
        }
        for row in buffer_decisions(program, plan)
        if row.decision is not Decision.KEEP
    ]


def _nameless(program: Program) -> Program:
    """Return ``program`` as captured, without names and source lines, which a comment in a model's file changes."""
    ops = tuple(replace(op, name="", source="", module="") for op in program.ops)
    values = tuple(replace(value, name="") for value in program.values)
    buffers = tuple(replace(buffer, name="") for buffer in program.with_gradients(BufferKind.GRADIENT).buffers)
    return replace(program, name="", ops=ops, buffers=buffers, values=values)


def _difference(known: Program, program: Program) -> tuple[int, str]:
    """Return the number of equal ops from the start on, and the first difference."""
    count = min(len(known.ops), len(program.ops))
    lengths = f"it has {len(known.ops)} ops in the file, and {len(program.ops)} here"
    is_longer = len(known.ops) != len(program.ops)
    for number, (one, other) in enumerate(zip(known.ops, program.ops, strict=False)):
        if _computes(known, one) != _computes(program, other):
            there, here = _named_apart(known, one, program, other)
            return number, f"op {number} is {there} in the file, and {here} here" + (
                f"; {lengths}" if is_longer else ""
            )
    if is_longer:
        return count, lengths
    return count, "its ops are the same, but not how their tensors lie or which of them the caller is given"


def _computes(program: Program, op: Op) -> Any:
    sizes = [program.buffers[buffer].nbytes for buffer in (*op.reads, *op.writes)]
    return op.target, op.reads, op.writes, sizes


def _named_apart(known: Program, one: Op, program: Program, other: Op) -> tuple[str, str]:
    """Describe two ops that compute different things, as briefly as shows the difference, with their source lines."""
    pairs = zip(_descriptions(known, one), _descriptions(program, other), strict=True)
    there, here = next((there, here) for there, here in pairs if there != here)
    return there + _at(one), here + _at(other)


def _descriptions(program: Program, op: Op) -> Iterator[str]:
    """Yield descriptions of what ``op`` computes, each more exact than the one before."""
    reads, writes = ([program.buffers[number] for number in numbers] for numbers in (op.reads, op.writes))

    def exactly(numbers: Sequence[int]) -> str:
        return _listed(f"buffer {number} of {program.buffers[number].nbytes} B" for number in numbers)

    makes = f"{op.target} that makes {_listed(format_bytes(buffer.nbytes) for buffer in writes)}"
    yield makes
    yield f"{makes} from {_listed(format_bytes(buffer.nbytes) for buffer in reads)}"
    yield f"{op.target} that makes {exactly(op.writes)} from {exactly(op.reads)}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "nothing"


def _at(op: Op) -> str:
    return f" ({op.source})" if op.source else ""


def _said_apart(option: str, *values: Any) -> list[str]:
    """Describe different values of an option; bytes get a unit, unless that makes them look the same."""
    if not option.endswith("_bytes"):
        return [_said(value) for value in values]
    texts = [format_bytes(value) for value in values]
    return texts if len(set(texts)) == len(texts) else [f"{value} B" for value in values]


def _said(value: object) -> str:
    return "nothing" if value is None else f"{value!r}" if isinstance(value, str) else str(value)


def _lines(data: Any, indent: str = "") -> str:
    """Return JSON with each record, or list of numbers, on one line."""
    text = json.dumps(data)
    if not isinstance(data, (dict, list)) or _fits_a_line(data, len(text)):
        return text
    inner = indent + " "
    if isinstance(data, dict):
        parts = [f"{inner}{json.dumps(key)}: {_lines(value, inner)}" for key, value in data.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _lines(value, inner) for value in data) + f"\n{indent}]"


def _fits_a_line(data: dict[str, Any] | list[Any], length: int) -> bool:
    if isinstance(data, list):
        return all(isinstance(value, (int, float)) for value in data)
    return length <= _LONGEST_LINE and not any(isinstance(value, dict) for value in data.values())
