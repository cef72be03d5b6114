"""Corruptions of images, by the names that FusionBench's robustness configs have.

The kinds follow "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations"
(Hendrycks and Dietterich, ICLR 2019) at about its middle severity. Its images have 224 pixels a
side; lengths are scaled to the image's side here.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from torch.utils.data import Dataset

from .tasks import ImageSplit, load_split

__all__ = ["CORRUPTIONS", "CorruptedImages", "corrupt", "load_corrupted_split"]

_REFERENCE_SIDE = 224


def _contrast(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A fifth of the distance from the mean of each channel."""
    mean = image.mean((0, 1), keepdims=True)
    return mean + 0.2 * (image - mean)


def _gaussian_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image + rng.normal(0.0, 0.18, image.shape)


def _impulse_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Nine of a hundred values turned black or white."""
    hit = rng.random(image.shape) < 0.09
    return np.where(hit, rng.random(image.shape) < 0.5, image)


def _jpeg_compression(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    buffer = io.BytesIO()
    _picture(image).save(buffer, "JPEG", quality=15)
    with Image.open(buffer) as compressed:
        return _values(compressed.convert("RGB"))


def _motion_blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mean of the image moved along a straight line, at an angle within 45° of the horizontal."""
    length = max(3.0, 30 * min(image.shape[:2]) / _REFERENCE_SIDE)
    angle = rng.uniform(-math.pi / 4, math.pi / 4)
    picture = _picture(image)
    steps = np.linspace(-0.5, 0.5, max(3, math.ceil(length)))
    moved = []
    for step in steps:
        dx, dy = step * length * math.cos(angle), step * length * math.sin(angle)
        # the border goes on outwards, so that nothing dark moves in
        margin = math.ceil(length)
        padded = Image.fromarray(
            np.pad(np.asarray(picture), ((margin,) * 2, (margin,) * 2, (0, 0)), "edge")
        )
        shifted = padded.transform(
            padded.size, Image.Transform.AFFINE, (1, 0, dx, 0, 1, dy), Image.Resampling.BILINEAR
        )
        inner = (margin, margin, margin + picture.width, margin + picture.height)
        moved.append(_values(shifted.crop(inner)))
    return np.mean(moved, axis=0)


def _pixelate(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks of four pixels at a side of 224, and of two at least: less would change nothing."""
    picture = _picture(image)
    factor = max(2.0, 4 * min(picture.size) / _REFERENCE_SIDE)
    small = [max(1, round(side / factor)) for side in picture.size]
    return _values(
        picture.resize(small, Image.Resampling.BOX).resize(picture.size, Image.Resampling.NEAREST)
    )


def _spatter(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Drops of water: where smooth noise is high, the image gives way to a pale blue."""
    scale = min(image.shape[:2]) / _REFERENCE_SIDE
    noise = _picture(np.clip(rng.normal(0.5, 0.25, image.shape[:2]), 0, 1))
    smooth = _values(noise.filter(ImageFilter.GaussianBlur(max(0.8, 4 * scale))))
    spread = max(float(smooth.std()), 1e-6)
    drops = np.clip(((smooth - smooth.mean()) / spread - 0.7) / 0.5, 0, 1)[..., None]
    return image * (1 - 0.7 * drops) + 0.7 * drops * np.array([0.69, 0.93, 0.93])


CORRUPTIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "contrast": _contrast,
    "gaussian_noise": _gaussian_noise,
    "impulse_noise": _impulse_noise,
    "jpeg_compression": _jpeg_compression,
    "motion_blur": _motion_blur,
    "pixelate": _pixelate,
    "spatter": _spatter,
}
"""By name, what makes of values (height, width, 3) in 0 to 1 and a generator corrupted values."""


def corrupt(image: Image.Image, corruption: str, seed: int) -> Image.Image:
    """Corrupt an image.

    Args:
        image: Any image; it is read as RGB and not changed.
        corruption: A key of ``CORRUPTIONS``.
        seed: The same one gives the same result.

    Raises:
        ValueError: There is no such corruption.
    """
    _require(corruption)
    rng = np.random.default_rng(seed)
    return _picture(CORRUPTIONS[corruption](_values(image.convert("RGB")), rng))


class CorruptedImages(Dataset):
    """A data set whose images are corrupted as they are read, each in its own way, always the same.

    Args:
        dataset: Items are dicts with a PIL ``image``.
        corruption: A key of ``CORRUPTIONS``.

    Raises:
        ValueError: There is no such corruption.
    """

    def __init__(self, dataset: Any, corruption: str) -> None:
        _require(corruption)
        self._dataset = dataset
        self._corruption = corruption

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._dataset[index]
        seed = zlib.crc32(f"{self._corruption}/{index}".encode())
        return {**item, "image": corrupt(item["image"], self._corruption, seed)}


def load_corrupted_split(
    task: str, split: str, directory: str | Path, corruption: str | None = None
) -> ImageSplit | CorruptedImages:
    """Load a split of a built benchmark, corrupted; the target of data sets in a YAML file.

    Args:
        task: As ``load_split`` has it.
        split: As ``load_split`` has it.
        directory: Directory of the build.
        corruption: A key of ``CORRUPTIONS``; None leaves the images as they are.
    """
    images = load_split(task, split, directory)
    return images if corruption is None else CorruptedImages(images, corruption)


def _require(corruption: str) -> None:
    if corruption not in CORRUPTIONS:
        raise ValueError(
            f"there is no corruption {corruption!r}: use one of {', '.join(CORRUPTIONS)}."
        )


def _values(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture, dtype=np.float64) / 255


def _picture(values: np.ndarray) -> Image.Image:
    return Image.fromarray((np.clip(values, 0, 1) * 255).round().astype(np.uint8))
