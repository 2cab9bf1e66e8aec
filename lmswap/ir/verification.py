"""What has verification checked? The counts of one model, and the names of what it compares."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmswap.ir.bytesize import format_bytes


@dataclass
class Verified:
    """What was checked of one model so far; transfers are copies, each way one, blocks memory that was given up.

    ``num_plain_outputs`` and ``num_plain_gradients`` count what was compared with plain torch, of which
    ``rounded_otherwise`` names what differs as the report's note says; ``not_beside_plain`` says what was not compared
    with it, and why. ``unrepeatable`` names results that were not compared, since the step without swaps does not
    repeat them either; ``num_differences`` counts results and transfers that were not what they should have been.
    ``may_go_another_way``: the model's code asks whether it is compiled, and only what it does then was compared.
    """

    model: str
    num_runs: int = 0  # of a graph, forward or backward, with and without swaps
    num_outputs: int = 0
    num_gradients: int = 0
    num_plain_outputs: int = 0
    num_plain_gradients: int = 0
    num_saved: int = 0  # tensors as the backward took them back, under saved-tensor hooks
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
        """Whether anything was compared and any bytes were moved: else nothing is known of swapping."""
        return bool(self.num_outputs + self.num_gradients + self.num_saved) and bool(self.num_transfers)

    def __str__(self) -> str:
        text = (
            f"{self.num_runs} graph runs with and without swaps: {self.num_outputs} outputs and "
            f"{self.num_gradients} gradients compared to the bit, and {self.num_plain_outputs} and "
            f"{self.num_plain_gradients} with those of plain torch; {self.num_saved} saved tensors compared to the bit "
            f"as they came back; {self.num_transfers} transfers checksummed at both ends, "
            f"{format_bytes(self.transferred_bytes)}; {self.num_poisoned} blocks poisoned; "
            f"{self.num_differences} differences"
        )
        if self.unrepeatable:
            text += f"; not compared, since it differs without swaps too: {'; '.join(self.unrepeatable)}"
        if self.rounded_otherwise:
            text += f"; rounded otherwise than by plain torch, see the notes: {'; '.join(self.rounded_otherwise)}"
        if self.not_beside_plain:
            text += f"; not compared with plain torch: {'; '.join(self.not_beside_plain)}"
        if self.may_go_another_way:
            text += "; only what its code does when it is compiled was compared, see the notes"
        return text


@dataclass(frozen=True)
class Result:
    """One value that a graph hands to its caller: what people call it, the op that makes it, and what feeds that op."""

    name: str  # "output 0", "gradient of encoder.0.weight"
    op: str
    source: str  # the user's own line
    moved: tuple[str, ...]  # buffers that were swapped or made again, the nearest first
