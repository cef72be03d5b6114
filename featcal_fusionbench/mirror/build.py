"""Makes a mirror: what is needed, what is missing, and how large it is; then writes it."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress

from .architectures import ClipShape, Size, architecture
from .errors import MirrorError
from .glue import GLUE, glue_features, glue_rows, glue_splits
from .home import Home
from .images import class_names, image_features, image_rows
from .models import expert_weights, write_adapter, write_base, write_expert, write_processor
from .needs import CORRUPTIONS, DatasetNeed, ModelNeed, Needs, Selection, read_needs

__all__ = ["Mirror", "MirrorSettings"]

# To be raised when anything is laid down differently, so that older mirrors are made anew.
_FORMAT = 1


@dataclass(frozen=True)
class MirrorSettings:
    """What a mirror is like. All of a mirror is made by one setting.

    Attributes:
        size: ``true`` for the published shapes, ``pico`` for tiny models of the same classes.
        dtype: Precision of the checkpoints.
        rows: Rows of each split.
        image_size: Height and width of the images in pixels.
    """

    size: Size = "true"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    rows: int = 48
    image_size: int = 64

    def __post_init__(self) -> None:
        for name in ("rows", "image_size"):
            if getattr(self, name) < 1:
                raise MirrorError(f"{name}={getattr(self, name)}: it must be at least 1.")


class Mirror:
    """A mirror of what some configs name, and of what was put into it before.

    Nothing is written before `write`.

    Args:
        directory: A new or empty directory, or one that is a mirror already.
        selections: The configs.
        settings: What it is like.

    Raises:
        MirrorError: The directory holds something else or a mirror of other settings; or a config
            cannot be composed or names what cannot be made up.
    """

    def __init__(
        self, directory: Path, selections: Sequence[Selection], settings: MirrorSettings
    ) -> None:
        self.home = Home(directory)
        self.selections = tuple(selections)
        self.settings = settings
        before = self.home.read()
        needs = Needs.from_json(before["needs"]) if before else Needs()
        if before and before["settings"] != dataclasses.asdict(settings):
            changed = ", ".join(f"{key}={value}" for key, value in before["settings"].items())
            raise MirrorError(
                f"{self.home.directory} is a mirror with {changed}: delete it, choose another "
                "directory, or use these settings to add to it."
            )
        self.needs = functools.reduce(Needs.__or__, map(read_needs, self.selections), needs)
        for need in self.needs.models.values():
            architecture(need.base, settings.size)
        for (dataset, config), need in self.needs.datasets.items():
            if not _is_glue(dataset):
                class_names(need.task)
            elif config not in GLUE:
                raise MirrorError(f"{config!r} is none of GLUE's text tasks.")

    @property
    def missing_models(self) -> dict[str, ModelNeed]:
        """Models that are not there yet."""
        return {
            name: need
            for name, need in self.needs.models.items()
            if not self.home.has_model(name, self._model_recipe(need))
        }

    @property
    def missing_datasets(self) -> dict[tuple[str, str], DatasetNeed]:
        """Data sets that are not there yet, or not with all splits."""
        return {
            key: need
            for key, need in self.needs.datasets.items()
            if not self.home.has_dataset(*key, self._dataset_recipe(need))
        }

    @property
    def bytes_to_write(self) -> int:
        """Size of the weights that are missing."""
        total = 0
        for need in self.missing_models.values():
            if need.kind in ("base", "expert"):
                shape = architecture(need.base, self.settings.size)
                model: Any = shape.model()
                if need.kind == "expert" and isinstance(shape, ClipShape):
                    model = model.vision_model
                total += sum(value.numel() for value in model.parameters())
        return total * self._dtype.itemsize

    def write(self, progress: Progress) -> None:
        """Write what is missing; what an interrupted call wrote is kept.

        Args:
            progress: Shows how far it is.

        Raises:
            MirrorError: The disk is too small.
        """
        models, data = self.missing_models, self.missing_datasets
        self.home.directory.mkdir(parents=True, exist_ok=True)
        needed, free = self.bytes_to_write, shutil.disk_usage(self.home.directory).free
        if needed > free:
            raise MirrorError(
                f"{needed / 2**30:.1f} GiB are needed in {self.home.directory} and "
                f"{free / 2**30:.1f} GiB are free: choose another disk, fewer configs, or half "
                "the precision (dtype=bfloat16)."
            )
        self.home.mark(
            {"settings": dataclasses.asdict(self.settings), "needs": self.needs.to_json()}
        )
        for name, need in progress.track(models.items(), len(models), description="models"):
            recipe = self._model_recipe(need)
            self.home.add_model(name, recipe, functools.partial(self._write_model, name, need))
        for key, need in progress.track(data.items(), len(data), description="data sets"):
            self._add_dataset(*key, need)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.settings.dtype)

    def _model_recipe(self, need: ModelNeed) -> Any:
        return [_FORMAT, dataclasses.asdict(need), self.settings.size, self.settings.dtype]

    def _dataset_recipe(self, need: DatasetNeed) -> Any:
        settings = self.settings
        return [_FORMAT, need.task, list(need.splits), settings.rows, settings.image_size]

    def _write_model(self, name: str, need: ModelNeed, path: Path) -> None:
        shape = architecture(need.base, self.settings.size)
        if need.kind == "processor":
            write_processor(path, shape)
        elif need.kind == "base":
            write_base(path, shape, name, self._dtype)
        elif need.kind == "adapter":
            write_adapter(path, shape, need.base, name)
        else:
            write_expert(path, shape, expert_weights(shape, need.base, name), self._dtype)

    def _add_dataset(self, dataset: str, config: str, need: DatasetNeed) -> None:
        settings, recipe = self.settings, self._dataset_recipe(need)
        if _is_glue(dataset):
            rows = {
                split: functools.partial(glue_rows, config, split, settings.rows)
                for split in glue_splits(config)
            }
            self.home.add_dataset(dataset, config, recipe, glue_features(config), rows)
            return
        rows = {
            split: functools.partial(
                image_rows,
                dataset,
                need.task,
                split,
                count=settings.rows,
                size=settings.image_size,
                noise=80 if split in CORRUPTIONS else 20,
            )
            for split in need.splits
        }
        self.home.add_dataset(dataset, config, recipe, image_features(dataset, need.task), rows)


def _is_glue(dataset: str) -> bool:
    return dataset.rpartition("/")[2] == "glue"
