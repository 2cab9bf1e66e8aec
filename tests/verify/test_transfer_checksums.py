"""Checksums of transfers detect changed bytes and missing waits; failed ones raise a transfer error at each request."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import lmswap
from lmswap.errors import BytesChanged, OptionError, TransferError, VerificationError
from lmswap.runtime import _C
from lmswap.runtime.engine import SwapEngine
from lmswap.verify.summary import Verified
from lmswap.verify.transfer_checksums import Audit, checksums
from tests.late_engine import Breakage, LateEngine
from tests.verify.models import MODELS, enable, step

pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")
follows_pointers = pytest.mark.cpu_only("the late engine follows device pointers on the host")

BREAKAGES = {
    "a release that does not wait": Breakage(release_waits=False),
    "a copy in that does not wait for the copy out": Breakage(in_start_waits_for_out=False),
    "a first use that does not wait for the copy in": Breakage(in_done_waits=False),
    "blocks that overlap": Breakage(has_own_places=False),
}


def with_engine(monkeypatch, breakage: Breakage) -> list[torch.Tensor]:
    """Lets models run on a late engine; what leaves is kept alive, as by an allocator that does not reuse it."""
    kept: list[torch.Tensor] = []
    out_start = SwapEngine.out_start
    monkeypatch.setattr(SwapEngine, "out_start", lambda self, x, *rest: kept.append(x) or out_start(self, x, *rest))
    monkeypatch.setattr("lmswap.session.engine_setup.open_engine", lambda *_: LateEngine(breakage))
    return kept


@follows_pointers
def test_a_sound_engine_that_is_always_late_passes(monkeypatch):
    case = MODELS["shared_views"]
    kept = with_engine(monkeypatch, Breakage())
    model = enable(case)
    for _ in range(2):
        step(case, model)
    assert kept
    assert lmswap.api._sessions[model].verified.num_transfers > 0
    lmswap.disable(model)


@follows_pointers
@pytest.mark.parametrize("name", BREAKAGES)
def test_only_verification_detects_a_broken_engine(name, monkeypatch):
    case = MODELS["shared_views"]
    with_engine(monkeypatch, BREAKAGES[name])
    model = enable(case, verify=False)
    step(case, model)  # no error
    lmswap.disable(model)
    model = enable(case)
    with pytest.raises(VerificationError):
        step(case, model)
    assert lmswap.api._sessions[model].verified.num_differences == 1
    lmswap.disable(model)


@follows_pointers
@pytest.mark.parametrize(
    ("damage", "where"), [("out", "on the way out"), ("away", "in the tier"), ("in", "on the way in")]
)
def test_a_flipped_bit_is_found_where_it_was_flipped(damage, where, monkeypatch):
    case = MODELS["shared_views"]
    with_engine(monkeypatch, Breakage(damage=damage))
    model = enable(case)
    with pytest.raises(
        BytesChanged, match=rf"buffer '[^']+', made by op .*, were changed {where}.*at byte 0"
    ) as caught:
        step(case, model)
    program = lmswap.program(model)
    maker = next(op for op in program.ops if program.buffer_names.index(caught.value.buffer) in op.writes)
    assert caught.value.made_by == f"op '{maker.name}' ({maker.target}, {maker.source})"
    assert "models.py:" in maker.source
    lmswap.disable(model)


@pytest.mark.cpu_only("an engine of the host driver, which follows pointers on the host")
@pytest.mark.parametrize("nbytes", [1, 7, 8, 2**20 - 1, 2**20, 2**20 + 9, 3 * 2**20])
def test_checksums_of_both_ends_agree_and_detect_changes(nbytes, tmp_path):
    engine = _C.Engine(driver="host", audits=True)
    engine.open_disk_tier(str(tmp_path), 2**23)
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    token = torch.from_dlpack(engine.out_start(1, "disk", 0, flat.data_ptr(), nbytes, 0))
    engine.out_done(int(token), 0)
    sums = checksums(flat)
    assert engine.take_checksums(engine.out_transfer(int(token))) == sums.tolist()
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = flat.clone()
        changed[place] ^= 128
        assert not torch.equal(checksums(changed), sums)
    if nbytes >= 32:
        exchanged = flat.clone()
        exchanged[:8], exchanged[8:16] = flat[8:16], flat[:8]
        assert not torch.equal(checksums(exchanged), sums)
    del token
    engine.close()


def test_a_failed_audit_is_requested_once_and_fails_each_time():
    take = Mock(side_effect=[TransferError("the disk"), OptionError("its sums were taken before")])
    native = SimpleNamespace(out_transfer=lambda handle: 7, take_checksums=take)
    audit = Audit(native, Verified("model"), lambda buffer: ("x", "an op"))
    flat = torch.zeros(64, dtype=torch.uint8)
    audit.out_queued(1, 0, flat.untyped_storage(), 0, 64)
    for transfer in (8, 9):  # a graph that is kept reads it twice
        audit.in_queued(transfer, audit.staging(flat))
        with pytest.raises(TransferError, match="the disk"):
            audit.in_waited(1, transfer, flat)
    audit.forget()  # when a step was cut short
    take.assert_called_once_with(7)
