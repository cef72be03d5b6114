"""The tasks of the embedded benchmark: names, classes, prompts, and how FusionBench finds them.

Importing this module enters every task into FusionBench's ``CLIPTemplateFactory``, so both YAML
files name it (``load_processor``, ``load_split``, ``CLIPVisionModel``) and nothing else has to be
imported first.

What the images are: *handwriting* (``mnist5k``, ``optdigits``), *silhouettes cut out of
photographs* (``animals``), and *renderings* of font glyphs made on this machine (``latin``,
``greek``, ``cyrillic``, ``symbols``). None is a plain photograph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from PIL import Image
from torch.utils.data import Dataset
from transformers import CLIPProcessor, CLIPVisionModel

from .glyphs import ALPHABETS

__all__ = [
    "SPLITS",
    "TASKS",
    "CLIPVisionModel",
    "ImageSplit",
    "Task",
    "load_processor",
    "load_split",
    "register_tasks",
]

SPLITS = ("train", "test")

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ANIMALS = (
    "bear", "bird", "cat", "cow", "dog", "elephant", "giraffe", "horse", "sheep", "zebra",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One classification task.

    Attributes:
        name: Key in the pools and tables.
        kind: What the images are (handwriting, silhouette, rendering).
        noun: What a prompt calls one image of the task.
        classnames: The classes in label order, as prompts call them.
    """

    name: str
    kind: str
    noun: str
    classnames: tuple[str, ...]

    @property
    def templates(self) -> tuple[Callable[[str], str], ...]:
        """Prompt templates, each a function of the class name."""
        return (
            lambda classname: f"a picture of the {self.noun} {classname}",
            lambda classname: f"{classname} as a {self.noun}",
        )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("mnist5k", "handwriting", "handwritten digit", _DIGITS),
        Task("optdigits", "handwriting", "scanned digit", _DIGITS),
        Task("animals", "silhouette", "animal silhouette", _ANIMALS),
        Task("latin", "rendering", "latin letter", tuple(ALPHABETS["latin"].values())),
        Task("greek", "rendering", "greek letter", tuple(ALPHABETS["greek"].values())),
        Task("cyrillic", "rendering", "cyrillic letter", tuple(ALPHABETS["cyrillic"].values())),
        Task("symbols", "rendering", "math symbol", tuple(ALPHABETS["symbols"].values())),
    )
}


def register_tasks() -> None:
    """Enter the tasks into FusionBench's table of class names and templates.

    Written to the table itself: ``CLIPTemplateFactory.register_dataset`` of fusion-bench 0.2.33
    misspells a key, and what it registers cannot be read back.
    """
    for task in TASKS.values():
        CLIPTemplateFactory._dataset_mapping[task.name] = {
            "classnames": list(task.classnames),
            "templates": list(task.templates),
        }


register_tasks()


class ImageSplit(Dataset):
    """One split of one task: items are ``{"image": RGB PIL image, "label": int}``."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        """Keep grey ``images`` (n, side, side) uint8 and ``labels`` (n,) int64."""
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Image.Image | int]:
        image = Image.fromarray(self.images[index]).convert("RGB")
        return {"image": image, "label": int(self.labels[index])}


def load_split(task: str, split: str, directory: str | Path) -> ImageSplit:
    """Load a split of a built benchmark; the target of the datasets in both YAML files.

    Args:
        task: A key of ``TASKS``.
        split: ``train`` (also the calibration set, its labels unused) or ``test``.
        directory: Directory of the build.

    Raises:
        FileNotFoundError: The benchmark has not been built.
    """
    if task not in TASKS or split not in SPLITS:
        raise ValueError(f"no split {split!r} of task {task!r}; tasks: {', '.join(TASKS)}")
    path = Path(directory) / "data" / f"{task}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: build the embedded benchmark first, by "
            "`python -m featcal_fusionbench.benchmark --build-only`"
        )
    with np.load(path, allow_pickle=False) as arrays:
        return ImageSplit(arrays[f"{split}_images"], arrays[f"{split}_labels"])


def load_processor(directory: str | Path) -> CLIPProcessor:
    """Load the CLIP processor of a build; the target of the processor in the pool's YAML file.

    It is loaded from here, as the base is, not by a plain path, so that the tasks are registered
    before a method asks FusionBench for their class names: RegMean and AdaMerging ask before any
    data is loaded.
    """
    return CLIPProcessor.from_pretrained(Path(directory) / "clip")
