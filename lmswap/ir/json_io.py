"""JSON text of machines, networks, programs and plans, and readers that reject damaged text with an `OptionError`."""

from __future__ import annotations

import json
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from lmswap.errors import LmswapError, OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record")
_Data = TypeVar("_Data", bound="DataclassInstance")


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """The fields of ``record`` by name, not copied: asdict takes five times as long."""
    names, values_of = _getter(type(record))
    return dict(zip(names, values_of(record), strict=True))


@cache
def _getter(kind: type[DataclassInstance]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of the fields of ``kind``, and a function that reads them all."""
    names = tuple(field.name for field in fields(kind))
    read = operator.attrgetter(*names)
    return names, read if len(names) > 1 else lambda record: (read(record),)


def as_json(data: Mapping[str, Any]) -> str:
    """``data`` as compact JSON text; dataclasses in it by their fields."""
    return json.dumps(data, default=fields_of, separators=(",", ":"))


def read_record(
    text: str,
    schema: str,
    build: Callable[[Mapping[str, Any]], _Record],
    what: str,
    error: type[LmswapError] = OptionError,
) -> _Record:
    """Parses ``text`` and builds a record from it.

    Args:
        text: a JSON object.
        schema: what its field "schema" must be.
        build: makes the record from the object's fields.
        what: the kind of record in messages, such as "plan file".
        error: what is raised if the text is not JSON, of another schema, or a field is missing or of another kind.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as cause:  # of bad JSON, and of integers with too many digits
        raise error(f"not a {what}: {cause}") from cause
    return build_record(data, schema, build, what, error)


def build_record(
    data: Any,
    schema: str,
    build: Callable[[Mapping[str, Any]], _Record],
    what: str,
    error: type[LmswapError] = OptionError,
) -> _Record:
    """As `read_record`, of parsed JSON."""
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if found != schema:
        raise error(f"not a {what}: expected schema '{schema}', found {found!r}")
    try:
        return build(data)
    except LmswapError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as cause:
        raise error(f"{what} is damaged: {type(cause).__name__} {cause}") from cause


def from_fields(kind: type[_Data], data: Mapping[str, Any]) -> _Data:
    """Builds a dataclass from parsed JSON, the inverse of `as_json`; a missing field takes its default.

    Fields may be numbers, strings, enums and dataclasses, optional ones, and tuples and dicts of these.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: a field is missing or of another type.
    """
    needed, optional = _readers(kind)
    known = data.keys()
    values = {name: read(data[name]) for name, read in needed}
    for name, read in optional:
        if name in known:
            values[name] = read(data[name])
    return kind(**values)


_Readers = list[tuple[str, Callable[[Any], Any]]]


@cache
def _readers(kind: type[DataclassInstance]) -> tuple[_Readers, _Readers]:
    """What reads each field of ``kind``: of those without a default, and of the others."""
    hints = get_type_hints(kind)
    found: tuple[_Readers, _Readers] = ([], [])
    for field in fields(kind):
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        found[has_default].append((field.name, _reader(hints[field.name])))
    return found


def _reader(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # X | None
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    readers = [_reader(argument) for argument in arguments if argument is not ...]
    if origin is tuple and ... in arguments:
        return lambda value: tuple(map(readers[0], value))
    if origin is tuple:
        return lambda value: tuple(read(part) for read, part in zip(readers, value, strict=True))
    if origin is dict:
        return lambda value: {readers[0](key): readers[1](part) for key, part in value.items()}
    return partial(from_fields, hint) if isinstance(hint, type) and is_dataclass(hint) else hint
