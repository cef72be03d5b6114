"""Images in the forms that data sets hold them in, read as FusionBench's evaluation reads them."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from .items import UnusableItem, input_column

__all__ = [
    "PIXELS",
    "has_transparency",
    "item_image",
    "read_image",
    "read_pixels",
    "require_8_bit",
    "require_pixels",
    "to_rgb",
]

PIXELS = "pixel_values"
"""The column of images that are processed already."""
_PREFERRED = ("image",)
_KNOWN = ("img", "jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", PIXELS)
_EIGHT_BIT = frozenset("1 L LA P PA RGB RGBA RGBa RGBX CMYK YCbCr HSV LAB".split())
_CHANNELS = (1, 3, 4)


def item_image(item: Any, column: str | None = None) -> tuple[Any, str | None]:
    """The image of an item: of a row, of an (image, label) pair, or the item itself.

    Args:
        item: The item.
        column: The column that holds images; None: the known one.

    Returns:
        The image in the form that the data set gives, and the column that it stood in, if any.

    Raises:
        UnusableItem: There is no such column, none that is known, or several.
    """
    # an undecoded image alone is a mapping too, but no row
    if isinstance(item, Mapping) and set(item) != {"bytes", "path"}:
        name = input_column(item, column, _PREFERRED, _KNOWN, "images")
        return item[name], name
    if column is not None:
        raise UnusableItem(
            f"items are no rows with columns but of type {type(item).__name__}: leave "
            f"method.input_column={column} out for this task"
        )
    return (item[0] if isinstance(item, tuple | list) and item else item), None


def read_image(value: Any) -> Image.Image:
    """Decode an image; its mode stays.

    Args:
        value: An image of Pillow; the path of a file; a file's bytes; both in a mapping, as
            ``datasets`` gives an image that it does not decode; or whole numbers from 0 to 255 of
            shape (height, width), (height, width, channels) or (channels, height, width).

    Raises:
        UnusableItem: It is of another form, or which axis are channels cannot be told.
        Exception: What Pillow raises where it cannot read a file.
    """
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        value = path if content is None else content
        if value is None:
            raise UnusableItem("an image with neither 'bytes' nor 'path'")
    if _is_array(value):
        return Image.fromarray(_channels_last(_numbers(value)))
    if isinstance(value, bytes | bytearray | memoryview):
        value = BytesIO(value)
    if isinstance(value, BytesIO | str | Path):
        with Image.open(value) as file:
            file.load()
            # cameras store how a picture was held; `datasets` turns it upright, too
            turned = file.getexif().get(ExifTags.Base.Orientation) is not None
            return ImageOps.exif_transpose(file) if turned else file.copy()
    if not isinstance(value, Image.Image):
        raise UnusableItem(f"a {type(value).__name__} is no image")
    value.load()
    return value


def require_8_bit(image: Image.Image) -> None:
    """Refuse what the conversion to RGB, by which FusionBench evaluates, would change silently.

    Raises:
        UnusableItem: The image has more than 8 bits per channel, which would be cut off at 255.
    """
    if image.mode not in _EIGHT_BIT:
        raise UnusableItem(
            f"an image of mode {image.mode}, which would be cut off at 255: store the images with "
            "8 bits per channel"
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """An image with three channels of 8 bits, as evaluation makes it; transparency is left out."""
    require_8_bit(image)
    return image.convert("RGB")


def has_transparency(image: Image.Image) -> bool:
    """Whether pixels of an image are not opaque."""
    if image.mode in ("LA", "PA", "RGBA", "RGBa"):
        low, _ = image.getchannel(image.getbands()[-1]).getextrema()
        return int(low) < 255  # pyright: ignore[reportArgumentType]
    return "transparency" in image.info


def read_pixels(value: Any, size: int | None) -> Tensor | None:
    """An image that is processed already: numbers with a fraction, used as they are.

    Args:
        value: What stands in the column :data:`PIXELS`.
        size: Height and width that the model reads; None: any.

    Returns:
        Pixels of shape (3, size, size) in float32, or None where they are whole numbers or no
        numbers at all: an image that is still to be processed.

    Raises:
        UnusableItem: They are of another shape, or not finite.
    """
    if not _is_array(value):
        return None
    numbers = _as_array(value)
    if numbers.dtype.kind != "f":
        return None
    pixels = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    require_pixels(pixels, size, f"the column {PIXELS!r}")
    return pixels


def require_pixels(pixels: Tensor, size: int | None, source: str) -> None:
    """Make sure that a model can read an image's pixels.

    Raises:
        UnusableItem: They have another shape, or hold NaN or Inf.
    """
    expected = (3, *pixels.shape[1:]) if size is None else (3, size, size)
    if tuple(pixels.shape) != expected or pixels.dim() != 3:
        wanted = "(3, height, width)" if size is None else str(expected)
        raise UnusableItem(
            f"{source} gives pixels of shape {tuple(pixels.shape)} where the model reads {wanted}"
        )
    if not bool(torch.isfinite(pixels).all()):
        raise UnusableItem(f"{source} gives pixels that are NaN or Inf")


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor | list | tuple)


def _numbers(value: Any) -> np.ndarray:
    """Whole numbers from 0 to 255 as they are; all others are ambiguous."""
    numbers = _as_array(value)
    if numbers.dtype.kind not in "iu":
        raise UnusableItem(
            f"an image of {numbers.dtype} numbers, whose range cannot be told: give whole numbers "
            f"from 0 to 255, or, in the column {PIXELS!r}, what the processor made of the image"
        )
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= 255:
        raise UnusableItem(
            f"an image of numbers from {numbers.min()} to {numbers.max()}: give whole numbers "
            "from 0 to 255"
        )
    return numbers.astype(np.uint8)


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        # numpy has no bfloat16
        return (value.float() if value.is_floating_point() else value).numpy()
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of unlike lengths
        raise UnusableItem("an image of nested lists of unlike lengths") from error


def _channels_last(numbers: np.ndarray) -> np.ndarray:
    shape = numbers.shape
    if numbers.ndim == 2 and numbers.size:
        return numbers
    if numbers.ndim != 3 or not numbers.size:
        raise UnusableItem(
            f"an image of shape {shape}: give (height, width), (height, width, channels) or "
            "(channels, height, width)"
        )
    first, last = shape[0] in _CHANNELS, shape[-1] in _CHANNELS
    if first == last:
        why = "either its first or its last axis may be" if first else "neither outer axis can be"
        raise UnusableItem(
            f"an image of shape {shape}, where {why} the 1, 3 or 4 channels: give images of "
            "Pillow, or another layout"
        )
    numbers = numbers.transpose(1, 2, 0) if first else numbers
    return np.ascontiguousarray(numbers[..., 0] if numbers.shape[-1] == 1 else numbers)
