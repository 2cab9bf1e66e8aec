"""Checksums that could not be computed raise a transfer error at every request."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from lmswap.errors import OptionError, TransferError
from lmswap.verify.summary import Verified
from lmswap.verify.transfer_checksums import Audit


def test_a_failed_audit_is_requested_once_and_fails_each_time():
    take = Mock(side_effect=[TransferError("the disk"), OptionError("its sums were taken before")])
    native = SimpleNamespace(out_transfer=lambda handle: 7, take_checksums=take)
    audit = Audit(native, Verified("model"), lambda buffer: ("x", "an op"))
    flat = torch.zeros(64, dtype=torch.uint8)
    audit.out_queued(1, 0, flat.untyped_storage(), 0, 64)
    for transfer in (8, 9):  # a graph that is kept reads it twice
        audit.in_queued(transfer, audit.landing(flat))
        with pytest.raises(TransferError, match="the disk"):
            audit.in_waited(1, transfer, flat)
    audit.forget()  # when a step was cut short
    take.assert_called_once_with(7)
