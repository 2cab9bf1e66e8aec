"""`lmswap verify`: runs a script unchanged with every check on, and its exit code says what is known afterwards."""

import gc
import json
import textwrap

import pytest
import torch

import lmswap
from lmswap import options
from lmswap.api import sessions
from lmswap.cli import entry
from lmswap.cli.verify import DIFFERS, NOTHING_VERIFIED
from lmswap.runtime import _C
from lmswap.verify.bitwise import Comparator, Difference
from lmswap.verify.summary import Result
from tests.cli.terminal_width import too_wide

TRAIN = """
    import sys, torch, lmswap
    from torch import nn
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    {enable}
    for _ in range(2):
        model(torch.randn(64, 64)).sum().backward()
    {end}
"""
ENABLE = "model = lmswap.enable(model, policy='swap_all', min_swap_bytes=4096)"


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Ends what a script's process would have ended."""
    yield
    gc.collect()  # models that were enabled
    for session in sessions():  # of models that are still referenced
        session.close()
    assert not _C.heap_is_installed()


@pytest.fixture
def verify(tmp_path, capsys):
    """Runs the script of this text; gives exit code, what was printed, and what was written as JSON."""

    def run(text: str, *arguments: str):
        script, written = tmp_path / "train.py", tmp_path / "verified.json"
        script.write_text(textwrap.dedent(text))
        code = entry.main(["verify", "--json", str(written), str(script), *arguments])
        printed = capsys.readouterr()
        assert not too_wide(printed.out)
        return code, printed.out + printed.err, json.loads(written.read_text())

    return run


def script(enable: str = ENABLE, end: str = "") -> str:
    return TRAIN.format(enable=enable, end=end)


@pytest.mark.parametrize(
    "enable",
    [
        ENABLE.replace(")", ", verify=False)"),
        "model = torch.compile(model, backend='lmswap', options={'policy': 'swap_all', 'min_swap_bytes': 4096})",
    ],
)
def test_a_script_is_verified_whatever_options_it_sets(verify, enable):
    code, printed, found = verify(script(enable, end="print('arguments', sys.argv[1:], __name__)"), "--lr", "3")
    assert code == found["exit_code"] == 0, printed
    assert "arguments ['--lr', '3'] __main__" in printed
    (model,) = found["models"]
    assert model["num_transfers"] > 0
    assert model["num_gradients"] == 2 * 6
    assert f"{model['num_transfers']} transfers checksummed" in " ".join(printed.split())
    assert "the same with and without swaps, and results are those of plain torch" in " ".join(printed.split())
    assert not options.always_verify


@pytest.mark.slow
@pytest.mark.parametrize(
    ("enable", "why"),
    [
        ("", "enabled no model"),
        ("model = lmswap.enable(model)", "no byte was swapped"),
        (ENABLE.replace(")", ", compiler='inductor')"), "only copies were verified"),
    ],
)
def test_a_script_that_verifies_nothing_has_its_own_exit_code(verify, enable, why):
    code, printed, found = verify(script(enable, end="print(lmswap.report(model))" if enable else ""))
    assert code == found["exit_code"] == NOTHING_VERIFIED
    assert why in " ".join(printed.split())
    assert ("that Inductor compiles" in " ".join(printed.split())) == ("inductor" in enable)


RETURNS = """
    import torch, lmswap
    from torch import nn
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Linear(64, 64), nn.Linear(64, 64)
        def forward(self, x):
            tokens = self.embed(x)
            mixed = torch.tanh(self.mix(torch.tanh(self.mix(torch.tanh(tokens)))))
            return {outputs}
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(Returns(), policy="swap_all", min_swap_bytes=4096)
    for _ in range(2):
        sum(one.square().mean() for one in model(torch.randn(32, 16, 64))).backward()
"""


@pytest.mark.parametrize(
    ("outputs", "left_out"),
    [
        ("tokens, tokens[:, 0], mixed", "gradients of the graph of"),
        ("tokens[:, 0], tokens.flatten(), mixed[:, 1:], mixed[0]", "gradients of the graph of"),
        ("mixed[:, 1:], mixed.transpose(0, 1)", "gradients of the graph of"),
        ("mixed, mixed[:, 0], mixed.exp()", "gradients of views that are outputs of the graph of"),
        ("mixed.view(2, -1).unbind()", ""),
        ("tokens[:, 0], mixed", ""),
        ("*(torch._dynamo.graph_break() or ()), mixed.view(-1), self.mix(mixed).exp()", ""),
    ],
)
def test_only_results_compared_with_plain_torch_are_reported_as_equal(verify, outputs, left_out):
    code, printed, found = verify(RETURNS.format(outputs=outputs))
    (model,) = found["models"]
    said = " ".join(printed.split())
    assert model["num_plain_outputs"] > 0
    assert len(model["not_beside_plain"]) == bool(left_out)
    assert code == found["exit_code"] == (NOTHING_VERIFIED if left_out else 0), said
    assert ("results are those of plain torch" in said) == (not left_out)
    assert ("named above, were not compared with plain torch" in said) == bool(left_out)
    if left_out:
        assert f"not compared with plain torch: {left_out} embed." in said
        assert "and 3 other inputs (outputs are views" in said


def test_swapped_tensors_of_hooks_are_compared(verify):
    enable = ENABLE.replace(")", ", compiler='eager')")
    code, printed, found = verify(script(enable, end="print(lmswap.report(model))"))
    assert code == found["exit_code"] == 0
    (model,) = found["models"]
    assert model["num_saved"] > 0
    assert f"{model['num_saved']} saved tensors compared" in " ".join(printed.split())
    assert "saved-tensor hooks the model's own code runs" in " ".join(printed.split())


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_difference_is_an_exit_code_even_if_the_script_hides_it(verify, is_hidden, monkeypatch):
    found = iter([{Result("output 0"): Difference(1, 1, "made up")}])
    monkeypatch.setattr(Comparator, "differences", lambda *_: next(found, {}))
    text = script(end="sys.exit(0)")
    if is_hidden:
        text = text.replace("import sys", "import contextlib, sys")
        text = text.replace("    model(torch", "    with contextlib.suppress(Exception): model(torch")
    code, printed, written = verify(text)
    assert code == written["exit_code"] == DIFFERS
    assert written["models"][0]["num_differences"] == 1
    assert ("made up" in printed) != is_hidden
    assert "NOT the same with swaps" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(7)", 7), ("sys.exit('no')", 1), ("raise KeyError('lost')", 1), ("raise KeyboardInterrupt", 130)],
)
def test_a_failing_script_keeps_its_exit_code_and_reports_earlier_checks(verify, end, code):
    got, printed, found = verify(script(end=end))
    assert got == found["exit_code"] == code
    assert found["models"][0]["num_transfers"] > 0
    assert f"failed with exit code {code}" in " ".join(printed.split())
    assert {"sys.exit(7)": "", "sys.exit('no')": "no\n"}.get(end, "") in printed
    assert ("KeyError: 'lost'" in printed) == ("KeyError" in end)


def test_a_module_is_run_as_python_runs_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "trainer_of_tests.py").write_text(textwrap.dedent(script(end="print(sys.argv)")))
    monkeypatch.syspath_prepend(tmp_path)
    assert entry.main(["verify", "-m", "trainer_of_tests", "--json", "x"]) == 0
    assert "trainer_of_tests.py', '--json', 'x']" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "name a script"),
        (["missing.py", "--lr", "3"], "no script 'missing.py'"),
        (["--json", "/missing/x.json", __file__], "does not exist"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(arguments, part, capsys):
    assert entry.main(["verify", *arguments]) == 2
    assert part in " ".join(capsys.readouterr().err.split())


def test_counts_are_kept_of_models_that_are_gone():
    before = len(lmswap.api.verified())
    lmswap.disable(lmswap.enable(torch.nn.Linear(2, 2), verify=True))
    assert len(lmswap.api.verified()) == before + 1
