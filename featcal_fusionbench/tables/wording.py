"""How the tables write numbers."""

from __future__ import annotations

from ..report.text import format_bytes
from .summary import Spread

__all__ = [
    "MINUS",
    "NONE",
    "bytes_text",
    "number_text",
    "percent",
    "seconds_text",
]

NONE = "–"
"""Stands where there is no value."""
MINUS = "\N{MINUS SIGN}"


def percent(value: float | None, signed: bool = False) -> str:
    """A fraction in percent with one decimal; ``NONE`` for None."""
    if value is None:
        return NONE
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    if float(text) == 0:  # the sign of a zero says nothing
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def seconds_text(spread: Spread | None) -> str:
    """Mean seconds, with a decimal below ten."""
    if spread is None:
        return NONE
    return f"{spread.mean:.0f}" if spread.mean >= 10 else f"{spread.mean:.1f}"


def bytes_text(count: int | None) -> str:
    """A size in binary units."""
    return NONE if count is None else format_bytes(count)


def number_text(value: float | str) -> str:
    """A swept value as it would be typed."""
    return value if isinstance(value, str) else f"{value:g}"
