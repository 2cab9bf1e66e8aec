"""The host goes on while neither the GPU nor the disk, nor a paced link, has come so far, whatever fails later."""

import threading

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import BytesChanged, DriverError, TransferError
from lmswap.runtime import _C
from tests.training import same_bits

TOO_LONG = 60  # seconds, after which a host that waits is let go on


def enable(monkeypatch, *, policy="swap_all", faults="", compiler="eager", tier="disk", link=None):
    engine = _C.Engine
    monkeypatch.setattr("lmswap.session.engine_setup._C.Engine", lambda **options: engine(**options, faults=faults))
    torch.manual_seed(0)
    torch.compiler.reset()
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64, device="cpu"), nn.Tanh())]
    model = nn.Sequential(*layers).cuda()
    return lmswap.enable(model, policy=policy, tier=tier, link=link, min_swap_bytes=4096, compiler=compiler)


def forward(model):
    torch.manual_seed(1)
    model.zero_grad()
    return model(torch.randn(256, 64, device="cuda")).sum()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def step(model):
    forward(model).backward()
    return gradients(model)


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        model = enable(patch, policy="none")
        expected = step(model)
        lmswap.disable(model)
    return expected


def warmed_up(monkeypatch, **how):
    """A model whose first steps, which are timed, are over."""
    model = enable(monkeypatch, **how)
    for _ in range(4):
        step(model)
    return model


def backward_while_held(emulated_gpu, model):
    """Runs a step whose backward the GPU cannot begin; whether the host came to the backward's last gradient."""
    came = threading.Event()
    loss = forward(model)
    with emulated_gpu.held_stream() as let_go:
        timer = threading.Timer(TOO_LONG, let_go)
        timer.start()

        def arrives(_):
            if timer.is_alive():
                came.set()
            timer.cancel()
            let_go()

        handle = model[0].weight.register_post_accumulate_grad_hook(arrives)
        try:
            loss.backward()
        finally:
            handle.remove()
            timer.cancel()
    return came.is_set()


@pytest.mark.parametrize(("tier", "link"), [("disk", None), ("disk", "50MB/s"), ("host", "50MB/s")])
def test_the_host_finishes_a_backward_that_the_gpu_has_not_begun(tier, link, monkeypatch, emulated_gpu, plain):
    model = warmed_up(monkeypatch, tier=tier, link=link)
    for _ in range(2):
        assert backward_while_held(emulated_gpu, model)
        assert same_bits(gradients(model), plain)
    lmswap.disable(model)


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_late_copies_and_requests_change_no_bit(compiler, monkeypatch, emulated_gpu, plain):
    emulated_gpu.configure(jitter_seconds=0.002)
    model = enable(monkeypatch, compiler=compiler, faults="read@*=jitter:0.003,write@*=jitter:0.003")
    for _ in range(3):
        assert same_bits(step(model), plain)
    lmswap.disable(model)


@pytest.mark.timeout(120, method="thread")  # of who waits for ever, the main thread may be one
@pytest.mark.parametrize("compiler", ["fx", "eager"])
@pytest.mark.parametrize("queues", [{"is_one": True}, {"max_queued": 3}, {"is_one": True, "max_queued": 3}])
def test_shared_and_full_queues_do_not_deadlock(queues, compiler, monkeypatch, emulated_gpu, plain):
    model = warmed_up(monkeypatch, compiler=compiler, faults="read@*=jitter:0.003,write@*=jitter:0.003")
    emulated_gpu.configure_queues(**queues)
    for _ in range(2):
        assert same_bits(step(model), plain)
    lmswap.disable(model)
    torch.cuda.synchronize()


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_an_engine_that_did_not_wait_for_the_disk_would_be_detected(compiler, monkeypatch, emulated_gpu, plain):
    model = enable(monkeypatch, compiler=compiler, faults="read@*=late:0.05")
    emulated_gpu.ignore_waits_of_the_driver(True)
    assert not same_bits(step(model), plain)
    torch.cuda.synchronize()
    emulated_gpu.ignore_waits_of_the_driver(False)
    emulated_gpu.take_violations()
    lmswap.disable(model)


@pytest.mark.parametrize("compiler", ["fx", "eager"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [("read@2=fail", TransferError), ("write@2=fail", TransferError), ("read@2=flip", BytesChanged)],
)
def test_a_step_ends_in_the_error_that_the_host_did_not_wait_for(fault, error, compiler, monkeypatch, plain):
    model = enable(monkeypatch, compiler=compiler, faults=fault)
    with pytest.raises(error):
        step(model)
    assert same_bits(step(model), plain)
    lmswap.disable(model)


def test_a_failed_read_raises_in_backward_after_the_host_continued(monkeypatch, emulated_gpu, plain):
    model = warmed_up(monkeypatch, faults="read@34=fail")  # of at most 8 in a step
    with pytest.raises(TransferError, match="read"):
        for _ in range(12):
            assert backward_while_held(emulated_gpu, model)
    assert same_bits(step(model), plain)
    lmswap.disable(model)


def test_a_failure_in_an_interrupted_step_is_not_reported_by_the_next_step(monkeypatch, emulated_gpu, plain):
    model = warmed_up(monkeypatch, faults="read@34=fail")  # of at most 8 in a step

    def cut(_):
        raise KeyError("the user's own")

    handle = model[0].weight.register_hook(cut)
    for _ in range(12):
        with emulated_gpu.held_stream(), pytest.raises(KeyError):  # nothing has been read by then
            forward(model).backward()  # the forward is held too: reads of a plan may begin at its end
    handle.remove()
    assert same_bits(step(model), plain)
    lmswap.disable(model)


def test_a_gpu_that_fails_ends_the_step_and_the_engine_closes(monkeypatch, emulated_gpu):
    model = enable(monkeypatch)
    loss = forward(model)
    torch.nn.functional.embedding(torch.tensor([99], device="cuda"), torch.ones(4, 4, device="cuda"))
    with pytest.raises((RuntimeError, DriverError)):
        loss.backward()
        torch.cuda.synchronize()
    lmswap.disable(model)
    emulated_gpu.mend()
    torch.cuda.synchronize()
