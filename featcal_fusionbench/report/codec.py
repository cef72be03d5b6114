"""Dataclasses to strict JSON values and back, by cattrs, guided by the type annotations.

JSON has no NaN and no infinities, and a file that contains them as bare tokens is unreadable for
most parsers. They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Where
the annotation says ``float`` they come back as floats; inside free-form values they stay strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import is_dataclass
from datetime import datetime
from itertools import islice
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from cattrs import (
    AttributeValidationNote,
    BaseValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.cols import homogenous_tuple_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn
from cattrs.strategies import configure_union_passthrough

from .errors import ReportError

__all__ = ["dumps", "from_json", "to_json"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_COMPLAINTS = 3

_Structure = Callable[[Any, Any], Any]
"""Builds a value of a type, the second argument, from a JSON value."""


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
    return _converter.unstructure(value)


def from_json(kind: Any, value: Any, where: str = "the report") -> Any:
    """Build a value of an annotated type from what ``to_json`` made of it.

    Args:
        kind: A dataclass, ``tuple[T, ...]``, ``tuple[T, U]``, ``dict[str, T]``, ``T | None``,
            ``str | dict[str, T] | None``, ``Literal``, ``datetime``, ``float``, ``int``, ``bool``,
            ``str`` or ``Any``.
        value: The JSON value.
        where: Where the value stands, for the message.

    Raises:
        ReportError: The value does not fit the type; the message names the place.
    """
    try:
        return _converter.structure(value, kind)
    except (BaseValidationError, ValueError) as error:
        complaints = islice(_complaints(error, where), _MOST_COMPLAINTS)
        raise ReportError(" ".join(complaints)) from error


def dumps(value: Any) -> str:
    """Format a JSON value, indented, but with each list of scalars on a single line.

    Sample indices would otherwise take a line each, thousands in a report of eight tasks.

    Raises:
        ValueError: The value holds a NaN or an infinity; ``to_json`` removes them.
    """
    return _format(value, "") + "\n"


def _format(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = (f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _format(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


class _Misfit(ValueError):
    """A value is not what its place asks for."""

    def __init__(self, words: str, value: Any) -> None:
        super().__init__(f"should be {words}, not {value!r:.80}.")


def _complaints(error: Exception, where: str) -> Iterator[str]:
    """A sentence for each thing that is wrong at a place or below it."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _complaints(inner, where + _step(inner))
    elif isinstance(error, ForbiddenExtraKeysError):
        yield f"{where} has unknown entries: {', '.join(sorted(error.extra_fields))}."
    elif isinstance(error, KeyError):
        yield f"{where} is missing."
    elif isinstance(error, _Misfit):
        yield f"{where} {error}"
    else:  # what a dataclass says of its values
        yield f"{where}: {error}"


def _step(error: Exception) -> str:
    """The attribute, index or key at which an error happened."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}"
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]" if isinstance(note.index, int) else f".{note.index}"
    return ""


def _real_to_json(value: Real) -> float | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _float_from_json(value: Any, kind: Any) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if type(value) not in (int, float):
        raise _Misfit("a number", value)
    return float(value)


def _time_from_json(value: Any, kind: Any) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise _Misfit("an ISO 8601 time", value) from error


def _choice_from_json(value: Any, kind: Any) -> Any:
    if value not in get_args(kind):
        raise _Misfit(f"one of {', '.join(map(repr, get_args(kind)))}", value)
    return value


def _strict(words: str, form: type, structure: _Structure = lambda value, _: value) -> _Structure:
    """Refuse what has another form in JSON: cattrs alone would make the number 3 of "3"."""

    def checked(value: Any, kind: Any) -> Any:
        if type(value) is not form:
            raise _Misfit(words, value)
        return structure(value, kind)

    return checked


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, unstructure_fallback_factory=lambda _: str)
    for kind, hook in (  # of those that fit a value's class, the most special one is taken
        (Sequence, lambda value: [converter.unstructure(item) for item in value]),
        (Mapping, lambda value: {str(k): converter.unstructure(v) for k, v in value.items()}),
        (str, lambda value: value if isinstance(value, str) else str(value)),
        (bytes, str),
        (bytearray, str),
        (Set, str),
        (type(None), lambda value: value),
        (Real, _real_to_json),
        (datetime, datetime.isoformat),
    ):
        converter.register_unstructure_hook(kind, hook)

    for kind, words in ((str, "a string"), (bool, "true or false"), (int, "a whole number")):
        converter.register_structure_hook(kind, _strict(words, kind))
    converter.register_structure_hook(float, _float_from_json)
    converter.register_structure_hook(datetime, _time_from_json)
    for fits, words, form, factory in (
        (is_dataclass, "an object", dict, make_dict_structure_fn),
        (_made_from(dict), "an object", dict, mapping_structure_factory),
        (_is_list, "a list", list, homogenous_tuple_structure_factory),
    ):
        converter.register_structure_hook_factory(
            fits,
            lambda kind, own, words=words, form=form, factory=factory: _strict(
                words, form, factory(kind, own)
            ),
        )
    converter.register_structure_hook_func(_made_from(Literal), _choice_from_json)
    configure_union_passthrough(str | None, converter)
    return converter


def _made_from(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


_converter = _make_converter()
