"""Iterators of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator"]

# Batches that an iterator has returned; 0 again when persistent workers reuse it.
num_yielded: Callable[[LoaderIterator], Any] = operator.attrgetter("_num_yielded")
