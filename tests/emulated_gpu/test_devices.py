"""The emulated machine is what environment variables say: how many devices, how much memory, how slow a link."""

from tests.emulated_gpu.programs import end, run


def test_tensors_move_between_devices_and_each_computes_in_its_own_memory():
    program = """
assert torch.cuda.device_count() == 2
first = torch.arange(1000.0, device="cuda:0")
second = (first.to("cuda:1") * 2).add_(1)
assert second.device.index == 1 and torch.cuda.memory_allocated(1) >= 4000
assert torch.equal(second.cpu(), torch.arange(1000.0) * 2 + 1)
try:
    first + second
except RuntimeError as error:
    assert "found at least two devices" in str(error)
else:
    raise AssertionError("tensors of two devices were added")
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
assert machine.take_violations() == []
"""
    run(program, DEVICES=2)


def test_a_device_has_the_configured_memory():
    run("assert torch.cuda.mem_get_info() == (2**26, 2**26)", BYTES=2**26, CONTEXT_BYTES=0)


def test_a_context_takes_its_part_of_the_memory():
    program = """
assert torch.cuda.mem_get_info() == (2**25, 2**26)
torch.empty(3 * 2**23, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
try:
    torch.empty(2**25 + 1, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("the context's memory was given away")
"""
    run(program, BYTES=2**26, CONTEXT_BYTES=2**25)


def test_a_link_has_the_configured_rate():
    program = """
tensor = torch.ones(2**20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
tensor.cpu()
assert time.perf_counter() - start >= 0.1
"""
    run(program, OUT_RATE=10 * 2**20)


def test_a_setting_that_is_no_number_ends_the_process_with_a_sentence():
    done = end("", BYTES="much")
    assert done.returncode == 2
    assert "EMULATED_GPU_BYTES is 'much', must be a number of at least 0" in done.stderr


def test_a_model_has_its_arena_on_its_own_device_whichever_is_current():
    program = """
import json, lmswap
from lmswap.hardware import measure
from lmswap.ir.machine import Link, Machine, Rate, Tier

link = Link(Rate.constant(2e10), Rate.constant(2e10))
described = Machine("cuda:1 of the test", 2**34, 50e9, 10e9, 1e-6, (Tier("host", 2**34, link),))
measure._cache_file(torch.device("cuda:1"), "host", "").write(json.loads(described.to_json()))
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)])
rows = torch.randn(2**15, 64)
expected = model(rows).square().mean()
model, rows = model.to("cuda:1"), rows.to("cuda:1")
lmswap.enable(model, budget="160MiB", min_swap_bytes=4096)
for _ in range(4):
    loss = model(rows).square().mean()
    loss.backward()
    model.zero_grad()
assert torch.cuda.current_device() == 0 and torch.cuda.memory_reserved(0) == 0
assert torch.allclose(loss.cpu(), expected)
report = lmswap.report(model)
assert report.swapped_out_bytes > 0 and report.highest_peak_bytes <= 160 * 2**20
arena = lmswap.api._sessions[model].engine.arena
assert arena.reserved_bytes > 2**25 and arena.num_unplaced == 0
lmswap.disable(model)
assert machine.take_violations() == []
"""
    run(program, DEVICES=2)
