"""The directory of a mirror: the layout of the hub's cache, and the marker that says what it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets.arrow_writer import ArrowWriter
from datasets.naming import camelcase_to_snakecase, filename_prefix_for_split
from huggingface_hub.constants import REPO_ID_SEPARATOR

from featcal_fusionbench.benchmark.storage import atomic_directory
from featcal_fusionbench.report.files import write_json, write_text

from .needs import MirrorError

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
            return json.loads(self._marker.read_text())["mirror"]
        except (ValueError, KeyError, TypeError) as error:
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
        return self._data(name, config, recipe).is_dir()

    def add_dataset(
        self,
        name: str,
        config: str,
        recipe: Any,
        features: datasets.Features,
        rows: Mapping[str, Rows],
    ) -> None:
        """Make data the only revision of a configuration, as if it had been downloaded and read.

        Args:
            name: Hub id.
            config: Name of the configuration; ``default`` where the data set has but one.
            recipe: All that its content depends on, as JSON.
            features: Its columns.
            rows: Gives the rows of each split.
        """
        path = self._data(name, config, recipe)
        dataset = camelcase_to_snakecase(name.rpartition("/")[2])
        splits = datasets.SplitDict(dataset_name=dataset)
        # not by a builder of our own: older releases patch the module that it is defined in
        with atomic_directory(path) as scratch:
            for split, make in rows.items():
                file = scratch / f"{filename_prefix_for_split(dataset, split)}.arrow"
                with ArrowWriter(features=features, path=str(file)) as writer:
                    for row in make():
                        example: Any = features.encode_example(row)
                        writer.write(example)
                    count, size = writer.finalize()
                splits.add(datasets.SplitInfo(split, num_bytes=size, num_examples=count))
            info = datasets.DatasetInfo(
                description=WARNING,
                features=features,
                builder_name=dataset,
                dataset_name=dataset,
                config_name=config,
                version="0.0.0",
                splits=splits,
            )
            info.write_to_directory(str(scratch))
        _remove_others(path)
        self._add_snapshot("datasets", name, _commit(name, "card"), lambda _: None)

    def _data(self, name: str, config: str, recipe: Any) -> Path:
        """Where ``datasets`` keeps what it has read of a revision."""
        *owner, dataset = name.split("/")
        folder = "___".join([*owner, camelcase_to_snakecase(dataset)])
        revision = _commit(name, [config, recipe])
        return self.directory / "datasets" / folder / config / "0.0.0" / revision


def _commit(name: str, recipe: Any) -> str:
    """A name for a revision, as long as the hub's."""
    text = json.dumps([name, recipe], sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _remove_others(path: Path) -> None:
    """Remove older revisions beside one."""
    for other in path.parent.iterdir():
        if other != path and other.is_dir():
            shutil.rmtree(other)
