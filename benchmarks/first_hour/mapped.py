"""Kernels on CUDA tensors that lie in pinned host memory: right or not, and at which rate; and rates of copies.

What plans need that let kernels read host copies in place (zero-copy access), or stream an optimizer step:
``python -m benchmarks.first_hour.mapped FILE``; ``--small`` rehearses with small tensors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.compact import to_json
from benchmarks.unet3d.files import write_text
from lmswap.reporting.text import print_result

_REPEATS = 5
_kept: list[Tensor] = []  # pinned memory that tensors of the device lie in


def mapped(tensor: Tensor) -> Tensor:
    """A tensor of the device with the bytes of ``tensor``, in pinned host memory."""
    host = tensor.cpu().pin_memory()
    _kept.append(host)
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device("cuda", 0), host.nbytes)
    return torch.empty(0, dtype=host.dtype, device="cuda").set_(storage, 0, host.shape, host.stride())


def seconds_of(run: Callable[[], object]) -> float:
    """Median seconds of several runs by the device's clock, after a warm-up."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


Operation = Callable[[Tensor], Tensor]


def operations(width: int) -> Iterator[tuple[str, Tensor, Operation]]:
    """Yields (name, operand on the host, operation on it); ``width`` is the side of its matrices."""
    bf16 = torch.bfloat16
    matrix = torch.randn(width, width)
    wide, thin = (torch.randn(rows, width, dtype=bf16, device="cuda") for rows in (width, 256))
    rows = torch.randint(width, (width // 8,), device="cuda")
    image = torch.randn(2, 64, width // 64, width // 64, device="cuda")
    scan = torch.randn(1, 32, 24, 24, 24, device="cuda")
    heads = torch.randn(1, 8, width // 4, 64, dtype=bf16, device="cuda")
    yield "elementwise add", matrix, lambda a: a + 1.0
    yield "elementwise add of half a line, odd offset", matrix, lambda a: a.view(-1)[1::2] + 1.0
    yield "sum", matrix, lambda a: a.sum(1)
    yield "layer norm weights", torch.randn(width), lambda a: functional.layer_norm(wide.float(), (width,), a)
    yield "matrix product, fp32", matrix, lambda a: thin.float() @ a
    yield f"matrix product, bf16, {width} rows", matrix.to(bf16), lambda a: wide @ a
    yield "matrix product, bf16, 256 rows", matrix.to(bf16), lambda a: thin @ a
    yield "transposed matrix product, bf16", matrix.to(bf16), lambda a: functional.linear(thin, a)
    yield (
        "attention keys",
        torch.randn(1, 8, width // 4, 64).to(bf16),
        lambda a: functional.scaled_dot_product_attention(heads, a, heads),
    )
    yield "conv2d weights", torch.randn(64, 64, 3, 3), lambda a: functional.conv2d(image, a, padding=1)
    yield "conv2d input", image.cpu(), lambda a: functional.conv2d(a, image[:1, :, :3, :3].repeat(64, 1, 1, 1))
    yield "conv3d weights", torch.randn(64, 32, 3, 3, 3), lambda a: functional.conv3d(scan, a, padding=1)
    yield "rows of a table", matrix, lambda a: a.index_select(0, rows)
    yield "embedding", matrix, lambda a: functional.embedding(rows, a)
    yield "copy to the device", matrix, lambda a: a.clone()


def kernels(width: int) -> list[dict[str, Any]]:
    """By operation: equality with device memory, seconds on both, operand bytes per second; or why it failed."""
    found = []
    for name, operand, compute in operations(width):
        row: dict[str, Any] = {"operation": name, "bytes": operand.nbytes}
        try:
            here, there = operand.cuda(), mapped(operand)
            row["same"] = torch.equal(compute(here), compute(there))
            row["device_seconds"], row["mapped_seconds"] = (
                seconds_of(partial(compute, tensor)) for tensor in (here, there)
            )
            row["bytes_per_second"] = operand.nbytes / row["mapped_seconds"]
            torch.cuda.synchronize()
        except RuntimeError as error:
            row["failure"] = str(error)[:200]
        found.append(row)
        print_result(str(row))
    return found


def optimizer_step(nbytes: int) -> dict[str, Any]:
    """A fused Adam step whose parameter, gradient and state lie on the device, and in pinned memory."""
    found: dict[str, Any] = {"parameter_bytes": nbytes}
    results = []
    for name, place in (("device_seconds", Tensor.cuda), ("mapped_seconds", mapped)):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(place(torch.randn(nbytes // 4)))
        parameter.grad = place(torch.randn(nbytes // 4))
        optimizer = torch.optim.Adam([parameter], fused=True)
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), device="cuda")
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = place(torch.zeros(nbytes // 4))
        found[name] = seconds_of(optimizer.step)
        results.append(parameter.detach().cpu().clone())
    found["same"] = torch.equal(*results)
    # It reads four tensors and writes three.
    found["read_bytes_per_second"] = 4 * nbytes / found["mapped_seconds"]
    print_result(str(found))
    return found


def copy_rates(largest_bytes: int) -> list[dict[str, Any]]:
    """Bytes per second in, out, and in both directions at once, by copy size up to ``largest_bytes``."""
    host = torch.empty(2, largest_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2, largest_bytes, dtype=torch.uint8, device="cuda")
    lanes = [(torch.cuda.Stream(), device[0], host[0]), (torch.cuda.Stream(), host[1], device[1])]  # type: ignore[no-untyped-call]
    found = []
    for nbytes in (2**power for power in range(16, largest_bytes.bit_length(), 2)):
        count = max(1, largest_bytes // nbytes // 4)

        def copy(ways: Sequence[int], nbytes: int = nbytes, count: int = count) -> None:
            for stream, _, _ in lanes:
                stream.wait_stream(torch.cuda.default_stream())
            for stream, target, source in (lanes[way] for way in ways):
                with torch.cuda.stream(stream):
                    for _ in range(count):
                        target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            for stream, _, _ in lanes:
                torch.cuda.default_stream().wait_stream(stream)

        row: dict[str, Any] = {"copy_bytes": nbytes}
        for name, ways in {"in": (0,), "out": (1,), "both": (0, 1)}.items():
            row[f"{name}_bytes_per_second"] = count * nbytes * len(ways) / seconds_of(partial(copy, ways))
        found.append(row)
        print_result(str(row))
    return found


def main() -> None:
    """Measure all, and write what is known after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--small", action="store_true", help="small tensors, for an emulated GPU")
    options = parser.parse_args()
    width, nbytes = (512, 2**20) if options.small else (8192, 2**28)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, measure in {
        "copies": lambda: copy_rates(nbytes),
        "kernels": lambda: kernels(width),
        "optimizer_step": lambda: optimizer_step(nbytes),
    }.items():
        found[name] = measure()
        write_text(options.result, to_json(found))


if __name__ == "__main__":
    main()
