"""Prices that maximize the bound: the dual of planning as a linear program, in which similar versions are merged."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from lmswap.planner.bound.dual import BufferVersions, Dual, Floats, Ints, Prices

# Of similar versions; the smallest are left out. With 80 the program takes two to four times as long (ResNet-50: 0.4
# to 0.8 s of a second for planning), and on the U-Nets, ResNet-50, GPT and ViT it proves no more.
_MAX_CLASSES = 40
# Each layer's weights idle at other cuts: where fewer classes leave most of them out, the bound of a cyclic step is the
# sum of its ops (14 B parameters, 36 cuts, 40 classes).
_MAX_CYCLIC_CLASSES = 400
_SIMILARITY = 0.03  # versions are similar if they idle at the same cuts, at seconds per byte within about this share


def best_prices(dual: Dual, budget_bytes: int) -> Prices:
    """Prices that nearly maximize ``dual.bound``, which is valid for any prices."""
    return _PriceProgram(dual, float(max(budget_bytes, 1))).solve()


def _merged(versions: BufferVersions, max_classes: int) -> BufferVersions:
    """Similar versions merged, the largest ``max_classes`` of them."""
    costs = np.stack([versions.nbytes, versions.out_seconds, versions.in_seconds, versions.recompute_seconds], axis=1)
    rates = np.log(np.maximum(costs[:, 1:] / costs[:, :1], 1e-30)) / _SIMILARITY
    rates = np.where(np.isinf(rates), 2.0**30, np.rint(rates))
    key = np.column_stack([versions.made_in, versions.is_idle, versions.continues, rates]).astype(np.int64)
    _, member, kind = np.unique(key, axis=0, return_index=True, return_inverse=True)
    total = np.zeros((len(member), costs.shape[1]))
    np.add.at(total, kind.ravel(), costs)
    largest = np.argsort(-total[:, 0], kind="stable")[:max_classes]
    shown = member[largest]
    return BufferVersions(
        versions.made_in[shown], versions.is_idle[shown], versions.continues[shown], *total[largest].T
    )


class _PriceProgram:
    """Maximise gain · x subject to rows · x ≤ limits and 0 ≤ x ≤ most.

    Seconds are in units of the step's compute, bytes in units of the budget. Besides the prices, x has the cost-to-go
    of `Dual` by version and zone or cut; rows bound it by each choice.
    """

    def __init__(self, dual: Dual, byte_unit: float) -> None:
        self._dual, self._byte_unit = dual, byte_unit
        self._second_unit = float(dual.zone_seconds.sum() + dual.cut_seconds.sum()) or 1.0
        self._versions = _merged(dual.versions, _MAX_CYCLIC_CLASSES if dual.is_cyclic else _MAX_CLASSES)
        self._num_variables = 0
        self._num_rows = 0
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._limits: list[Floats] = []
        cuts, zones, kinds = len(dual.idle_budget_bytes), len(dual.zone_seconds), len(self._versions.nbytes)
        self._memory, self._out, self._into, self._run = map(self._variables, (cuts, zones, zones, zones))
        self._out_at_cut, self._in_at_cut, self._run_at_cut = map(self._variables, (cuts, cuts, cuts))
        # At a step's end memory costs nothing, and no copy is under way: a price of them there is no limit.
        self._at_end = self._variables(3, int(dual.is_cyclic))
        self._cost_to_go = [self._variables(kinds, self._versions.is_idle.shape[1] + 1) for _ in range(4)]

    def _variables(self, *shape: int) -> Ints:
        start = self._num_variables
        self._num_variables += int(np.prod(shape))
        return np.arange(start, self._num_variables).reshape(shape)

    def _limit(self, *terms: tuple[Ints, Floats | float], limit: Floats | float = 0.0) -> None:
        """Adds rows Σ coefficient · variable ≤ limit, one for each entry of the terms' arrays."""
        count = len(terms[0][0])
        rows = np.arange(self._num_rows, self._num_rows + count)
        self._entries += [(rows, columns, np.broadcast_to(values, count)) for columns, values in terms]
        self._limits.append(np.broadcast_to(limit, count))
        self._num_rows += count

    def solve(self) -> Prices:
        self._limit_run(self._out, self._into, self._run)
        self._limit_run(self._out_at_cut, self._in_at_cut, self._run_at_cut)
        self._limit_versions()
        most, values = self._max(), np.zeros(self._num_variables)
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        # What is 0 anyway is left out: at a cyclic step of 955 ops four of five variables, and 10 of 23 MiB.
        counts = (most[column] > 0) & (value != 0)
        rows, row = np.unique(row[counts], return_inverse=True)
        columns, column = np.unique(column[counts], return_inverse=True)
        found = linprog(
            -self._gain()[columns],
            A_ub=csr_array((value[counts], (row, column)), shape=(len(rows), len(columns))),
            b_ub=np.concatenate(self._limits)[rows],
            bounds=np.column_stack([np.zeros(len(columns)), most[columns]]),
            method="highs-ds",
        )
        if found.x is not None:
            values[columns] = found.x
        return self._prices(values)

    def _limit_run(self, out: Ints, into: Ints, run: Ints) -> None:
        """See `Dual`: what a second of compute costs at most, beside copies both ways."""
        link = self._dual.link
        self._limit((out, 1.0), (into, link.both_rate - 1), (run, link.compute_factor), limit=1.0)
        if link.both_rate < 2:
            self._limit((out, link.both_rate - 1), (into, 1.0), (run, link.compute_factor), limit=1.0)

    def _gain(self) -> Floats:
        """The bound. A lane's price at the op of a cut is not concave: that of an adjacent zone is no less."""
        dual, gain = self._dual, np.zeros(self._num_variables)
        gain[self._run] = dual.zone_seconds / self._second_unit
        gain[self._run_at_cut] = dual.cut_seconds / self._second_unit
        gain[self._memory] = -dual.idle_budget_bytes / self._byte_unit
        resident = self._cost_to_go[0]
        gain[resident[np.arange(len(resident)), self._versions.made_in]] = 1.0
        return gain

    def _max(self) -> Floats:
        """Upper bounds: the price of compute is at most 1; the cost-to-go of a version after its last idle cut is 0."""
        most, idle = np.full(self._num_variables, np.inf), self._versions.is_idle
        most[self._run] = most[self._run_at_cut] = 1.0
        most[self._at_end[0]] = 0.0
        later = np.logical_or.accumulate(idle[:, ::-1], axis=1)[:, ::-1]
        is_over = np.column_stack([~later, np.ones(len(idle), bool)])
        for here in self._cost_to_go[:2]:
            most[here[is_over]] = 0.0
        return most

    def _limit_versions(self) -> None:
        """See `Dual`: the cost-to-go, resident from a zone or non-resident from a cut, is at most any choice's."""
        of, resident, with_copy, dropped, copied = self._versions, *self._cost_to_go
        nbytes = of.nbytes / self._byte_unit
        out_seconds, in_seconds, recompute_seconds = (
            each / self._second_unit for each in (of.out_seconds, of.in_seconds, of.recompute_seconds)
        )
        at_cut = (self._memory, self._out_at_cut, self._in_at_cut)
        memory, out_at_cut, in_at_cut = map(self._dual.by_cut, at_cut, self._at_end)
        out, into, run = map(self._dual.by_zone, (self._out, self._into, self._run))
        exists = np.arange(of.is_idle.shape[1]) >= of.made_in[:, None]
        swappable, repeatable = np.isfinite(of.out_seconds)[:, None], np.isfinite(of.recompute_seconds)[:, None]
        for here in (resident, with_copy):
            row, cut = np.nonzero(exists & ~of.is_idle)
            self._limit((here[row, cut], 1.0), (here[row, cut + 1], -1.0))
            row, cut = np.nonzero(of.is_idle)
            self._limit((here[row, cut], 1.0), (here[row, cut + 1], -1.0), (memory[cut], -nbytes[row]))
            row, cut = np.nonzero(of.is_idle & repeatable)
            self._limit((here[row, cut], 1.0), (dropped[row, cut], -1.0))
        row, cut = np.nonzero(exists & swappable)
        self._limit((resident[row, cut], 1.0), (with_copy[row, cut], -1.0), (out[cut], -out_seconds[row]))
        held = np.where(of.is_idle[row, cut], nbytes[row], 0.0)
        across = (out_at_cut[cut], -out_seconds[row])
        self._limit((resident[row, cut], 1.0), (with_copy[row, cut + 1], -1.0), across, (memory[cut], -held))
        row, cut = np.nonzero(of.continues & swappable)
        across = (in_at_cut[cut + 1], -in_seconds[row])
        self._limit((copied[row, cut], 1.0), (with_copy[row, cut + 2], -1.0), across, (memory[cut + 1], -nbytes[row]))
        row, cut = np.nonzero(of.is_idle & swappable)
        self._limit((with_copy[row, cut], 1.0), (copied[row, cut], -1.0))
        self._limit((copied[row, cut], 1.0), (with_copy[row, cut + 1], -1.0), (into[cut + 1], -in_seconds[row]))
        row, cut = np.nonzero(of.is_idle & repeatable)
        again = (run[cut + 1], -recompute_seconds[row])
        self._limit((dropped[row, cut], 1.0), (resident[row, cut + 1], -1.0), again)
        for absent, possible in ((dropped, repeatable), (copied, swappable)):
            row, cut = np.nonzero(of.continues & possible)
            self._limit((absent[row, cut], 1.0), (absent[row, cut + 1], -1.0))

    def _prices(self, found: Floats) -> Prices:
        """Undoes the units, and removes the solver's tolerance outside the limits or just above 0."""
        memory, out, into = (np.maximum(found[each].round(9), 0.0) for each in (self._memory, self._out, self._into))
        share = self._dual.link.both_rate - 1
        out = np.minimum(out, 1.0)
        into = np.minimum(into, np.where(out * (1 + share) > 1, (1.0 - out) / max(share, 1e-9), 1.0 - share * out))
        return Prices(memory * (self._second_unit / self._byte_unit), out, into)
