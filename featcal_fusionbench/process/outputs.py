"""Whether what is written at the end of a run can be written, asked before the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import OutputError
from ..report import UnwritableDirectoryError, require_writable
from ..report.text import format_bytes

__all__ = ["in_log_dir", "require_room", "require_savable"]


def require_savable(path: str | Path, setting: str, *, is_directory: bool) -> None:
    """Make sure that a file or a directory can be written to a path; nothing is left there.

    Args:
        path: Where it is to be; missing directories above it are made when it is written.
        setting: Name of the setting that the path comes from.
        is_directory: Whether a directory will be written, and not one file.

    Raises:
        OutputError: It cannot be written.
    """
    path = Path(path)
    named = f"{setting}={path}"
    if not is_directory and path.is_dir():
        raise OutputError(f"{named} is a directory: give the path of a file.")
    folder = path if is_directory else path.parent
    above = _existing(folder)
    if not above.is_dir():
        raise OutputError(f"{named} cannot be written: {above} is a file. Give another path.")
    try:
        require_writable(above, setting)
        if path.is_file():
            open(path, "r+b").close()
    except (UnwritableDirectoryError, OSError) as error:
        raise OutputError(f"{named} cannot be written: {error}") from error


def require_room(path: str | Path, size: int, setting: str) -> None:
    """Make sure that there is room where something is to be written.

    Args:
        path: Where it is to be; what is missing of the path will be made on the same disk.
        size: Its bytes.
        setting: Name of the setting that the path comes from.

    Raises:
        OutputError: Less is free.
    """
    free = shutil.disk_usage(_existing(Path(path))).free
    if free < size:
        raise OutputError(
            f"{setting}={path}: the model takes {format_bytes(size)} and {format_bytes(free)} are "
            "free there. Free some space, or give a path on another disk."
        )


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())


def in_log_dir(path: str, log_dir: str | Path | None, setting: str) -> str:
    """A path of FusionBench's program, with the log directory put in as the program will.

    Args:
        path: The path, perhaps with ``{log_dir}`` in it.
        log_dir: The log directory; None where there is none.
        setting: Name of the setting that the path comes from.

    Raises:
        OutputError: Something else stands in braces.
    """
    if "{log_dir}" not in path or log_dir is None:
        return path
    try:
        return path.format(log_dir=log_dir)
    except (AttributeError, LookupError, ValueError) as error:
        raise OutputError(
            f"{setting}={path}: {{log_dir}} is all that can stand in braces. Take out the others."
        ) from error
