"""JSON text of machines, networks, programs and plans, and readers that reject damaged text with an `OptionError`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from lmswap.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record")


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """The fields of ``record`` by name, not copied: asdict takes five times as long."""
    return {name: getattr(record, name) for name in _field_names(type(record))}


@cache
def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def as_json(data: Mapping[str, Any]) -> str:
    """``data`` as compact JSON text; dataclasses in it by their fields."""
    return json.dumps(data, default=fields_of, separators=(",", ":"))


def read_record(text: str, schema: str, build: Callable[[Mapping[str, Any]], _Record], what: str) -> _Record:
    """Parses ``text`` and builds a record from it.

    Args:
        text: a JSON object.
        schema: what its field "schema" must be.
        build: makes the record from the object's fields.
        what: the kind of record in messages, such as "plan file".

    Raises:
        OptionError: not JSON, of another schema, or a field is missing or of another kind.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # of bad JSON, and of integers with too many digits
        raise OptionError(f"not a {what}: {error}") from error
    return build_record(data, schema, build, what)


def build_record(data: Any, schema: str, build: Callable[[Mapping[str, Any]], _Record], what: str) -> _Record:
    """As `read_record`, of parsed JSON."""
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise OptionError(f"not a {what}: expected schema '{schema}'")
    try:
        return build(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{what} is damaged: {type(error).__name__} {error}") from error
