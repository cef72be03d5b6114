"""Standard output and error of a run: a full disk or a closed pipe behind them ends nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, cast

__all__ = ["forgiving_streams"]


@contextmanager
def forgiving_streams() -> Iterator[None]:
    """Let what the block prints get lost where it cannot be written.

    It covers everyone who prints: this package's tables, progress bars and upstream mergers.
    """
    # cast: it has what the stream has, through __getattr__
    with (
        redirect_stdout(cast(Any, _Forgiving(sys.stdout))),
        redirect_stderr(cast(Any, _Forgiving(sys.stderr))),
    ):
        yield


class _Forgiving:
    """A text stream of which writing never fails; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: closed, or an encoding without the letter
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass
