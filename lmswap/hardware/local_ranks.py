"""Communication between the ranks of one machine through the rendezvous store of torch.distributed.

No collective is issued and no process group is created: either would need the same order on all ranks, among those of
the program. A rank waits only for what another has committed to by calling `lmswap.enable`, or is computing; a wait
ends with an error after the store's timeout.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from lmswap.errors import OptionError, RankMissing, TierError

_POLL_SECONDS = 0.01  # the store's own wait would block other threads


# Variables in which torchrun, srun and mpirun report the number of processes on each machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def num_local_processes() -> int:
    """Number of processes of this machine that train together and share its memory, as the launcher reports it.

    Raises:
        OptionError: a launcher's variable is not a number of processes.
    """
    return next(filter(None, map(_local_size, _LOCAL_SIZES)), 1)


def may_have_local_ranks() -> bool:
    """Whether several processes train together, and no launcher reports how many are on this machine."""
    from torch import distributed

    from lmswap.torch_compat.process_groups import is_distributed

    if not is_distributed() or any(map(_local_size, _LOCAL_SIZES)):
        return False
    return distributed.get_world_size() > 1


class LocalRanks:
    """The ranks of this machine at one call of `lmswap.enable`; the n-th calls of all ranks belong together."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        """``rank`` is this process's number among the machine's ``count``; ``store`` is their torch `Store`."""
        self.rank, self.count = rank, count
        self._store, self._call = store, store.add(f"calls of {rank}", 1)
        self._seconds = store.timeout.total_seconds()
        self._claims: dict[str, bool] = {}  # whether they succeeded

    @staticmethod
    def here() -> LocalRanks | None:
        """The ranks that torchrun started here and torch.distributed has joined; None if this is the only one.

        Raises:
            OptionError: the launcher's variables are not numbers, or not ranks of this machine.
        """
        from torch import distributed

        from lmswap.torch_compat.process_groups import default_store, is_distributed

        count, rank = num_local_processes(), _variable("LOCAL_RANK")
        if count == 1 or rank is None or not is_distributed():
            return None
        if rank >= count:
            raise OptionError(f"LOCAL_RANK is {rank}, and the ranks of this machine are 0 to {count - 1}")
        store = default_store()
        group = _variable("GROUP_RANK")  # launchers other than torchrun may not number the machines
        machine = socket.gethostname() if group is None else group
        return LocalRanks(distributed.distributed_c10d.PrefixStore(f"lmswap/{machine}", store), rank, count)

    def gather(self, what: str, find: Callable[[], str], *, in_turn: bool = False) -> list[str]:
        """Runs ``find`` on each rank and returns all results, by rank; an error of one is raised on all.

        Args:
            what: key of the exchange.
            find: computes this rank's result.
            in_turn: run on one rank after the other.

        Raises:
            RankMissing: a rank does not respond in time.
            TierError: another rank failed.
        """
        if in_turn and self.rank:
            self._await(what, [self.rank - 1])
        outcome, error = {"found": ""}, None
        try:
            outcome["found"] = find()
        except BaseException as raised:
            outcome["error"], error = str(raised) or type(raised).__name__, raised
        self._store.set(self._key(what, self.rank), json.dumps(outcome))
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt does not wait for the others
        self._await(what, range(self.count))
        found = [json.loads(self._store.get(self._key(what, rank))) for rank in range(self.count)]
        if error is not None:
            raise error
        for rank, other in enumerate(found):
            if "error" in other:
                raise TierError(f"rank {rank} of this machine: {other['error']}")
        return [str(other["found"]) for other in found]

    def compute_once(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Runs ``make`` on the first rank that calls; other ranks and calls get its result. Empty if it failed.

        Raises:
            RankMissing: the result does not come in time.
        """
        if (known := self.fetch(what)) is not None:
            return known
        if not self.claim(what):
            self._await(what, ["made"])
            return bytes(self._store.get(self._key(what, "made")))
        made = b""
        try:
            made = make()
        finally:
            self.publish(what, made)
        return made

    def claim(self, what: str) -> bool:
        """Claims ``what`` for this rank, which then has to `publish` it; False if another rank was first, for good."""
        if what not in self._claims:
            self._claims[what] = bool(self._store.add(self._key(what, "claims"), 1) == 1)
        return self._claims[what]

    def publish(self, what: str, made: bytes) -> None:
        """Publishes a result to the other ranks."""
        self._store.set(self._key(what, "made"), made)

    def fetch(self, what: str) -> bytes | None:
        """The published result; None if there is none yet."""
        key = self._key(what, "made")
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _await(self, what: str, parts: Iterable[int | str]) -> None:
        deadline = time.monotonic() + self._seconds
        for part in parts:
            while not self._store.check([self._key(what, part)]):
                if time.monotonic() > deadline:
                    raise RankMissing(rank=self.rank, awaited=part, what=what, seconds=self._seconds)
                time.sleep(_POLL_SECONDS)

    def _key(self, what: str, part: int | str) -> str:
        return f"{self._call}/{what}/{part}"


def _variable(name: str) -> int | None:
    """The number in an environment variable; None if it is unset or empty."""
    found = os.environ.get(name, "")
    if not found:
        return None
    if not re.fullmatch("[0-9]{1,9}", found):
        raise OptionError(f"the environment variable {name} is {found!r}: a launcher sets it to a whole number")
    return int(found)


def _local_size(name: str) -> int | None:
    count = _variable(name)
    if count == 0:
        raise OptionError(f"the environment variable {name} is 0: it counts this process, too")
    return count
