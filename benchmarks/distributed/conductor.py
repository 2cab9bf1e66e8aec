"""Alternation of groups of ranks, each started by its own torchrun, by a store of the process that started them.

A group reports there that it waits for its next turn; its starter reports when that has come.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from torch import distributed

from benchmarks.distributed.launch import Launcher, RanksFailed
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.results import Results, join
from benchmarks.turns import take_turns

_POLL_SECONDS = 0.02
_TIMEOUT = timedelta(minutes=10)  # of a turn of all groups


class Turns:
    """A group's side: `wait` returns on all of its ranks when its next turn has come."""

    def __init__(self, ranks: Ranks, port: int | None) -> None:
        """``port`` is that of the store on this machine; None: there are no others, it is always this one's turn."""
        has_store = port is not None and ranks.rank == 0
        self._store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT) if has_store else None
        self._number = 0

    def tell_budget(self, nbytes: int) -> None:
        """Reports the budget of each rank, in bytes; to be called before the first turn."""
        if self._store is not None:
            self._store.set("budget", str(nbytes))

    def wait(self) -> None:
        """Waits for the next turn without occupying a core."""
        if self._store is not None:
            self._store.set(f"waits {self._number}", "")
            self._store.wait([f"turn {self._number}"])
            self._number += 1
        distributed.barrier()


class Group:
    """The side of who started it: a torchrun that has warmed up, and waits. To be used in a ``with`` statement."""

    def __init__(self, launcher: Launcher, recipe: str, ranks: int, options: Sequence[str]) -> None:
        """Start ``recipe`` on ``ranks`` processes of this machine, with its ``options`` of the command line."""
        self._what = f"{recipe} on {ranks} rank(s)"
        self._folder = tempfile.TemporaryDirectory()
        self._record = Path(self._folder.name) / "results.json"
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = launcher.command(recipe, ranks, [*options, "--turns-port", str(self._store.port)], self._record)
        self._process = subprocess.Popen(command, env=launcher.environment())
        self._number = 0

    def __enter__(self) -> Group:
        """Waits until it has warmed up.

        Raises:
            RanksFailed: one of the ranks did not.
        """
        self._await_it()
        if self.has_ended:
            self.__exit__()
            self.results()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()

    @property
    def has_ended(self) -> bool:
        """Whether the group has reported its results or failed."""
        return self._process.poll() is not None

    @property
    def budget_bytes(self) -> int:
        """Budget in bytes of each rank, known once the group has warmed up."""
        return int(self._store.get("budget"))

    def take_turn(self) -> None:
        """Lets the group take one turn and waits for its end; no effect if the group has ended."""
        if not self.has_ended:
            self._store.set(f"turn {self._number}", "")
            self._number += 1
            self._await_it()

    def results(self) -> Results:
        """What it found.

        Raises:
            RanksFailed: one of the ranks did not finish.
        """
        if self._process.wait():
            raise RanksFailed(f"{self._what} did not finish; why is said above, by rank")
        return Results.read(self._record)

    def _await_it(self) -> None:
        while not self.has_ended and not self._store.check([f"waits {self._number}"]):
            time.sleep(_POLL_SECONDS)


def compare_in_turns(
    launcher: Launcher, models: Sequence[str], ranks: Sequence[int], options: Sequence[str]
) -> Iterator[Results]:
    """Measures each model's efficiency on all numbers of ranks, of which one computes at a time.

    A budget that is a share is one of what the first of them take, and the same bytes for the others: more ranks hold
    more, and steps compare where budgets do.

    Args:
        launcher: starts the processes.
        models: names of models of the recipe `efficiency`.
        ranks: the numbers of ranks, which take their steps in turn.
        options: of the recipe's command line.

    Yields:
        The joined results of each model.

    Raises:
        RanksFailed: some did not finish.
    """
    for model in models:
        with ExitStack() as running:
            given = [*options, "--model", model]
            groups: list[Group] = []
            for num in ranks:
                same = ["--budget", f"{groups[0].budget_bytes} B"] if groups else []
                groups.append(running.enter_context(Group(launcher, "efficiency", num, [*given, *same])))
            take_turns(groups)
            yield join([group.results() for group in groups])
