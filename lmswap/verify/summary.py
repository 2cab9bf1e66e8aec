"""Counts of what verification has compared for one model, and the names of compared results."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmswap.ir.bytesize import format_bytes


@dataclass
class Verified:
    """What was checked of one model so far; transfers are copies, one each way, blocks released memory.

    ``num_plain_outputs`` and ``num_plain_gradients`` count results compared with eager torch; ``rounded_otherwise``
    names those that differ by tracing, as the report notes; ``not_beside_plain`` names what was not compared with it,
    and why. ``unrepeatable`` names results that were not compared, since they are not reproducible without swaps
    either; ``num_differences`` counts results and transfers that differ. ``may_go_another_way``: the model's code
    checks whether it is compiled, and only its compiled branch was compared.
    """

    model: str
    num_runs: int = 0  # of a graph, forward or backward, with and without swaps
    num_outputs: int = 0
    num_gradients: int = 0
    num_plain_outputs: int = 0
    num_plain_gradients: int = 0
    num_saved: int = 0  # tensors as unpacked by the backward, under saved-tensor hooks
    num_transfers: int = 0
    transferred_bytes: int = 0
    num_poisoned: int = 0
    poisoned_bytes: int = 0
    num_differences: int = 0
    unrepeatable: list[str] = field(default_factory=list)
    rounded_otherwise: list[str] = field(default_factory=list)
    not_beside_plain: list[str] = field(default_factory=list)
    may_go_another_way: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether anything was compared and any bytes were transferred: else swapping was not verified."""
        return bool(self.num_outputs + self.num_gradients + self.num_saved) and bool(self.num_transfers)

    def __str__(self) -> str:
        text = (
            f"{self.num_runs} graph runs with and without swaps: {self.num_outputs} outputs and "
            f"{self.num_gradients} gradients compared bitwise, and {self.num_plain_outputs} and "
            f"{self.num_plain_gradients} with those of plain torch; {self.num_saved} saved tensors compared bitwise "
            f"when unpacked; {self.num_transfers} transfers checksummed at both ends, "
            f"{format_bytes(self.transferred_bytes)}; {self.num_poisoned} blocks poisoned; "
            f"{self.num_differences} differences"
        )
        if self.unrepeatable:
            text += f"; not compared, since it differs without swaps too: {'; '.join(self.unrepeatable)}"
        if self.rounded_otherwise:
            text += f"; rounded differently from plain torch, see the notes: {'; '.join(self.rounded_otherwise)}"
        if self.not_beside_plain:
            text += f"; not compared with plain torch: {'; '.join(self.not_beside_plain)}"
        if self.may_go_another_way:
            text += "; only what its code does when it is compiled was compared, see the notes"
        return text


@dataclass(frozen=True)
class Result:
    """One compared value: its name in messages, the op that makes it, and swapped inputs of that op."""

    name: str  # "output 0", "the gradient of encoder.0.weight"
    op: str = "its graph"
    source: str = ""  # the user's own line
    moved: tuple[str, ...] = ()  # buffers that were swapped or recomputed, the nearest first

    @property
    def made_by(self) -> str:
        """The op and the user's line, for messages."""
        return self.op + (f" ({self.source})" if self.source else "")
