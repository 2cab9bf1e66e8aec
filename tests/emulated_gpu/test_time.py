"""The host runs ahead of the emulated GPU; copies take the time of the link, kernels that of the device."""

import os
import subprocess
import sys
import time

import torch

NUM_BYTES = 16 * 2**20
RATE = 160 * 2**20  # bytes per second: 100 ms for NUM_BYTES
SECONDS = NUM_BYTES / RATE


def on_host():
    return torch.empty(NUM_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)


def on_gpu():
    return torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")


def seconds_of(run):
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def test_the_host_continues_while_kernels_run(emulated_gpu):
    emulated_gpu.configure(jitter_seconds=0.02)
    x = torch.ones(16, device="cuda")

    def submit():
        for _ in range(20):
            x.add_(1)

    submitted = seconds_of(submit)
    assert submitted < seconds_of(lambda: (submit(), torch.cuda.synchronize()))
    assert x[0].item() == 41


def test_a_copy_on_a_side_stream_is_late(emulated_gpu):
    emulated_gpu.configure(out_rate=NUM_BYTES)  # a second
    side, source, target, done = torch.cuda.Stream(), on_gpu(), on_host(), torch.cuda.Event()
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        done.record()
    assert not done.query()
    side.synchronize()
    assert done.query()


def test_events_measure_the_time_of_a_copy_on_the_link(emulated_gpu):
    emulated_gpu.configure(in_rate=RATE, latency_seconds=0.01)
    source, target = on_host(), on_gpu()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 1e3 * (SECONDS + 0.01)


def copies_at_once(emulated_gpu, *ways):
    """Seconds of the device that copies on streams of their own take together."""
    tensors = [(on_gpu(), on_host()) for _ in ways]
    first, (begin, *ends) = torch.ones(1, device="cuda"), [torch.cuda.Event(enable_timing=True) for _ in (0, *ways)]
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(latency_seconds=0.5)  # all are queued before the first begins
    first.add_(1)
    begin.record()
    for way, end, (gpu, host) in zip(ways, ends, tensors, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            begin.wait(torch.cuda.current_stream())
            target, source = (host, gpu) if way == "out" else (gpu, host)
            target.copy_(source, non_blocking=True)
            end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) for end in ends) / 1e3


def test_a_device_has_one_copy_engine_each_way(emulated_gpu):
    emulated_gpu.configure(out_rate=RATE, in_rate=RATE)
    assert copies_at_once(emulated_gpu, "out", "out") >= 2 * SECONDS
    assert SECONDS <= copies_at_once(emulated_gpu, "out", "in") < 2 * SECONDS


def seconds_by_events(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


FLOP_RATE = 1e9
MEMORY_RATE = 1e8


def test_products_take_the_time_of_their_operations(emulated_gpu):
    a, b, batch = torch.ones(200, 300, device="cuda"), torch.ones(300, 100, device="cuda"), torch.ones(4, 50, 50)
    bias, batch = torch.ones(100, device="cuda"), batch.to("cuda")
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(flop_rate=FLOP_RATE)
    least = 2 * 200 * 300 * 100 / FLOP_RATE
    for run in (lambda: a @ b, lambda: torch.addmm(bias, a, b)):
        assert seconds_by_events(run) >= least
        assert seconds_of(lambda run=run: (run(), torch.cuda.synchronize())) >= least
    assert seconds_by_events(lambda: torch.bmm(batch, batch)) >= 2 * 4 * 50**3 / FLOP_RATE


def test_convolution_time_follows_flops_and_the_required_gradients(emulated_gpu):
    x, weight = torch.ones(1, 8, 32, 32, device="cuda"), torch.ones(16, 8, 3, 3, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(flop_rate=FLOP_RATE)
    once = 2 * (16 * 32 * 32) * (8 * 3 * 3) / FLOP_RATE
    assert seconds_by_events(lambda: torch.conv2d(x, weight, padding=1)) >= once
    loss = torch.conv2d(x, weight, padding=1).sum()
    assert seconds_by_events(loss.backward) >= once
    of_both = torch.conv2d(x.requires_grad_(), weight, padding=1).sum()
    assert seconds_by_events(of_both.backward) >= 2 * once
    up = torch.ones(1, 16, 32, 32, device="cuda")
    assert seconds_by_events(lambda: torch.conv_transpose2d(up, weight, padding=1)) >= once


def test_other_kernels_take_the_time_of_their_bytes(emulated_gpu):
    x = torch.ones(2**18, device="cuda")
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(memory_rate=MEMORY_RATE)
    assert seconds_by_events(lambda: torch.add(x, 1)) >= 2 * x.nbytes / MEMORY_RATE
    assert seconds_by_events(lambda: x.add_(1)) >= 2 * x.nbytes / MEMORY_RATE
    assert seconds_by_events(lambda: torch._foreach_add([x, x], 1)) >= 4 * x.nbytes / MEMORY_RATE
    assert seconds_by_events(x.clone) >= 2 * x.nbytes / MEMORY_RATE
    assert seconds_by_events(x.zero_) >= x.nbytes / MEMORY_RATE


def test_every_kernel_takes_its_latency(emulated_gpu):
    x = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(latency_seconds=0.01)
    assert seconds_by_events(lambda: [x.add_(1) for _ in range(5)]) >= 0.05


def test_kernels_slower_than_configured_are_reported(emulated_gpu):
    x = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    emulated_gpu.take_late_seconds()
    emulated_gpu.configure_compute(flop_rate=1e15)
    x @ x
    torch.cuda.synchronize()
    assert emulated_gpu.take_late_seconds() > 0
    assert emulated_gpu.take_late_seconds() == 0


def test_the_environment_sets_kernel_times():
    script = "import torch; from tools.emulated_gpu import machine; machine.start(); from tests.emulated_gpu.test_time "
    script += "import seconds_by_events; x = torch.ones(1, device='cuda'); print(seconds_by_events(lambda: x.add_(1)))"
    environment = {**os.environ, "EMULATED_GPU_KERNEL_LATENCY": "0.05"}
    reported = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert float(reported.stdout) >= 0.05
