"""A model that calls `is_compiling` is reported: its results may differ from plain torch."""

import inspect

import torch

import lmswap
from lmswap.cli.verify import _verdict
from tests.both_paths import Net, batch, swapping


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


def test_the_line_that_calls_is_compiling_is_named_once():
    (note,) = asks(report_of(Asks(), "fx"))
    assert f"(test_is_compiling.py:{LINE})" in note
    assert 'compiler="eager"' in note


def test_no_note_without_graphs_or_on_calls_by_torchs_modules():
    assert not asks(report_of(Asks(), "eager"))
    hooked = Net()
    hooked.first.register_forward_hook(lambda module, given, made: made * 2.0)  # of a call by torch itself
    assert not asks(report_of(hooked, "fx"))


def test_verification_reports_that_only_compiled_code_was_compared():
    verified = report_of(Asks(), "fx", verify=True).verified
    assert "only what its code does when it is compiled was compared" in str(verified)
    assert "but for what is named above" in _verdict(0, [verified])
