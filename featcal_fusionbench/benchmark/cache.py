"""Where the embedded benchmarks keep their builds: what a build is made of names its directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class BenchmarkRecipe:
    """Everything that changes a weight or an input of a build.

    Builds lie in a directory named after the hash of their recipe, so a changed recipe never finds
    the parts of another one. Two equal recipes give equal builds on one machine.

    Attributes:
        benchmark: Directory of all its builds, below the cache.
        directory_variable: Environment variable by which the YAML files find a build.
        format_version: Raised when the code (not the recipe) changes what a build contains.
        seed: Seeds all that is drawn.
    """

    benchmark: ClassVar[str]
    directory_variable: ClassVar[str]
    format_version: ClassVar[int]

    seed: int = 0

    def digest(self) -> str:
        """Hash of the recipe and the format version, 12 hexadecimal digits."""
        document = {"format": self.format_version, "recipe": dataclasses.asdict(self)}
        text = json.dumps(document, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def directory(self) -> Path:
        """Directory of this recipe's build, whether it exists or not."""
        return cache_root() / self.benchmark / f"{self.digest()}-seed{self.seed}"

    @classmethod
    def default_link(cls) -> Path:
        """Stable path of the default recipe's build: what the YAML files point to."""
        return cache_root() / cls.benchmark / "default"


@dataclass(frozen=True)
class ExpertRecipe:
    """Fine-tuning of one expert."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.01

    @property
    def schedule(self) -> dict[str, Any]:
        """What ``training.minimise`` needs to know."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "batch_size"}


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
