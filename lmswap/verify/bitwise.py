"""Bitwise comparison of results: NaN equals NaN of the same payload, and 0.0 differs from -0.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmswap.runtime.rng import rng_states
from lmswap.verify.summary import Result, Verified

_COMPARED_BYTES = 2**24  # compared at once: a comparison takes as much memory


@dataclass(frozen=True)
class Difference:
    """``first``: index of the first differing element, and both values there; ``is_nan``: one of these is NaN."""

    num_differing: int
    num_elements: int
    first: str
    is_nan: bool = False


class Comparator:
    """Compares results of one function with those of its reference, except those that the reference does not repeat.

    These are found when they differ, and named in ``verified``.
    """

    def __init__(self, verified: Verified, label: str) -> None:
        """``label``: format of the names in ``verified``, of a `Result` ``result``."""
        self._verified, self._label = verified, label
        self.unrepeatable: set[str] = set()  # names of results

    def differences(
        self,
        results: Sequence[Result],
        expected: Sequence[Any],
        actual: Sequence[Any],
        repeat: Callable[[], Sequence[Any]],
    ) -> dict[Result, Difference]:
        """Return the results that differ.

        Args:
            results: describe the values.
            expected: the values of the reference.
            actual: the values to be checked.
            repeat: runs the reference from the same inputs and RNG state, and returns its values.
        """
        found = _differences(results, expected, actual)
        if not {result.name for result in found} <= self.unrepeatable:
            for result in _differences(results, repeat(), repeat()):
                self.unrepeatable.add(result.name)
                if (text := self._label.format(result=result)) not in self._verified.unrepeatable:
                    self._verified.unrepeatable.append(text)
        return {result: differs for result, differs in found.items() if result.name not in self.unrepeatable}


def effects(outputs: Sequence[Any], inputs: Sequence[Any], written: Sequence[int], device: torch.device) -> list[Any]:
    """Return what a call has changed, as described by `effect_results`: outputs, written inputs, and RNG states.

    Args:
        outputs: what it returned.
        inputs: its arguments, after it.
        written: the positions of the inputs that it writes in place.
        device: on which it ran.
    """
    return [*outputs, *(inputs[position] for position in written), *rng_states(device)]


def effect_results(
    outputs: Sequence[Result], inputs: Sequence[str], written: Sequence[int], device: torch.device
) -> list[Result]:
    """Return descriptions of the values of `effects`; ``inputs`` are names."""
    named = [Result(f"input {inputs[position]} (written in place)") for position in written]
    return [*outputs, *named, *[Result("the random generator's state")] * len(rng_states(device))]


def bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype, shape and device are bitwise identical."""
    a, b = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    if a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense(a):
        a, b = _bytes(a), _bytes(b)
    else:
        a, b = _element_bytes(a), _element_bytes(b)
    starts = range(0, len(a), _COMPARED_BYTES)
    return all(torch.equal(a[i : i + _COMPARED_BYTES], b[i : i + _COMPARED_BYTES]) for i in starts)


def difference(expected: Any, actual: Any) -> Difference | None:
    """Return how ``actual`` differs from ``expected``, or None if they are bitwise identical.

    Tensors are compared with dtype, shape and device; other objects by type and equality.
    """
    if not (isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)):
        return None if type(expected) is type(actual) and expected == actual else _differ_in_kind(expected, actual)
    if (expected.dtype, expected.shape, expected.device) != (actual.dtype, actual.shape, actual.device):
        return _differ_in_kind(_kind(expected), _kind(actual))
    if bitwise_equal(expected, actual):
        return None
    differs = (_element_bytes(expected) != _element_bytes(actual)).view(-1, expected.element_size()).any(1)
    place = int(differs.nonzero()[0])
    values = [tensor.detach().reshape(-1)[place] for tensor in (expected, actual)]
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)]
    first = f"first at {index}: {values[0].item()!r} without, {values[1].item()!r} with"
    is_nan = any(bool(value.isnan()) for value in values)
    return Difference(int(differs.sum()), expected.numel(), first, is_nan)


def _differences(results: Sequence[Result], expected: Sequence[Any], actual: Sequence[Any]) -> dict[Result, Difference]:
    found = ((result, difference(*values)) for result, *values in zip(results, expected, actual, strict=True))
    return {result: differs for result, differs in found if differs is not None}


def _element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements of ``tensor``, in order."""
    return _bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _differ_in_kind(expected: Any, actual: Any) -> Difference:
    return Difference(1, 1, f"{expected} without, {actual} with")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
