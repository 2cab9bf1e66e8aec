"""The network between the ranks of a training and to their hosts, given as JSON or by name. Schema `SCHEMA`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial

from lmswap.errors import OptionError
from lmswap.ir.json_io import from_fields, read_record
from lmswap.ir.machine import Rate

SCHEMA = "lmswap.network/2"
ALGORITHMS = ("ring", "hierarchical")


@dataclass(frozen=True)
class Network:
    """Nodes of ``ranks_per_node`` ranks, of which the first fills up before the next is used.

    ``within_node`` is the rate of one rank to another of its node, ``between_nodes`` that of a whole node to another,
    None if there is one node only; each while as much is received. ``ranks_per_host_link`` ranks swap over one
    link to the host. ``algorithm``, one of `ALGORITHMS`, is that of the all-reduce: see `ranks`.

    ``busy_factor`` is the share of its rate that an all-reduce keeps while devices compute, ``compute_factor`` the
    share of its speed that compute keeps meanwhile: sums take cores of a CPU, or multiprocessors of a GPU.
    """

    name: str
    ranks_per_node: int
    ranks_per_host_link: int
    algorithm: str
    within_node: Rate
    between_nodes: Rate | None
    busy_factor: float = 1.0
    compute_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise OptionError(f"unknown all-reduce algorithm {self.algorithm!r}; known are {', '.join(ALGORITHMS)}")
        if not 1 <= self.ranks_per_host_link <= self.ranks_per_node:
            raise OptionError(
                f"ranks_per_host_link must be 1 to ranks_per_node, got {self.ranks_per_host_link} of "
                f"{self.ranks_per_node}"
            )
        for name in ("busy_factor", "compute_factor"):
            factor = getattr(self, name)
            if not 0 < factor <= 1:
                raise OptionError(f"{name} must be more than 0 and at most 1, got {factor}")

    def to_json(self) -> str:
        """The network description as JSON text; `from_json` reads it back equal."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Network:
        """Reads what `to_json` or a person wrote.

        Raises:
            OptionError: not JSON, of another schema, or a field is missing or not a number.
        """
        return read_record(text, SCHEMA, partial(from_fields, Network), "network description")


# Published rates. Neither latencies nor the contention of sums and compute were published with them, so they are left
# out: all-reduces of small buckets take longer.
PRESETS = {
    # IBM's case study: 4 GPUs a node, each with an NVLink 2.0 to the host, which is also the way to the GPUs of the
    # other socket (GPU→host, Table 6: 60.4 GB/s, measured), and 100 Gb/s InfiniBand (Table 7: on paper).
    "ac922": Network(
        "AC922, NVLink 2.0, 100 Gb/s InfiniBand",
        ranks_per_node=4,
        ranks_per_host_link=1,
        algorithm="hierarchical",
        within_node=Rate.constant(60.4e9),
        between_nodes=Rate.constant(12.5e9),
    ),
    # IBM's case study: 8 GPUs, two on a bus of PCIe gen3 (host→GPU while both copy, Table 4: 7.6 GB/s, measured).
    "x86": Network(
        "x86, PCIe gen3, two GPUs a bus",
        ranks_per_node=8,
        ranks_per_host_link=2,
        algorithm="ring",
        within_node=Rate.constant(7.6e9),
        between_nodes=None,
    ),
}
