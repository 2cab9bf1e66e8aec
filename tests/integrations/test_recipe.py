"""The recipe of the examples: the bits of the same script without lmswap, less memory, figures in TensorBoard."""

import sys
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

import lmswap
from lmswap import api
from tests.integrations.scripts import grown, scalars
from tests.training import same_bits

pytest.importorskip("tensorboard", reason="tensorboard is missing, which make integrations installs")
RECIPE = Path(__file__).parents[2] / "examples" / "gpt_recipe.py"
CODE = RECIPE.read_text(encoding="utf-8")
WITHOUT = CODE.replace("    lmswap.enable(model, options.budget)\n", "").replace(
    "    print(lmswap.report(model))\n", ""
)


@pytest.fixture
def run(monkeypatch):
    """Runs such a script; the weights after its steps, and what memory grew by."""

    def run(code, *arguments):
        seen = []
        monkeypatch.setattr(sys, "argv", [str(RECIPE), "--steps", "2", "--layers", "3", *arguments])
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: seen.extend(p.detach().clone() for p in optimizer.param_groups[0]["params"])
        )
        try:
            with grown() as memory:
                exec(compile(code, str(RECIPE), "exec"), {"__name__": "__main__", "__file__": str(RECIPE)})
        finally:
            hook.remove()
            for model in [*api._sessions]:
                lmswap.disable(model)
        return seen, memory.nbytes

    return run


def test_the_recipe_has_plain_bits_at_a_lower_peak(run, tmp_path):
    assert WITHOUT.count("lmswap.") == CODE.count("lmswap.") - 2
    expected, plain_bytes = run(WITHOUT)
    actual, our_bytes = run(CODE, "--budget", "250MiB", "--tensorboard", str(tmp_path))

    assert same_bits(actual, expected)
    found = scalars(tmp_path)
    assert set(found["loss"]) == set(found["lmswap/peak_bytes"]) == {0, 1}
    assert found["lmswap/highest_peak_bytes"][1] <= 250 * 2**20 < plain_bytes
    assert our_bytes < plain_bytes
    assert found["lmswap/swapped_out_bytes"][1] + found["lmswap/recomputed_bytes"][1] > 0
