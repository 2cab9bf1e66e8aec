"""The C++ runtime through its Python border; what it does behind that border is tested in tests/cpp."""

import gc
import threading

import pytest
import torch

from lmswap import errors
from lmswap.runtime import _C

MIB = 1 << 20


def open_tier(engine, tier, directory):
    if tier == "host":
        engine.open_host_tier(64 * MIB)
    elif tier == "device":
        engine.open_device_tier(64 * MIB)
    elif tier == "peer":
        engine.open_peer_tier(1, 64 * MIB)
    elif tier == "compressed":
        engine.open_compressed_tier(64 * MIB)
    else:
        engine.open_disk_tier(str(directory), 64 * MIB)
    engine.reserve(tier, 8 * MIB)


def swap_out(engine, tier, tensor, swap=1):
    token = torch.from_dlpack(engine.out_start(swap, tier, 0, tensor.data_ptr(), tensor.nbytes, 0))
    engine.out_done(int(token), 0)
    return token


def swap_in(engine, token, tensor, swap=1):
    transfer = engine.in_start(swap, int(token), tensor.data_ptr(), tensor.nbytes, 0)
    engine.in_done(int(token), transfer, 0)
    return transfer


@pytest.mark.parametrize("tier", ["host", "device", "peer", "disk", "compressed"])
def test_swapped_bytes_are_restored_and_owned_by_the_token(tier, tmp_path):
    engine = _C.Engine(driver="host")
    open_tier(engine, tier, tmp_path)
    values = torch.randn(1_000_003)
    token = swap_out(engine, tier, values)
    assert token.dtype == torch.int64
    assert token.shape == (1,)
    back = torch.zeros_like(values)
    swap_in(engine, token, back)
    assert torch.equal(back, values)
    assert engine.tier_stats(tier).used_bytes >= values.nbytes
    del token
    gc.collect()
    assert engine.tier_stats(tier).used_bytes == 0
    assert engine.live_handles() == 0
    out, into = engine.take_records()
    assert (out.is_in, into.is_in) == (False, True)
    assert out.end_seconds <= into.end_seconds
    assert list(tmp_path.iterdir()) == []
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "device", "peer", "disk", "compressed"])
def test_cuda_paths_run_without_a_gpu(tier, tmp_path, emulated_driver):
    engine = _C.Engine(driver="cuda", library=emulated_driver.path)
    open_tier(engine, tier, tmp_path)
    tensor = torch.randn(1_000_003)
    with emulated_driver.on_device(tensor, torch.zeros_like(tensor)) as (values, back):
        token = swap_out(engine, tier, values)
        transfer = swap_in(engine, token, back)
        while not engine.is_finished(transfer):
            pass
        assert torch.equal(back.values, tensor)
        engine.close()
    assert emulated_driver.take_violations() == []
    assert set(emulated_driver.held().values()) == {0}


def test_an_unconsumed_capsule_frees_its_block():
    engine = _C.Engine(driver="host")
    open_tier(engine, "host", None)
    values = torch.zeros(1000)
    engine.out_start(1, "host", 0, values.data_ptr(), values.nbytes, 0)
    assert engine.live_handles() == 0


def test_tokens_outlive_the_engine():
    engine = _C.Engine(driver="host")
    open_tier(engine, "host", None)
    tokens = [swap_out(engine, "host", torch.zeros(1000))]
    engine.close()
    engine.close()
    del engine
    thread = threading.Thread(target=tokens.clear)
    thread.start()
    thread.join()
    assert not tokens


def test_a_blocking_call_lets_other_threads_run():
    engine = _C.Engine(driver="host", faults="copy_in@*=late:0.2")
    open_tier(engine, "host", None)
    values = torch.zeros(1000)
    ran_before_the_end = []
    while True not in ran_before_the_end:  # a busy machine may start the thread too late, but not each time
        token = swap_out(engine, "host", values)
        transfer = engine.in_start(1, int(token), values.data_ptr(), values.nbytes, 0)
        thread = threading.Thread(
            target=lambda transfer=transfer: ran_before_the_end.append(not engine.is_finished(transfer))
        )
        thread.start()
        engine.in_done(int(token), transfer, 0)
        thread.join()
        assert len(ran_before_the_end) < 50


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (lambda: _C.Engine(driver="tpu"), errors.OptionError, "'tpu'"),
        (lambda: _C.Engine(driver="host", out_bytes_per_second=-1.0), errors.OptionError, "negative"),
        (lambda: _C.Engine(driver="host", faults="nonsense"), errors.OptionError, "nonsense"),
        (lambda: _C.Engine(driver="cuda", library="libmissing.so"), errors.DriverError, "libmissing.so"),
        (lambda: _C.Engine(driver="host").open_host_tier(-5), errors.OptionError, "-5"),
        (lambda: _C.Engine(driver="host").open_disk_tier("/missing", MIB), errors.TierError, "/missing"),
        (lambda: _C.Engine(driver="host").reserve("disk", MIB), errors.OptionError, "not open"),
    ],
)
def test_errors_arrive_as_the_classes_of_lmswap(call, error, part):
    with pytest.raises(error, match=part):
        call()


def test_a_failed_copy_is_a_transfer_error_and_the_engine_continues():
    engine = _C.Engine(driver="host", faults="copy_in@1=fail")
    open_tier(engine, "host", None)
    values = torch.randn(1000)
    token, back = swap_out(engine, "host", values), torch.zeros(1000)
    with pytest.raises(errors.TransferError, match="copy_in"):
        swap_in(engine, token, back)
    swap_in(engine, token, back)
    assert torch.equal(back, values)


def test_each_copy_in_of_a_token_is_compared_with_what_left(tmp_path):
    engine = _C.Engine(driver="host", faults="read@2=flip")
    open_tier(engine, "disk", tmp_path)
    values, back = torch.randn(1000), torch.zeros(1000)
    token = swap_out(engine, "disk", values)
    swap_in(engine, token, back)
    with pytest.raises(errors.BytesDiffer, match="is not what left") as raised:
        swap_in(engine, token, back)
    assert raised.value.offset_bytes == 0
    assert not torch.equal(back, values)
    swap_in(engine, token, back)
    assert torch.equal(back, values)
    engine.close()
