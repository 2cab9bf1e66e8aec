"""The order of swaps is read from Inductor's code as it writes it, for a CPU and for a GPU."""

import textwrap

import pytest
import torch
from torch import fx

from lmswap.capture.inductor.kernel_order import check_order
from lmswap.errors import CaptureError
from lmswap.runtime import ops

CODE = """
buf0 = torch.ops.lmswap.swap_out_start.default(arg0, 1, 8, 'host', 0, True, torch.float32, [4, 4], [4, 1])
buf1 = buf0
extern_kernels.mm(arg0, arg1, out=buf2)
torch.ops.lmswap.swap_out_wait.default(buf1, arg0, 1)
"""


def planned() -> fx.Graph:
    graph = fx.Graph()
    given, other = graph.placeholder("given"), graph.placeholder("other")
    token = graph.call_function(ops.swap_out_start, (given, 1, 8, "host", 0, None, torch.float32, [4, 4], [4, 1]))
    graph.call_function(torch.ops.aten.mm.default, (given, other))
    graph.call_function(ops.swap_out_wait, (token, given, 1))
    graph.output(())
    return graph


def on_a_cpu(statements: str) -> str:
    return "def call(self, args):\n" + textwrap.indent(statements, "    ")


def on_a_gpu(statements: str) -> str:
    guarded = "with torch.cuda._DeviceGuard(0):\n" + textwrap.indent("torch.cuda.set_device(0)\n" + statements, "    ")
    return on_a_cpu(f"args.clear()\n{guarded}\nreturn ()")


@pytest.mark.parametrize("written", [on_a_cpu, on_a_gpu])
def test_code_in_another_order_is_refused(written):
    check_order(planned(), written(CODE))
    *before, product, last = CODE.strip().splitlines()
    with pytest.raises(CaptureError, match="Inductor reordered a swap"):
        check_order(planned(), written("\n".join([*before, last, product])))
