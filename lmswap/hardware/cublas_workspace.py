"""Early allocation of cuBLAS workspaces, which are permanent, so that no planned step has to allocate them.

cuBLAS has a workspace for each thread and stream, from torch's allocator (32 MiB on an H100). On a GPU the backward
runs in an autograd thread, whose workspace would be allocated in the middle of a step that was planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def allocate_cublas_workspaces(device: torch.device) -> None:
    """Allocates those of this thread and of autograd's for the current stream; no effect on a CPU or if they exist.

    May be called during a trace.
    """
    if device.type != "cuda":
        return
    import torch

    from lmswap.torch_compat.operators import eager_dispatch

    with eager_dispatch(), torch.cuda.device(device), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        # The gradient of the square comes first: torch warns where the first call of a thread is to cuBLAS.
        loss = torch.addmm(matrix, matrix, matrix).square().sum()
        torch.autograd.grad(loss, matrix)
