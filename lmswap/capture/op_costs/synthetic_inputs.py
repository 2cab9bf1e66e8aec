"""Synthetic inputs for timing ops: tensors with the dtypes, shapes and strides of the trace.

Floats are from 0 to 1 (valid as probabilities: a GPU kernel's failed assertion makes every later call of the process
fail), integers zero (valid as indices), booleans random, except that a single one is true, as it may be asserted. Where
ops return tensors on another device than traced, examples are there, too: backward kernels of attention dereference the
address of a seed that a trace has on the GPU and the forward returns on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from lmswap.capture.lower import is_extension_op
from lmswap.runtime.codegen import is_projection, value_of
from lmswap.torch_compat.operators import schema_of
from lmswap.torch_compat.pytree import tensors, tree_map_only
from lmswap.torch_compat.tensors import storage_id

_PATTERN = 2**16


def has_no_tensor_results(node: fx.Node) -> bool:
    """Return whether an op neither makes nor writes tensors: it depends on the values of its inputs only."""
    is_mutable = is_extension_op(node) or getattr(schema_of(node.target), "is_mutable", False)
    return not is_mutable and not tensors(node.meta.get("val"))


def seed_ops(node: fx.Node) -> list[fx.Node]:
    """Return the random ops of the same graph whose integer results, RNG seeds, ``node`` reads."""
    makers = []
    for given in node.all_input_nodes:
        maker = given.args[0] if is_projection(given) else given
        is_integer = any(not (t.is_floating_point() or t.is_complex()) for t in tensors(given.meta.get("val")))
        if isinstance(maker, fx.Node) and is_integer and torch.Tag.nondeterministic_seeded in _tags(maker):
            makers.append(maker)
    return makers


class SyntheticInputs:
    """Makes tensors like a graph's fake ones, on the devices where ops really return them."""

    def __init__(self) -> None:
        self._devices: dict[StorageWeakRef, torch.device | None] = {}  # of fakes' storages on another device

    def record_devices(self, node: fx.Node, made: Sequence[torch.device] | None) -> None:
        """Record the devices of the tensors that ``node`` makes; None: it could not be run."""
        fakes = tensors(node.meta.get("val"))
        if made is not None and len(made) != len(fakes):  # an unneeded gradient may be traced, but not made
            return
        devices: Sequence[torch.device | None] = [None] * len(fakes) if made is None else made
        for fake, device in zip(fakes, devices, strict=True):
            is_unknown = device is None and torch.Tag.nondeterministic_seeded in _tags(node)
            if is_unknown or (device is not None and device.type != fake.device.type):
                self._devices[_identity(fake)] = device

    def arguments(self, node: fx.Node) -> tuple[Any, Any]:
        """Return synthetic arguments of one call; fakes that share a storage get tensors that share one.

        Raises:
            LookupError: the device of a seed is unknown.
        """
        storages: dict[int, torch.Tensor] = {}

        def example(given: fx.Node) -> Any:
            return tree_map_only(torch.Tensor, lambda fake: self._tensor(fake, storages), value_of(given))

        args, kwargs = fx.map_arg((node.args, node.kwargs), example)
        return args, kwargs

    def _tensor(self, fake: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        storage = fake.untyped_storage()
        device = self._devices.get(_identity(fake), fake.device)
        if device is None:
            raise LookupError("the device of its seeds is unknown")
        number = storage_id(storage)
        if number not in storages:
            count = max(1, storage.nbytes() // fake.element_size())
            storages[number] = torch.empty(count, dtype=fake.dtype, device=device)
            _fill(storages[number])
        view = torch.empty(0, dtype=fake.dtype, device=device)
        return view.set_(storages[number].untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())


def _fill(flat: torch.Tensor) -> None:
    """Fill with repeats of a short pattern: drawing 10⁸ numbers would take longer than most ops."""
    if not (flat.dtype is torch.bool or flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.zero_()
        return
    is_drawn = flat.dtype.itemsize > 1 or flat.dtype is torch.bool  # uniform_ lacks floats of 8 bits
    dtype = flat.dtype if is_drawn else torch.float32
    pattern = torch.empty(min(flat.numel(), _PATTERN), dtype=dtype, device=flat.device)
    if flat.dtype is torch.bool:
        pattern.bernoulli_(0.5 if pattern.numel() > 1 else 1.0)
    elif pattern.dtype.is_complex:
        pattern.normal_()
    else:
        pattern.uniform_()
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def _identity(fake: torch.Tensor) -> StorageWeakRef:
    """Return a key of its storage that stays unique: no other storage gets the address while the key is held."""
    return StorageWeakRef(fake.untyped_storage())  # type: ignore[no-untyped-call]


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return getattr(node.target, "tags", ())
