"""The directory of a mirror: the layout of the hub's cache, and the marker that says what it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.constants import REPO_ID_SEPARATOR

from ..benchmark.storage import atomic_directory
from ..report.errors import ReportError
from ..report.files import read_json, write_json, write_text
from .errors import MirrorError

__all__ = ["WARNING", "Home", "Rows"]

WARNING = "Random weights and made-up data, for tests of the plumbing only."
_MARKER = "featcal_mirror.json"

Rows = Callable[[], Iterator[dict[str, Any]]]
"""Gives the rows of a split, anew with each call."""


class Home:
    """A directory to point ``HF_HOME`` to.

    Args:
        directory: A new or empty directory, or one that is a mirror already.

    Raises:
        MirrorError: It holds something else, perhaps real downloads.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._marker = self.directory / _MARKER
        if self.directory.exists() and not self._marker.exists():
            if not self.directory.is_dir() or any(self.directory.iterdir()):
                raise MirrorError(
                    f"{self.directory} is there already and is not a mirror (it has no {_MARKER}): "
                    "random weights under true names would spoil what it holds. Choose a directory "
                    "that is new or empty."
                )

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which Hugging Face's libraries read this directory and nothing else."""
        return {
            "HF_HOME": str(self.directory),
            # these would win over HF_HOME
            "HF_HUB_CACHE": str(self.directory / "hub"),
            "HF_DATASETS_CACHE": str(self.directory / "datasets"),
            "HF_HUB_OFFLINE": "1",
        }

    def read(self) -> Any:
        """What was written last with `mark`, or None in a new directory.

        Raises:
            MirrorError: The marker cannot be read.
        """
        if not self._marker.exists():
            return None
        try:
            return read_json(self._marker)["mirror"]
        except (ReportError, KeyError, TypeError) as error:
            raise MirrorError(f"{self._marker} is damaged: delete {self.directory}.") from error

    def mark(self, content: Any) -> None:
        """Say that this is a mirror, and of what."""
        write_json(self._marker, {"warning": WARNING, "mirror": content})

    # --- models ---------------------------------------------------------------------------------

    def has_model(self, name: str, recipe: Any) -> bool:
        """Whether the model is there, made by the same recipe."""
        repo = self._repo("models", name)
        reference = repo / "refs" / "main"
        commit = _commit(name, recipe)
        return (
            reference.exists()
            and reference.read_text() == commit
            and (repo / "snapshots" / commit).is_dir()
        )

    def add_model(self, name: str, recipe: Any, write: Callable[[Path], None]) -> None:
        """Make a model the only revision of its repository.

        Args:
            name: Hub id.
            recipe: All that its content depends on, as JSON.
            write: Writes its files into an empty directory.
        """
        self._add_snapshot("models", name, _commit(name, recipe), write)

    def _add_snapshot(
        self, kind: str, name: str, commit: str, write: Callable[[Path], None]
    ) -> None:
        repo = self._repo(kind, name)
        snapshot = repo / "snapshots" / commit
        if not snapshot.is_dir():
            with atomic_directory(snapshot) as scratch:
                write(scratch)
                (scratch / "README.md").write_text(f"# {name}\n\n{WARNING}\n")
        write_text(repo / "refs" / "main", commit)
        _remove_others(snapshot)

    def _repo(self, kind: str, name: str) -> Path:
        return self.directory / "hub" / REPO_ID_SEPARATOR.join([kind, *name.split("/")])

    # --- data sets ------------------------------------------------------------------------------

    def has_dataset(self, name: str, config: str, recipe: Any) -> bool:
        """Whether the configuration of a data set is there, made by the same recipe."""
        # a builder would make the directory that it looks into
        revision = _commit(name, [config, recipe])
        found = self.directory.glob(f"datasets/*/{config}/*/{revision}/dataset_info.json")
        return any(True for _ in found)

    def add_dataset(
        self,
        name: str,
        config: str,
        recipe: Any,
        features: datasets.Features,
        rows: Mapping[str, Rows],
    ) -> None:
        """Make data the only revision of a configuration, as if it had been downloaded and read.

        The library that reads it lays it down, so the layout is right by itself.

        Args:
            name: Hub id.
            config: Name of the configuration; ``default`` where the data set has but one.
            recipe: All that its content depends on, as JSON.
            features: Its columns.
            rows: Gives the rows of each split.
        """
        builder = MadeUpDataset(
            features,
            rows,
            cache_dir=str(self.directory / "datasets"),
            dataset_name=name.rpartition("/")[2],
            repo_id=name,
            config_name=config,
            hash=_commit(name, [config, recipe]),
        )
        builder.download_and_prepare()
        _remove_others(Path(builder.cache_dir))
        self._add_snapshot("datasets", name, _commit(name, "card"), lambda _: None)


class MadeUpDataset(datasets.GeneratorBasedBuilder):
    """A data set from Python functions.

    Args:
        features: Columns.
        rows: Gives the rows of each split.
        **kwargs: What every builder takes.
    """

    VERSION = datasets.Version("0.0.0")

    def __init__(
        self, features: datasets.Features, rows: Mapping[str, Rows], **kwargs: Any
    ) -> None:
        self._features = features
        self._rows = rows
        super().__init__(**kwargs)

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(description=WARNING, features=self._features)

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"rows": rows})
            for split, rows in self._rows.items()
        ]

    def _generate_examples(self, **kwargs: Any) -> Any:
        yield from enumerate(kwargs["rows"]())


def _commit(name: str, recipe: Any) -> str:
    """A name for a revision, as long as the hub's."""
    text = json.dumps([name, recipe], sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _remove_others(path: Path) -> None:
    """Remove older revisions beside one."""
    for other in path.parent.iterdir():
        if other != path and other.is_dir():
            shutil.rmtree(other)
