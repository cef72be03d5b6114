"""Directories and links that are there completely, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends without an exception.

    The temporary directory lies beside the target (``os.replace`` needs one file system) and is
    removed if the block raises. If another process made ``target`` meanwhile, its copy is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        # mkdtemp makes private directories; a cache shared by a group should stay readable.
        scratch.chmod(0o755)
        try:
            os.replace(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_link(link: Path, target: Path) -> None:
    """Point the symbolic ``link`` to its sibling ``target`` in one step."""
    with tempfile.TemporaryDirectory(prefix=f".{link.name}-", dir=link.parent) as folder:
        scratch = Path(folder) / link.name
        # relative to the link's directory, so that a moved cache keeps working
        scratch.symlink_to(target.name)
        os.replace(scratch, link)
