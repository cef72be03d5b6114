"""Files that are either complete or not there: atomic writes, and a check before long work."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .codec import dumps, to_json
from .errors import ReportError, UnwritableDirectoryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "atomic_file",
    "read_json",
    "require_writable",
    "write_bytes",
    "write_figure",
    "write_json",
    "write_text",
]


@contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file that takes its place only once it is complete and on disk.

    What was at ``path`` stays untouched until then, and for good if the body or the disk fails.

    Args:
        path: Where the file is to be; missing directories are made.

    Yields:
        A temporary file in the same directory, open for writing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile.mkstemp: its files are readable by their owner only, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already where it was moved into place


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write bytes atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: str | Path, text: str) -> None:
    """Write text atomically, in UTF-8 and with line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as strict JSON, atomically; see ``codec.to_json`` for what becomes of what."""
    write_text(path, dumps(to_json(value)))


def write_figure(path: str | Path, figure: Figure, dpi: int = 150) -> None:
    """Write a figure atomically, in the format that the file's suffix names.

    Args:
        path: Where the picture is to be; ``.png``, ``.pdf`` or ``.svg``.
        figure: A figure made with matplotlib's object API.
        dpi: Pixels per inch of the figure's size, where it has pixels.
    """
    with atomic_file(path) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix("."), dpi=dpi)


def read_json(path: str | Path) -> Any:
    """Read a strict JSON file.

    Raises:
        ReportError: The file is half-written, or not JSON at all.
        OSError: The file cannot be opened.
    """
    path = Path(path)

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        return json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse)
    except ValueError as error:  # also undecodable bytes and syntax errors
        raise ReportError(
            f"{path} is not a complete JSON file ({error}). It was cut off or belongs to something "
            f"else: delete it, or run again to write it anew."
        ) from error


def require_writable(directory: str | Path, setting: str) -> Path:
    """Make sure that results can be written to a directory, before hours of work depend on it.

    A file is really written and removed, since permission bits say little about network file
    systems, full quotas and read-only mounts. The directory is made if it is missing.

    Args:
        directory: The directory.
        setting: Name of the setting that the directory comes from.

    Returns:
        The directory as a path.

    Raises:
        UnwritableDirectoryError: It cannot be made or written to.
    """
    directory = Path(directory)
    probe = directory / f".write-test.{secrets.token_hex(6)}.tmp"
    try:
        write_bytes(probe, b"\0")
        probe.unlink()
    except OSError as error:
        raise UnwritableDirectoryError(
            f"Cannot write to {directory} ({error}). Set {setting} to a directory that can be "
            f"written to, or mend its permissions or free space."
        ) from error
    return directory
