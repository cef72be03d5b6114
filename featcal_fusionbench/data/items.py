"""Items of data sets: which column holds the input, and which items cannot be used, and why."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Problems", "UnusableItem", "input_column", "reason_of", "whole_numbers"]

_SHOWN = 5


class UnusableItem(ValueError):
    """An item that cannot be an input; the message says what is wrong, and what to do."""


def input_column(
    item: Mapping[str, Any],
    chosen: str | None,
    preferred: Sequence[str],
    known: Sequence[str],
    what: str,
    *,
    beside: Sequence[str] = (),
) -> str:
    """The column of a row that holds the input.

    Args:
        item: The row.
        chosen: The setting ``input_column``, for the row's task.
        preferred: Columns that are taken before any others, the first of them that is there.
        known: Columns that are taken where the row has exactly one of them.
        what: What the column holds, for messages.
        beside: Columns that are not taken, and beside which none of the known ones is: it would be
            a part of the input only.

    Raises:
        UnusableItem: The chosen column is not there, or none or several of the known ones are.
    """
    columns = [str(key) for key in item]
    if chosen is not None:
        if chosen in item:
            return chosen
        (close,) = difflib.get_close_matches(chosen, columns, n=1) or ("",)
        hint = f": did you mean {close}?" if close else ""
        raise UnusableItem(f"no column {chosen!r} (input_column) among {_named(columns)}{hint}")
    for column in preferred:
        if column in item:
            return column
    found = [column for column in known if column in item]
    further = [column for column in beside if column in item]
    if len(found) == 1 and not further:
        return found[0]
    found += further
    missing = f"no column {preferred[0]!r} of {what}, nor another known one,"
    several = f"several columns that may hold {what} ({_named(found)})"
    raise UnusableItem(
        f"{several if found else missing} among {_named(columns)}: set method.input_column to "
        "the one to read"
    )


def whole_numbers(value: Any, name: str, *, may_be_bool: bool = False) -> Tensor:
    """A row's numbers as a tensor of one dimension.

    Args:
        value: A list, array or tensor of shape (n,), or (1, n), as tokenizers give one text.
        name: What it is, for messages.
        may_be_bool: Whether true and false stand for 1 and 0.

    Raises:
        UnusableItem: It is of another shape, or its elements are no whole numbers.
    """
    if not isinstance(value, Sequence | np.ndarray | Tensor) or isinstance(value, str | bytes):
        raise UnusableItem(f"{name} of type {type(value).__name__}, not a list of token ids")
    try:
        numbers = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    except ValueError as error:
        raise UnusableItem(f"{name} with nested lists of unlike lengths") from error
    while numbers.ndim > 1 and numbers.shape[0] == 1:
        numbers = numbers[0]
    if numbers.ndim != 1:
        raise UnusableItem(f"{name} of shape {numbers.shape}, not one list of token ids")
    kinds = "iub" if may_be_bool else "iu"
    is_whole = numbers.dtype.kind in kinds or (
        numbers.dtype.kind == "f"
        and bool((np.isfinite(numbers) & (numbers == np.floor(numbers))).all())
    )
    if not is_whole:
        raise UnusableItem(f"{name} with elements that are no whole numbers")
    return torch.from_numpy(numbers.astype(np.int64))


def reason_of(error: Exception) -> str:
    """Why an item cannot be used, in the words of what was raised, which name no object's address.

    Items that cannot be used for one reason are then said to be so together.
    """
    words = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    return words if isinstance(error, UnusableItem) else f"{type(error).__name__}: {words}"


class Problems:
    """What is wrong with a task's items: reasons, and the items that each of them is said of."""

    def __init__(self) -> None:
        self._items: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, reason: str, index: int) -> None:
        """Note a reason why an item cannot be used."""
        self._items.setdefault(reason, []).append(index)

    def __str__(self) -> str:
        """The first reasons, each with its first items, and how many more there are."""
        parts = [f"{why} in {_some(where)}" for why, where in self._items.items()]
        rest = list({i for where in list(self._items.values())[_SHOWN:] for i in where})
        if rest:
            parts = [*parts[:_SHOWN], f"other reasons in {_some(rest)}"]
        return "; ".join(parts)


def _some(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    first = ", ".join(map(str, sorted(indices)[:_SHOWN]))
    return f"item{'s' * (len(indices) > 1)} {first}{more}"


def _named(columns: Iterable[str]) -> str:
    return ", ".join(sorted(columns))
