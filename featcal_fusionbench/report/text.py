"""Numbers and names as people read them."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_change", "format_duration", "relative_name", "split_index"]


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


def relative_name(name: str, parent: str) -> str:
    """The dotted ``name`` as seen from ``parent``; the whole name where it is not below it."""
    return name[len(parent) + 1 :] if parent and name.startswith(parent + ".") else name


def split_index(name: str) -> tuple[str, int | None]:
    """Split ``encoder.block.3`` into ``encoder.block`` and 3; the index is None without one."""
    head, _, tail = name.rpartition(".")
    return (head, int(tail)) if tail.isdecimal() else (name, None)
