"""Tiny steps with a known optimum on a unit machine: 1 byte a second each way unless said, no latency.

Sizes are 1 byte unless said; X, what the caller holds, has none. ``swaps`` is an optimal plan that computes nothing
twice, as (buffer, out_start, release, in_start, first_use), and ``swap_seconds`` its time; ``optimum_seconds`` is the
least with recomputation allowed, where that is less.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan, Swap
from tests.ir.build import Step, build, unit_machine

_X = {"x": 0}
_CHAIN = """
    inference
    f1 {f1}: x -> a
    f2 {op}: a -> b
    f3 {op}: b -> c
    g3 {op}: b c -> gc
    g2 {op}: a gc -> gb
    g1 {op}: x gb -> gx
"""
_HYBRID = """
    inference
    f1 1: x -> a
    f2 4: a -> b
    f3 4: b -> c
    f4 4: c -> m
    f5 4: m -> k
    g2 4: b k -> gb
    g1 4: a gb -> gx
"""
_RELEASE = """
    inference
    p 1{mark}: x -> a
    q 1: x -> b
    r 1: b -> c
    s 9: c -> e
    t 1: a e -> y
"""


@dataclass(frozen=True)
class Instance:
    name: str
    step: Step
    budget_bytes: int
    swap_seconds: float
    swaps: tuple[tuple[str, int | None, int, int, int], ...] = ()
    optimum_seconds: float | None = None
    machine: Machine = field(default_factory=unit_machine)

    def plan(self) -> Plan:
        """The plan of ``swaps``, each buffer in a page of its own."""
        buffers = sorted({name for name, *_ in self.swaps})
        swaps = tuple(
            Swap(self.step.id(name), "host", 4096 * buffers.index(name), *positions) for name, *positions in self.swaps
        )
        return Plan("hand-made", self.budget_bytes, swaps, self.swap_seconds, 0, {"host": 4096 * len(buffers)})


INSTANCES = (
    # Four buffers are live at g3, and fit: any copy is wasted. 6 ops of 1 s.
    Instance("fits", build(_CHAIN.format(f1=1, op=1), sizes=_X), 4, 6.0),
    # g3 would hold a b c gc = 1 + 1 + 2 + 1 = 5. a leaves in [8, 9) under f3 and returns in [16, 17) under g2: 6 × 4 s.
    Instance(
        "swap hides",
        build(
            """
            inference
            f1 4: x -> a
            f2 4: a -> b
            f3 4: b -> c
            g3 4: c -> gc
            g2 4: b gc -> gb
            g1 4: a gb -> gx
            """,
            sizes=_X | {"c": 2},
        ),
        4,
        24.0,
        (("a", 2, 3, 4, 5),),
    ),
    # g3 fills the budget with b c gc, and g2 needs a: its second in [16, 17) is exposed.
    Instance("swap exposed", build(_CHAIN.format(f1=4, op=4), sizes=_X), 3, 25.0, (("a", 2, 3, 4, 4),)),
    # The same with f1 = 0.5 s: 20.5 s of ops, and a second for a's return or half a second to run f1 again.
    Instance(
        "recompute beats swap",
        build(_CHAIN.format(f1=0.5, op=4), sizes=_X),
        3,
        21.5,
        (("a", 2, 3, 4, 4),),
        optimum_seconds=21.0,
    ),
    # f3 fills the budget with m n: s leaves in [3, 5), while f2 still reads it, just in time. f4 leaves room for 1
    # byte only, so s returns in [9, 11) before f5, which ends at 13.
    Instance(
        "skip used again in forward",
        build(
            """
            inference
            f1 3: x -> s
            f2 2: s -> m
            f3 2: m -> n
            f4 2: n -> k
            f5 2: s k -> y
            """,
            sizes=_X | {"s": 2, "m": 2, "n": 3},
        ),
        5,
        13.0,
        (("s", 1, 2, 4, 4),),
    ),
    # q fits beside a; r does not, and waits from 2 to 5 for a's copy. r to 6, s to 15, a returns to 19, t to 20.
    Instance(
        "release point",
        build(_RELEASE.format(mark="!random"), sizes=_X | {"a": 4, "b": 2, "c": 2}),
        6,
        20.0,
        (("a", 1, 2, 4, 4),),
    ),
    # The same without randomness: a is dropped and p, 1 s, is recomputed. 13 + 1.
    Instance(
        "release point, recomputable",
        build(_RELEASE.format(mark=""), sizes=_X | {"a": 4, "b": 2, "c": 2}),
        6,
        20.0,
        (("a", 1, 2, 4, 4),),
        optimum_seconds=14.0,
    ),
    # f4 (c m) and f5 (m k) fill the budget. b leaves in [5, 7) and a in [7, 9), both under f3; b's return in [17, 19)
    # and a's in [23, 25), for g2 has no room for it, are exposed: 25 + 4. Running f1 again instead of a's return: 28.
    Instance(
        "hybrid",
        build(_HYBRID, sizes=_X | {"a": 2, "b": 2, "m": 4}),
        5,
        29.0,
        (("b", 2, 3, 5, 5), ("a", 2, 3, 6, 6)),
        optimum_seconds=28.0,
    ),
    # In lane 2 bytes a second. q waits 2 s for a's copy out; a returns in [14, 15) for r; it leaves again at once, its
    # copy being good; it returns in [24, 25). 25 + 2 + 1 + 1; a second copy out would hold s up for 1 s more.
    Instance(
        "second return needs no second copy out",
        build(
            """
            inference
            p 4!random: x -> a
            q 4: x -> m
            q2 4: m -> k
            r 1: a k -> l
            s 4: l -> n
            s2 4: n -> o
            t 4: a o -> y
            """,
            sizes=_X | {"a": 2, "m": 4, "n": 4},
        ),
        5,
        29.0,
        (("a", 1, 1, 3, 3), ("a", None, 4, 6, 6)),
        machine=unit_machine(into=2.0),
    ),
    # f3 (c m) and g0 (m k) fill the budget. a leaves in [4, 7), b in [8, 10) under w, which reads it. b returns first,
    # [22, 24), exposed; a in [24, 27) under g1. 27 + 2; a first would make it 32.
    Instance(
        "order of returns",
        build(
            """
            inference
            f1 4!random: x -> a
            f2 4!random: x -> b
            w 4: b -> c
            f3 8: c -> m
            g0 2: m -> k
            g1 4: b k -> l
            g2 1: a l -> y
            """,
            sizes=_X | {"a": 3, "b": 2, "m": 6},
        ),
        7,
        29.0,
        (("b", 2, 3, 5, 5), ("a", 1, 3, 5, 6)),
    ),
    # d would hold v w s u = 2 + 2 + 1 + 2 = 7. v leaves in [5, 7) while n reads it, d waits 1 s; it returns in
    # [22, 24). 22 + 1 + 2. (Dropping s instead fails: n again holds v w s gw = 7.)
    Instance(
        "a recompute makes all outputs",
        build(
            """
            inference
            c 5: x -> v
            n 1: v -> w s
            d 5: w -> u
            e 5: u -> gu
            g 5: w gu -> gw
            h 1: v s gw -> gv
            """,
            sizes=_X | {"v": 2, "w": 2, "u": 2, "gw": 2},
        ),
        6,
        25.0,
        (("v", 1, 2, 5, 5),),
    ),
)
