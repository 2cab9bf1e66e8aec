"""The host runs ahead of the emulated GPU, and copies take the time that the link takes."""

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


def test_the_host_goes_on_while_kernels_run(emulated_gpu):
    emulated_gpu.configure(jitter_seconds=0.02)
    x = torch.ones(16, device="cuda")

    def submit():
        for _ in range(20):
            x.add_(1)

    submitted = seconds_of(submit)
    assert submitted < seconds_of(lambda: (submit(), torch.cuda.synchronize()))
    assert x[0].item() == 41


def test_a_copy_on_a_side_stream_is_late(emulated_gpu):
    emulated_gpu.configure(out_rate=RATE)
    side, source, target, done = torch.cuda.Stream(), on_gpu(), on_host(), torch.cuda.Event()
    with torch.cuda.stream(side):
        submitted = seconds_of(lambda: target.copy_(source, non_blocking=True))
        done.record()
    assert submitted < SECONDS
    assert not done.query()
    assert seconds_of(side.synchronize) < SECONDS
    assert done.query()


def test_events_tell_the_time_that_a_copy_takes_on_the_link(emulated_gpu):
    emulated_gpu.configure(in_rate=RATE, latency_seconds=0.01)
    source, target = on_host(), on_gpu()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 1e3 * (SECONDS + 0.01)


def copies_at_once(*ways):
    """Seconds that copies on streams of their own take together."""
    tensors = [(on_gpu(), on_host()) for _ in ways]
    streams = [torch.cuda.Stream() for _ in ways]

    def run():
        for way, stream, (gpu, host) in zip(ways, streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                target, source = (host, gpu) if way == "out" else (gpu, host)
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return seconds_of(run)


def test_there_is_one_copy_engine_each_way(emulated_gpu):
    emulated_gpu.configure(out_rate=RATE, in_rate=RATE)
    assert copies_at_once("out", "out") >= 2 * SECONDS
    assert SECONDS <= copies_at_once("out", "in") < 2 * SECONDS
