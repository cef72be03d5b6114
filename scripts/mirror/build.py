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
from random_models import checkpoints
from random_models.shapes import SHAPES, ClipShape, Size
from rich.progress import Progress

from .glue import GLUE, glue_features, glue_rows, glue_splits
from .home import Home
from .images import class_names, image_features, image_rows
from .needs import DatasetNeed, MirrorError, ModelNeed, is_glue, read_needs
from .sets import CORRUPTIONS, Selection

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
        if before and before["settings"] != dataclasses.asdict(settings):
            changed = ", ".join(f"{key}={value}" for key, value in before["settings"].items())
            raise MirrorError(
                f"{self.home.directory} is a mirror with {changed}: delete it, choose another "
                "directory, or use these settings to add to it."
            )
        earlier = before["selections"] if before else []
        self._all = list(
            dict.fromkeys([*(Selection(p, t, tuple(o)) for p, t, o in earlier), *selections])
        )
        self.needs = read_needs(self._all)
        self._shapes = SHAPES[settings.size]
        for need in self.needs.models.values():
            if need.base not in self._shapes:
                raise MirrorError(
                    f"the shape of {need.base} is unknown: a mirror can hold "
                    f"{', '.join(self._shapes)} and what was fine-tuned from them."
                )
        for (dataset, config), need in self.needs.datasets.items():
            if not is_glue(dataset):
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
                shape = self._shapes[need.base]
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
            {
                "settings": dataclasses.asdict(self.settings),
                "selections": [dataclasses.astuple(selection) for selection in self._all],
            }
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
        shape = self._shapes[need.base]
        if need.kind == "processor":
            checkpoints.write_processor(path, shape)
        elif need.kind == "base":
            checkpoints.write_base(path, shape, name, self._dtype)
        elif need.kind == "adapter":
            checkpoints.write_adapter(path, shape, need.base, name)
        else:
            weights = checkpoints.expert_weights(shape, need.base, name)
            checkpoints.write_expert(path, shape, weights, self._dtype)

    def _add_dataset(self, dataset: str, config: str, need: DatasetNeed) -> None:
        count, size = self.settings.rows, self.settings.image_size
        if is_glue(dataset):
            features = glue_features(config)
            rows = {
                split: functools.partial(glue_rows, config, split, count)
                for split in glue_splits(config)
            }
        else:
            features = image_features(dataset, need.task)
            rows = {
                split: functools.partial(
                    image_rows, dataset, need.task, split, count, size, split in CORRUPTIONS
                )
                for split in need.splits
            }
        self.home.add_dataset(dataset, config, self._dataset_recipe(need), features, rows)
