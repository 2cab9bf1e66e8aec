"""What do NVIDIA's libraries take for good in each thread that calls them? It is taken before it is asked for.

cuBLAS has a workspace for each thread and stream, of torch's allocator (32 MiB on an H100). On a GPU a backward runs in
a thread of autograd's, so that the second one would come in the middle of a step that was planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def allocate_cublas_workspaces(device: torch.device) -> None:
    """Takes those of this thread and of autograd's, on the current stream; nothing to do on a CPU or a second time.

    It may be called in the middle of a trace.
    """
    if device.type != "cuda":
        return
    import torch
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher(), torch.cuda.device(device), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        # The gradient of the square comes first: torch warns where the first call of a thread is to cuBLAS.
        loss = torch.addmm(matrix, matrix, matrix).square().sum()
        torch.autograd.grad(loss, matrix)
