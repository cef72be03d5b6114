"""How tables and figures write numbers and machines."""

from __future__ import annotations

import math

from ..report.run_report import Machine
from ..report.text import format_bytes

__all__ = ["MINUS", "NONE", "bytes_text", "machine_text", "number_text", "percent", "seconds_text"]

NONE = "–"
"""Stands where there is no value."""
MINUS = "\N{MINUS SIGN}"


def percent(value: float, signed: bool = False) -> str:
    """A fraction in percent with one decimal; ``NONE`` for NaN."""
    if math.isnan(value):
        return NONE
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    if float(text) == 0:  # the sign of a zero says nothing
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def seconds_text(seconds: float) -> str:
    """Seconds, with a decimal below ten; ``NONE`` for NaN."""
    if math.isnan(seconds):
        return NONE
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def bytes_text(count: float) -> str:
    """A size in binary units; ``NONE`` for NaN."""
    return NONE if math.isnan(count) else format_bytes(count)


def number_text(value: float | str) -> str:
    """A swept value as it would be typed, with all its digits."""
    if isinstance(value, str):
        return value
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def machine_text(machine: Machine) -> str:
    """What a machine's times depend on. Equal for machines of one kind."""
    memory = f", {format_bytes(machine.memory_bytes)}" if machine.memory_bytes else ""
    gpus = "".join(f", {gpu}" for gpu in machine.gpus)
    cores = f"{machine.cores} cores, {machine.threads} threads of torch"
    return f"{machine.cpu}, {cores}{memory}{gpus}; {machine.system}"
