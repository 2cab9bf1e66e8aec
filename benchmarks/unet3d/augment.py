"""The 48 symmetries of a cube, which the case study draws from to show a network each subject in every position."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations

from torch import Tensor


@dataclass(frozen=True)
class Symmetry:
    """A way to put a cube back into its place: its axes in another order, and some of them turned round after that."""

    axes: tuple[int, ...]
    flipped: tuple[int, ...]

    def apply(self, cube: Tensor) -> Tensor:
        """Moves (..., n, n, n) in its last three axes; the result lies in memory in the usual order."""
        first = cube.ndim - 3
        turned = cube.permute(*range(first), *(first + axis for axis in self.axes))
        return turned.flip([first + axis for axis in self.flipped]).contiguous()


SYMMETRIES = tuple(
    Symmetry(axes, flipped)
    for axes in permutations(range(3))
    for count in range(4)
    for flipped in combinations(range(3), count)
)
UNMOVED = 0  # the index of the symmetry that changes nothing
