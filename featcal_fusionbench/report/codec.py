"""Dataclasses to strict JSON values and back, guided by the type annotations.

JSON has no NaN and no infinities, and a file that contains them as bare tokens is unreadable for
most parsers. They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Where
the annotation says ``float`` they come back as floats; inside free-form values they stay strings.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ReportError

__all__ = ["dumps", "from_json", "to_json"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> Any:
    """Turn a value into one that strict JSON can hold.

    A report must not be lost at the end of a long run because a configuration holds an unusual
    object, so this never refuses: what has no JSON form (paths, dtypes, devices) becomes its text.

    Args:
        value: A scalar, datetime, dataclass, mapping or sequence, nested at will. Mapping keys
            become strings.

    Returns:
        The same content in dicts with string keys, lists, strings, finite numbers, booleans, None.
    """
    if isinstance(value, Enum):
        return to_json(value.value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if isinstance(value, datetime):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_json(item) for item in value]
    return str(value)


def from_json(kind: Any, value: Any, where: str = "the report") -> Any:
    """Build a value of an annotated type from what ``to_json`` made of it.

    Args:
        kind: A dataclass, ``tuple[T, ...]``, ``tuple[T, U]``, ``dict[str, T]``, ``T | None``,
            ``T | dict[str, U]``, ``Literal``, ``datetime``, ``float``, ``int``, ``bool``, ``str``
            or ``Any``.
        value: The JSON value.
        where: Where the value stands, for the message.

    Raises:
        ReportError: The value does not fit the type; the message names the place.
        TypeError: The type is none of the above.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union_from_json(args, value, where)
    if origin is Literal:
        if value not in args:
            raise _misfit(where, f"one of {', '.join(map(repr, args))}", value)
        return value
    if origin is tuple:
        items = _require(list, "a list", value, where)
        kinds = args[:1] * len(items) if args[-1] is Ellipsis else args
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(from_json(kind, item, f"{where}[{i}]") for i, (kind, item) in pairs)
    if origin is dict:
        items = _require(dict, "an object", value, where)
        return {key: from_json(args[1], item, f"{where}.{key}") for key, item in items.items()}
    if is_dataclass(kind):
        return _dataclass_from_json(kind, value, where)
    return _scalar_from_json(kind, value, where)


def dumps(value: Any) -> str:
    """Format a JSON value, indented, but with each list of scalars on a single line.

    Sample indices would otherwise take a line each, thousands in a report of eight tasks.

    Raises:
        ValueError: The value holds a NaN or an infinity; ``to_json`` removes them.
    """
    return _format(value, "") + "\n"


def _union_from_json(args: tuple[Any, ...], value: Any, where: str) -> Any:
    kinds = [kind for kind in args if kind is not type(None)]
    if value is None and len(kinds) < len(args):
        return None
    if len(kinds) > 1:  # a dict and another type: told apart by the value's form
        kinds = [k for k in kinds if (get_origin(k) is dict) == isinstance(value, dict)]
    if len(kinds) != 1:
        raise TypeError(
            f"{where}: only unions of one type with a dict or None have a JSON form, not {args}."
        )
    return from_json(kinds[0], value, where)


def _dataclass_from_json(kind: Any, value: Any, where: str) -> Any:
    items = _require(dict, "an object", value, where)
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind) if field.init]
    unknown = sorted(set(items) - set(known))
    if unknown:
        raise ReportError(f"{where} has unknown entries: {', '.join(unknown)}.")
    values = {
        name: from_json(hints[name], items[name], f"{where}.{name}")
        for name in known
        if name in items
    }
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # an entry is missing, or outside its range
        raise ReportError(f"{where} is not a {kind.__name__}: {error}") from error


def _scalar_from_json(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _misfit(where, "a number", value)
        return float(value)
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _misfit(where, "a whole number", value)
        return value
    if kind is bool:
        return _require(bool, "true or false", value, where)
    if kind is str:
        return _require(str, "a string", value, where)
    if kind is datetime:
        text = _require(str, "an ISO 8601 time", value, where)
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise _misfit(where, "an ISO 8601 time", value) from error
    raise TypeError(f"{where}: {kind!r} has no JSON form here.")


def _require(kind: type, description: str, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise _misfit(where, description, value)
    return value


def _misfit(where: str, expected: str, value: Any) -> ReportError:
    return ReportError(f"{where} should be {expected}, not {value!r:.80}.")


def _format(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = (f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _format(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
