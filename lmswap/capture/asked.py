"""Does the model's own code ask whether it is being compiled? It may go another way then than in plain torch.

Seen in transformers: Llama makes a mask for its attention only where it is compiled, and rounds otherwise with it. The
answer stays torch's: the other way is often one that torch.compile cannot capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.variables import TorchInGraphFunctionVariable

from lmswap.userline import is_users

_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._utils.is_compiling,
    torch._dynamo.external_utils.is_compiling,
)

# It packs what no mask hides where it is not compiled and needs no gradient, and gives zeros for the rest.
_ASKS_TOO = nn.modules.transformer.__file__


@contextmanager
def heard_questions() -> Iterator[list[str]]:
    """Gives the lines of the model's code that ask while Dynamo captures meanwhile: "model.py:12"."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    answers = {question: handlers[question] for question in _QUESTIONS if question in handlers}
    lines: list[str] = []

    def handle(question: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        path = tracer.f_code.co_filename
        if is_users(path) or path == _ASKS_TOO:
            lines.append(f"{path.rsplit('/', 1)[-1]}:{tracer.lineno}")
        return answers[question.value](question, tracer, *args, **kwargs)

    handlers.update(dict.fromkeys(answers, handle))
    try:
        yield lines
    finally:
        handlers.update(answers)


def describe_questions(lines: list[str]) -> str:
    """A sentence on what follows."""
    return (
        f"its code asks whether it is compiled ({', '.join(dict.fromkeys(lines))}), and may go another way there than "
        'in plain torch, with other rounding; compiler="eager" goes the way of plain torch'
    )
