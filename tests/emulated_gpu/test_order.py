"""Two uses of the same bytes without an order between them are found, and those with one are let pass."""

import torch

NUM_BYTES = 3 * 2**20  # large enough that nothing that is kept lies in the same segment
SLOW = 1e8  # bytes per second: 10 ms for NUM_BYTES


def pinned_ones():
    return torch.ones(NUM_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)


def copy_in_on_a_side_stream(target):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(pinned_ones(), non_blocking=True)
    return side


def test_a_missing_wait_is_detected_and_reads_old_bytes(emulated_gpu):
    emulated_gpu.configure(in_rate=SLOW)
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    copy_in_on_a_side_stream(target)
    num_arrived = target.clone().sum().item()
    assert num_arrived < NUM_BYTES
    torch.cuda.synchronize()
    violations = emulated_gpu.take_violations()
    assert len(violations) == 1
    assert f"reads {NUM_BYTES} bytes that a copy in on stream" in violations[0]
    assert "no order between them" in violations[0]


def test_a_wait_makes_the_bytes_valid_without_a_violation(emulated_gpu):
    emulated_gpu.configure(in_rate=SLOW)
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.current_stream().wait_stream(copy_in_on_a_side_stream(target))
    assert target.clone().sum().item() == NUM_BYTES
    assert emulated_gpu.take_violations() == []


def test_an_order_by_the_host_is_an_order(emulated_gpu):
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    copy_in_on_a_side_stream(target).synchronize()
    assert target.clone().sum().item() == NUM_BYTES
    assert emulated_gpu.take_violations() == []


def read_late_on_a_side_stream(*, records):
    """What a side stream reads of memory that the main one gives back and uses again."""
    ones = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    kept = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    blocking = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.empty_like(kept, pin_memory=True).copy_(blocking, non_blocking=True)
        kept.copy_(ones, non_blocking=True)
    if records:
        ones.record_stream(side)
    address = ones.data_ptr()
    del ones
    again = torch.full((NUM_BYTES,), 7, dtype=torch.uint8, device="cuda")
    assert (again.data_ptr() == address) != records
    torch.cuda.synchronize()
    return kept


def test_a_missing_record_stream_is_a_violation(emulated_gpu):
    emulated_gpu.configure(out_rate=SLOW)
    kept = read_late_on_a_side_stream(records=False)
    assert kept.unique().tolist() == [7]
    violations = emulated_gpu.take_violations()
    assert len(violations) == 1
    assert f"writes {NUM_BYTES} bytes that a copy out on stream" in violations[0]


def test_record_stream_is_no_violation(emulated_gpu):
    emulated_gpu.configure(out_rate=SLOW)
    assert read_late_on_a_side_stream(records=True).unique().tolist() == [1]
    assert emulated_gpu.take_violations() == []


def test_two_copies_into_the_same_pinned_memory_are_found(emulated_gpu):
    ones = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    kept = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            kept.copy_(ones, non_blocking=True)
    torch.cuda.synchronize()
    assert len(emulated_gpu.take_violations()) == 1


def test_neighbours_in_memory_are_not_taken_for_one_another(emulated_gpu):
    whole = torch.zeros(2 * NUM_BYTES, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole[:NUM_BYTES].fill_(1)
    whole[NUM_BYTES:].fill_(2)
    torch.cuda.synchronize()
    assert whole.unique().tolist() == [1, 2]
    assert emulated_gpu.take_violations() == []
