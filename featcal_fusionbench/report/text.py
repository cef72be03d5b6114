"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = [
    "common_prefix",
    "format_bytes",
    "format_change",
    "format_duration",
    "format_scientific",
    "relative_name",
    "split_index",
]


def format_bytes(count: float) -> str:
    """A size in binary units: ``3.1 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """A time span: ``4.2 s`` below a minute, ``h:mm:ss`` from there on."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_change(before: float, after: float) -> str:
    """The relative change in percent, with its sign; ``-`` where it is undefined."""
    change = 100 * (after / before - 1) if before else math.nan
    return f"{change:+.1f}%" if math.isfinite(change) else "-"


def format_scientific(value: float | None) -> str:
    """Two significant digits; ``-`` for None and a plain ``0`` for zero."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def relative_name(name: str, parent: str) -> str:
    """The dotted ``name`` as seen from ``parent``; the whole name where it is not below it."""
    return name[len(parent) + 1 :] if parent and name.startswith(parent + ".") else name


def split_index(name: str) -> tuple[str, int | None]:
    """Split ``encoder.block.3`` into ``encoder.block`` and 3; the index is None without one."""
    head, _, tail = name.rpartition(".")
    return (head, int(tail)) if tail.isdecimal() else (name, None)


def common_prefix(names: Iterable[str]) -> str:
    """The longest dotted prefix that all names share and that is none of them in whole."""
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
