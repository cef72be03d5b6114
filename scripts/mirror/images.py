"""Image classification data: the published columns and classes, images of separable patterns."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from datasets import ClassLabel, Features, Image, Value
from PIL import Image as PILImage
from random_models.weights import generator

from .needs import MirrorError

__all__ = ["class_names", "image_features", "image_rows"]


@dataclass(frozen=True)
class _Columns:
    """How a published data set departs from a colour ``image`` and a ``label`` of named classes.

    Attributes:
        image: Name of the images' column.
        label: Name of the labels' column.
        mode: Mode of the images, as PIL names it.
        plain_label: Type of the labels where they have no names.
        others: Further columns.
    """

    image: str = "image"
    label: str = "label"
    mode: Literal["RGB", "L"] = "RGB"
    plain_label: str | None = None
    others: dict[str, Any] = field(default_factory=dict)


_GREY = _Columns(mode="L")
_TEXT = Value("string")
_PUBLISHED = {
    "mnist": _GREY,
    "zalando-datasets/fashion_mnist": _GREY,
    "tanganke/kmnist": _GREY,
    "tanganke/emnist_letters": _GREY,
    "1aurent/PatchCamelyon": _Columns(plain_label="bool"),
    "clip-benchmark/wds_fer2013": _Columns(
        image="jpg",
        label="cls",
        mode="L",
        plain_label="int64",
        others={"__key__": _TEXT, "__url__": _TEXT},
    ),
    "timm/oxford-iiit-pet": _Columns(
        others={"image_id": _TEXT, "label_cat_dog": ClassLabel(names=["cat", "dog"])}
    ),
}


def class_names(task: str) -> list[str]:
    """The classes of a task, as FusionBench names them.

    Raises:
        MirrorError: FusionBench does not know the task.
    """
    from fusion_bench.tasks.clip_classification import get_classnames

    try:
        return list(get_classnames(task))
    except (ImportError, ValueError) as error:
        raise MirrorError(f"FusionBench has no class names for {task!r}.") from error


def image_features(dataset: str, task: str) -> Features:
    """The columns of a data set.

    Args:
        dataset: Its hub id.
        task: Name of its task in FusionBench.
    """
    columns = _PUBLISHED.get(dataset, _Columns())
    names = class_names(task)
    plain = columns.plain_label
    label = ClassLabel(names=_distinct(names)) if plain is None else Value(plain)
    return Features({columns.image: Image(), columns.label: label, **columns.others})


def _distinct(names: list[str]) -> list[str]:
    """FusionBench gives some classes one name, where the published data must tell them apart."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def image_rows(
    dataset: str, task: str, split: str, count: int, size: int, corrupted: bool
) -> Iterator[dict[str, Any]]:
    """Images whose colour and stripes tell the class.

    Args:
        dataset: Hub id of the data set.
        task: Name of its task in FusionBench.
        split: Name of the split; another one has other images.
        count: Number of images. Their classes are the first ones, in turn.
        size: Height and width in pixels.
        corrupted: Whether there is much noise on each pixel.
    """
    columns = _PUBLISHED.get(dataset, _Columns())
    classes = len(class_names(task))
    chance = np.random.default_rng(generator(dataset, split).initial_seed())
    for index in range(count):
        label = index % classes
        pixels = _pattern(label, classes, size, chance.uniform(0, 2 * math.pi))
        pixels = pixels + chance.normal(0, 80 if corrupted else 20, pixels.shape)
        image = PILImage.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(columns.mode)
        is_bool = columns.plain_label == "bool"
        row = {columns.image: image, columns.label: bool(label) if is_bool else label}
        for name in columns.others:
            row[name] = index % 2 if name == "label_cat_dog" else f"{split}-{index}"
        yield row


def _pattern(label: int, classes: int, size: int, phase: float) -> np.ndarray:
    """Coloured stripes: direction, width and hue are the class's, the phase is the image's."""
    angle = math.pi * label / classes
    rows, columns = np.mgrid[:size, :size] / size
    along = rows * math.sin(angle) + columns * math.cos(angle)
    stripes = 0.55 + 0.45 * np.sin(2 * math.pi * (2 + label % 3) * along + phase)
    # hues a golden section apart: neighbours in number are far apart in colour
    colour = colorsys.hsv_to_rgb(label * 0.618 % 1, 0.8, 1.0)
    return 255 * stripes[..., None] * np.asarray(colour)
