"""How do the ranks of one machine tell each other what they found? Through the store that torch.distributed met in.

No collective is issued and no process group is made: either would have to come in the same order on all ranks, between
those of the program. What one rank waits for is what another has already promised by calling `lmswap.enable`, or what
it is making; a wait ends with an error after the store's own timeout.
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

_POLL_SECONDS = 0.01  # a wait of the store's own would keep other threads from it


# What torchrun, srun and mpirun call the number of processes that they start on each machine.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def num_local_processes() -> int:
    """How many processes of this machine train together, and share its memory: what their launcher tells each.

    Raises:
        OptionError: a launcher's variable is no number of processes.
    """
    return next(filter(None, map(_local_size, _LOCAL_SIZES)), 1)


def may_have_neighbours() -> bool:
    """Whether several processes train together, and no launcher says how many of them are on this machine."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or any(map(_local_size, _LOCAL_SIZES)):
        return False
    return distributed.get_world_size() > 1


class LocalRanks:
    """The ranks of this machine at one of their calls of `lmswap.enable`; the first calls of all belong together."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        """``rank`` is this one's number among the ``count`` of the machine; ``store``, a `Store` of torch's, theirs."""
        self.rank, self.count = rank, count
        self._store, self._call = store, store.add(f"calls of {rank}", 1)
        self._seconds = store.timeout.total_seconds()

    @staticmethod
    def here() -> LocalRanks | None:
        """The ranks that torchrun started here and torch.distributed has joined; None if this is the only one.

        Raises:
            OptionError: the launcher's variables are no numbers, or no ranks of this machine.
        """
        from torch import distributed

        count, rank = num_local_processes(), _told("LOCAL_RANK")
        if count == 1 or rank is None or not (distributed.is_available() and distributed.is_initialized()):
            return None
        if rank >= count:
            raise OptionError(f"LOCAL_RANK is {rank}, and the ranks of this machine are 0 to {count - 1}")
        store: Any = distributed.distributed_c10d._get_default_store()
        told = _told("GROUP_RANK")  # a launcher that is not torchrun may not say which machine this is
        machine = socket.gethostname() if told is None else told
        return LocalRanks(distributed.distributed_c10d.PrefixStore(f"lmswap/{machine}", store), rank, count)

    def gather(self, what: str, find: Callable[[], str], *, in_turn: bool = False) -> list[str]:
        """What each of them finds, by rank; one after the other, if ``in_turn``. An error of one is raised by all.

        Raises:
            RankMissing: one of them does not come.
            TierError: another one failed.
        """
        if in_turn and self.rank:
            self._await(what, [self.rank - 1])
        told, error = {"found": ""}, None
        try:
            told["found"] = find()
        except BaseException as raised:
            told["error"], error = str(raised) or type(raised).__name__, raised
        self._store.set(self._key(what, self.rank), json.dumps(told))
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
        """What the first of them that asks makes; the others wait for it. Empty if that one failed.

        Raises:
            RankMissing: it has not made it in time.
        """
        if not self.is_first(what):
            self._await(what, ["made"])
            return bytes(self._store.get(self._key(what, "made")))
        made = b""
        try:
            made = make()
        finally:
            self.publish(what, made)
        return made

    def is_first(self, what: str) -> bool:
        """Whether none of them has asked this before: it is this one's to make, and to `publish`."""
        return bool(self._store.add(self._key(what, "asked"), 1) == 1)

    def publish(self, what: str, made: bytes) -> None:
        """Tells the others what this one has made."""
        self._store.set(self._key(what, "made"), made)

    def fetch(self, what: str) -> bytes | None:
        """What one of them has made by now, if it has."""
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


def _told(name: str) -> int | None:
    """The number in an environment variable; None if it is not set, or empty."""
    found = os.environ.get(name, "")
    if not found:
        return None
    if not re.fullmatch("[0-9]{1,9}", found):
        raise OptionError(f"the environment variable {name} is {found!r}: a launcher sets it to a whole number")
    return int(found)


def _local_size(name: str) -> int | None:
    count = _told(name)
    if count == 0:
        raise OptionError(f"the environment variable {name} is 0: it counts this process, too")
    return count
