"""Giving freed memory back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["give_back_freed_memory"]


def give_back_freed_memory() -> None:
    """Return freed pages of the heap to the system; does nothing where the C library is not glibc.

    Paused forwards hold tensors among the freed ones of those that ran through. glibc keeps such
    holes for later, and the process grows to a multiple of what is alive.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (AttributeError, OSError):  # another system, or another C library
        return None
