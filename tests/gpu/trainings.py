"""Set-up of the trainings of these tests, and checks of their end."""

import gc

import torch

import lmswap
from tests.training import session_of


def begin():
    """Resets random state, traces and caches, so that every training starts from the same state."""
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
