"""Whose code asks whether it is compiled is told that its bits may be other ones than plain torch's."""

import inspect

import torch

import lmswap
from lmswap.commands.verify import _verdict
from tests.test_hard_cases import Net, batch, swapping


class Asks(Net):
    def forward(self, x):
        return super().forward(x) * (2.0 if torch.compiler.is_compiling() else 3.0)


LINE = inspect.getsourcelines(Asks.forward)[1] + 1


def report_of(model, compiler, **options):
    torch.compiler.reset()
    swapping(model, compiler, **options)
    for _ in range(2):
        model(batch()).square().mean().backward()
    report = lmswap.report(model)
    lmswap.disable(model)
    return report


def asks(report):
    return [note for note in report.notes if "calls is_compiling" in note]


def test_the_line_that_asks_is_named_once_where_graphs_are_captured():
    (note,) = asks(report_of(Asks(), "fx"))
    assert f"(test_is_compiling.py:{LINE})" in note
    assert 'compiler="eager"' in note


def test_nothing_is_said_of_a_model_that_is_not_captured_and_of_what_torchs_own_modules_ask():
    assert not asks(report_of(Asks(), "eager"))
    hooked = Net()
    hooked.first.register_forward_hook(lambda module, given, made: made * 2.0)  # where torch asks
    assert not asks(report_of(hooked, "fx"))


def test_verification_says_that_only_the_compiled_way_was_compared():
    verified = report_of(Asks(), "fx", verify=True).verified
    assert "only what its code does when it is compiled was compared" in str(verified)
    assert "but for what is named above" in _verdict(0, [verified])
