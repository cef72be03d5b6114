"""SIGTERM and SIGHUP end a run as Ctrl-C does: what was begun is put away and reported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "deferred", "terminable"]

# Windows has no SIGHUP.
_ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Terminated(SystemExit):
    """A signal asked the process to end; left alone, it does so with status 128 + the signal.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._name = signal.Signals(number).name

    def __str__(self) -> str:
        return self._name


@contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` in the block when SIGTERM or SIGHUP arrives.

    A signal with a handler is left to it: a launcher's, the user's own, one that ``nohup`` set to
    be ignored. Outside the main thread, which alone can set handlers, nothing changes.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    with _handled(_ENDING, end, lambda old: old is signal.SIG_DFL):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the block has ended; for short blocks."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        # None: a handler that was not set from Python, and could not be set again
        with _handled(
            (signal.SIGINT, *_ENDING), note, lambda old: old not in (signal.SIG_IGN, None)
        ):
            yield
    finally:
        for number in arrived[:1]:
            signal.raise_signal(number)


@contextmanager
def _handled(
    signals: tuple[signal.Signals, ...],
    handler: Callable[[int, FrameType | None], None],
    replaces: Callable[[object], bool],
) -> Iterator[None]:
    """Handle those of the signals whose present handler may be replaced."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: old for s in signals if replaces(old := signal.getsignal(s))}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
