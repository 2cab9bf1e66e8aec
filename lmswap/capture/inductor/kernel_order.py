"""Keeps swap ops in place among the kernels that Inductor generates, and checks the generated code.

Inductor's scheduler fuses and reorders whatever has no data dependency, and transfers have none on the kernels that
they overlap. So the calls that it cannot fuse (swap ops, matrix products, convolutions, fallback operators) are chained
before scheduling, and the order in the generated code is checked afterwards.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from lmswap.errors import CaptureError
from lmswap.runtime import ops
from lmswap.torch_compat.inductor import BaseSchedulerNode, WeakDep

# An event: the operator's name and, of a swap op, the buffer that it moves.
_Event = tuple[str, int | None]
_SWAP_OPS = {
    op: op.overloadpacket.__name__
    for op in (ops.swap_out_start, ops.swap_out_wait, ops.swap_in_start, ops.swap_in_wait)
}


def chain_calls(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Make each call depend on the previous one, and each release on the kernels that read what it releases.

    Args:
        nodes: of Inductor's scheduler before fusion, in the order of the graph; edited in place.
    """
    last: BaseSchedulerNode | None = None
    readers: dict[str, list[BaseSchedulerNode]] = {}
    for node in nodes:
        if node.is_extern() or node.is_template():
            if last is not None:
                _wait(node, last)
            last = node
        if getattr(node.node, "op_overload", None) is ops.swap_out_wait:
            for reader in [reader for dep in node.read_writes.reads for reader in readers.get(dep.name, ())]:
                _wait(node, reader)
        for dep in node.read_writes.reads:
            readers.setdefault(dep.name, []).append(node)
    if nodes:
        nodes[0].scheduler.compute_ancestors()
    return nodes


def check_order(graph: fx.Graph, code: str) -> None:
    """Compare the order of calls in ``code`` with that of the nodes in ``graph``, from which it was generated.

    Raises:
        CaptureError: a swap op is missing, or not at its place among the calls that both have.
    """
    planned, generated = list(_planned(graph)), list(_generated(code))
    # Calls that differ in number between code and graph were fused or split, and are not compared.
    in_plan, in_code = Counter(name for name, _ in planned), Counter(name for name, _ in generated)
    swaps = set(_SWAP_OPS.values())
    landmarks = swaps | {name for name, count in in_code.items() if in_plan[name] == count}
    expected = [event for event in planned if event[0] in landmarks]
    found = [event for event in generated if event[0] in landmarks]
    for position in range(max(len(expected), len(found))):
        want, have = (str(e[position]) if position < len(e) else "the end" for e in (expected, found))
        if want != have:
            raise CaptureError(
                f"Inductor reordered a swap: the plan has {want} where the generated code has {have}; "
                'use compiler="fx", and torch._inductor.config options that reorder graphs as they are by default'
            )


def _wait(node: BaseSchedulerNode, earlier: BaseSchedulerNode) -> None:
    # Fake: it orders, but does not extend the lifetime of ``earlier``'s result.
    node.add_fake_dep(WeakDep(next(iter(earlier.get_buffer_names())), mutating_buf=node.get_name(), is_fake=True))


def _planned(graph: fx.Graph) -> Iterator[_Event]:
    for node in graph.nodes:
        if node.target in _SWAP_OPS:
            start: Any = node if len(node.args) > 3 else node.args[0]  # a wait's first argument is its start
            yield _SWAP_OPS[node.target], start.args[2] if start.args else None  # started in an earlier part
        elif hasattr(node.target, "overloadpacket"):
            yield node.target.overloadpacket.__name__, None


def _generated(code: str) -> Iterator[_Event]:
    buffer_of: dict[str, int] = {}  # by variable: what the start that made it moves
    functions = [
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    for statement in _statements(functions[0].body if functions else ()):
        result = statement.targets[0] if isinstance(statement, ast.Assign) else None
        value = statement.value if isinstance(statement, (ast.Assign, ast.Expr)) else None
        name = result.id if isinstance(result, ast.Name) else ""
        if isinstance(value, ast.Name) and value.id in buffer_of:
            buffer_of[name] = buffer_of[value.id]
        elif isinstance(value, ast.Call):
            match ast.unparse(value.func).split("."):
                case ["torch", "ops", "lmswap", "swap_out_start" | "swap_in_start" as op, _]:
                    buffer_of[name] = ast.literal_eval(value.args[2])
                    yield op, buffer_of[name]
                case ["torch", "ops", "lmswap", "swap_out_wait" | "swap_in_wait" as op, _]:
                    yield op, buffer_of.get(ast.unparse(value.args[0]))
                case ["extern_kernels", op] | ["torch", "ops", _, op, _]:
                    yield op, None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in execution order. On a GPU, Inductor puts all into `with torch.cuda._DeviceGuard(0):`."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement
