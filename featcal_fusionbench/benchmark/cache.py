"""Where the embedded benchmarks keep their parts, and how a recipe names its directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "FEATCAL_CACHE_DIR"
"""Environment variable that overrides the cache directory."""


def cache_root() -> Path:
    """``$FEATCAL_CACHE_DIR``, else ``featcal-fusionbench`` in the user's cache directory (XDG).

    The same rule is spelt out in the YAML files of the pools; change them together.
    """
    if override := os.environ.get(CACHE_VARIABLE):
        return Path(override).expanduser()
    home = Path(os.environ.get("HOME", str(Path.home())))
    base = Path(os.environ.get("XDG_CACHE_HOME", str(home / ".cache")))
    return base / "featcal-fusionbench"


def recipe_digest(recipe: Any, format_version: int) -> str:
    """Hash of a recipe (a dataclass) and its format version, 12 hexadecimal digits."""
    document = {"format": format_version, "recipe": dataclasses.asdict(recipe)}
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Parts:
    """Paths of a build, as far as every benchmark has them."""

    directory: Path

    def expert(self, task: str) -> Path:
        """Expert of a task."""
        return self.directory / "experts" / task

    def cell(self, name: str) -> Path:
        """Kept result of a demo's cell that depends on the build alone."""
        return self.directory / "cells" / name / "cell.json"
