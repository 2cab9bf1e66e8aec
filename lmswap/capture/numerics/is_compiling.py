"""Detects model code that calls ``is_compiling``, and may then compute something else than in eager mode.

Seen in transformers 5.23 with torch 2.13 (huggingface/transformers#48925): Llama creates an attention mask only when it
is compiled, and rounds differently with it. torch's answer is kept: the eager branch often cannot be captured by
torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lmswap.torch_compat.dynamo import IS_COMPILING, replaced_handlers
from lmswap.user_frame import is_users

# torch's own caller: not compiled and without gradients, it packs unmasked positions and returns zeros for the rest.
_TRANSFORMER = nn.modules.transformer.__file__


@contextmanager
def detect_is_compiling_calls(lines: list[str]) -> Iterator[None]:
    """Add to ``lines``, while Dynamo captures within, the lines of user code that call it: "model.py:12"."""

    def handle(answer: Callable[..., Any], question: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        path = tracer.f_code.co_filename
        if is_users(path) or path == _TRANSFORMER:
            lines.append(f"{path.rsplit('/', 1)[-1]}:{tracer.lineno}")
        return answer(question, tracer, *args, **kwargs)

    with replaced_handlers(IS_COMPILING, handle):
        yield


def describe_is_compiling_calls(lines: list[str]) -> str:
    """Return a sentence for the report."""
    return (
        f"its code calls is_compiling ({', '.join(dict.fromkeys(lines))}), and may compute something else there than "
        'plain torch, with other rounding; compiler="eager" runs the code of plain torch'
    )
