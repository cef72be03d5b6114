"""Temporary directories that do not outlive their run, even one that was killed."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["scratch_directory"]

log = logging.getLogger(__name__)

_PREFIX = "featcal-scratch-"
_NAME = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{16}")


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory in the system's temporary directory, removed when the block ends.

    A lock beside it tells whether its process is alive. Those that killed processes of this user
    have left are removed first.

    Yields:
        The directory, which no other user can read.
    """
    root = Path(tempfile.gettempdir())
    _remove_leftovers(root)
    directory = root / (_PREFIX + secrets.token_hex(8))
    lock = _lock(directory)
    # A file system without locks does without: there leftovers stay.
    with suppress(OSError, NotImplementedError):
        lock.acquire(timeout=0)  # before the directory is there: what nobody holds may be removed
    try:
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        _remove(directory)
        lock.release()


def _remove_leftovers(root: Path) -> None:
    """Remove what dead processes have left; what cannot be removed is left where it is."""
    for directory in root.glob(_PREFIX + "*"):
        # A directory without its lock file was not left by us, or somebody is clearing up already.
        if not (_NAME.fullmatch(directory.name) and _lock_path(directory).is_file()):
            continue
        with suppress(Timeout, OSError, NotImplementedError):
            status = directory.lstat()
            mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()  # Windows: my own
            if not stat.S_ISDIR(status.st_mode) or not mine:
                continue
            with _lock(directory).acquire(timeout=0):
                _remove(directory)
                log.info("removed %s, which a run that was killed had left", directory)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        _lock_path(directory).unlink(missing_ok=True)


def _lock(directory: Path) -> FileLock:
    return FileLock(_lock_path(directory), mode=0o600)


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")
