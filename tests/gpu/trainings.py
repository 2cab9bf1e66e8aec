"""How do trainings of these tests begin, and what must hold of each when it has ended?"""

import gc

import torch

import lmswap
from tests.test_known_failures import session_of


def begin():
    """Every training draws and captures anew, and finds nothing that is left of the one before."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def end(model):
    """Disables ``model``, whose tensors all had their places, and of which something left the device or ran again."""
    report, arena = lmswap.report(model), session_of(model).engine.arena
    lmswap.disable(model)
    assert arena.num_unplaced == 0
    assert report.swapped_out_bytes + (report.recomputed_bytes or 0) > 0
