"""CLIP vision towers: only the class token of the last block is read by what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseModelPool
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor, nn
from transformers import BaseImageProcessor, CLIPVisionModel, ProcessorMixin

from ..calibration import Releasable, RowRule, RowRules
from ..calibration.inputs import Inputs
from ..data.draws import PrepareInputs
from ..data.images import (
    PIXELS,
    has_transparency,
    item_image,
    read_image,
    read_pixels,
    require_8_bit,
    require_pixels,
    to_rgb,
)
from ..data.items import Problems, UnusableItem, reason_of
from ..data.sources import is_fusion_benchs
from ..errors import CalibrationDataError
from ..settings import Settings
from .base import Architecture, ItemCheck

__all__ = ["ClassTokenRows", "ClipVision", "ClipVisionSettings", "clip_vision_rows"]


@dataclass(frozen=True, kw_only=True)
class ClipVisionSettings(Settings):
    """Settings that CLIP vision towers alone have.

    Attributes:
        nonclass_row_weight: Weight in [0, 1] of rows other than the class token's in the last
            block (not in ``k_proj`` and ``v_proj``, which all tokens read).
    """

    nonclass_row_weight: float = 0.01

    def __post_init__(self) -> None:
        self._require_number("nonclass_row_weight", low=0.0, high=1.0)


@dataclass(frozen=True)
class ClassTokenRows:
    """Weight 1 for the class token, the first of each sequence, and less for the others.

    Attributes:
        others: Weight of every other token, in [0, 1].
    """

    others: float

    def __str__(self) -> str:
        return f"class token 1, others {self.others:g}"

    def __call__(self, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Row weights of features of shape (batch, tokens, width)."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        weights = torch.full(features.shape[:-1], self.others, dtype=dtype, device=features.device)
        weights[..., 0] = 1.0
        return weights


def clip_vision_rows(nonclass_row_weight: float) -> RowRules:
    """The row rules of a CLIP vision tower.

    The pooled output is the class token of the last block. Its other tokens reach the output only
    through that block's keys and values, so every module but ``k_proj`` and ``v_proj`` weighs them
    by ``nonclass_row_weight``.
    """
    return partial(_rule, nonclass_row_weight)


def _rule(
    nonclass_row_weight: float, module: str, block: int | None, blocks: int
) -> RowRule | None:
    is_read_by_all = module.endswith((".k_proj", ".v_proj"))
    if block != blocks - 1 or is_read_by_all or nonclass_row_weight == 1:
        return None
    return ClassTokenRows(nonclass_row_weight)


class ClipVision(Architecture[ClipVisionSettings]):
    """``transformers.CLIPVisionModel``, in either layout (with or without ``vision_model``)."""

    name = "CLIP vision tower"
    settings_type = ClipVisionSettings

    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is a CLIP vision tower."""
        return isinstance(model, CLIPVisionModel)

    def row_rules(self) -> RowRules:
        """Row weights of the last block."""
        return clip_vision_rows(self.settings.nonclass_row_weight)

    def releasable(self, model: nn.Module) -> Releasable:
        """The pixels, once they are embedded, and the embeddings, once the first block has run."""
        collected = model.config.output_hidden_states  # pyright: ignore
        return Releasable(inputs=("pixel_values",), block_inputs=not collected)

    def load_processor(self, pool: BaseModelPool) -> Any:
        """The pool's CLIP processor: loaded, or as it is where the pool has an object."""
        given, load = getattr(pool, "_processor", None), getattr(pool, "load_processor", None)
        is_object = given is not None and not isinstance(given, str | Mapping | DictConfig)
        if is_object and (load is None or is_fusion_benchs(load)):  # which cannot take an object
            if not callable(given) and not isinstance(given, ProcessorMixin | BaseImageProcessor):
                raise CalibrationDataError(
                    f"modelpool.processor is of type {type(given).__name__}: set it to the path or "
                    "hub id of a CLIP processor, to a processor, or to a function that makes an "
                    "image a tensor."
                )
            return given
        if load is None:
            raise CalibrationDataError(
                f"a {type(pool).__name__} has no processor: use FusionBench's "
                "CLIPVisionModelPool(models, processor=…), modelpool.processor in a config, with "
                "the path or hub id of a CLIP processor."
            )
        try:
            return load()
        except Exception as error:
            raise CalibrationDataError(
                "the model pool's processor cannot be loaded: set modelpool.processor to the path "
                f"or hub id of a CLIP processor ({type(error).__name__}: {error})"
            ) from error

    def reads_plain_items(self, processor: Any) -> bool:
        """A function that makes images tensors may be written for the data set's format."""
        return _is_processor(processor)

    def prepare_inputs(
        self, processor: Any, model: nn.Module, column: str | None = None
    ) -> PrepareInputs:
        """Images to ``pixel_values`` of shape (batch, 3, height, width), as evaluation does it.

        A column ``pixel_values`` of numbers with a fraction is used as it is.
        """
        size = _image_size(model)
        process = partial(_process if _is_processor(processor) else _transform, processor, size)
        return partial(_prepare, process, size, column)

    def check_items(
        self,
        task: str,
        items: Iterable[tuple[int, Any]],
        processor: Any,
        model: nn.Module,
        column: str | None = None,
    ) -> ItemCheck:
        """Decode every image once; find what is no image, or of a form that is ambiguous."""
        size, problems = _image_size(model), Problems()
        checked, transparent = 0, 0
        for index, item in items:
            checked += 1
            try:
                value, name = item_image(item, column)
                if name == PIXELS and read_pixels(value, size) is not None:
                    continue
                if not _is_processor(processor):
                    _as_transforms_read(value)
                    continue
                image = read_image(value)
                require_8_bit(image)
                transparent += has_transparency(image)
            except Exception as error:
                problems.add(reason_of(error), index)
        if problems:
            raise CalibrationDataError(
                f"the calibration data of task {task} cannot be used: {problems}. Mend these items "
                "or leave them out of the data set."
            )
        warning = (
            f"task {task}: {transparent} of {checked} images drawn are transparent in part: as in "
            "FusionBench's evaluation, the colours below are read and transparency is left out."
        )
        return ItemCheck((warning,) if transparent else ())


def _is_processor(processor: Any) -> bool:
    return isinstance(processor, ProcessorMixin | BaseImageProcessor)


def _image_size(model: nn.Module) -> int | None:
    return getattr(getattr(model, "config", None), "image_size", None)


def _prepare(
    process: Callable[[list[Any]], list[Tensor]],
    size: int | None,
    column: str | None,
    items: Sequence[Any],
) -> Inputs:
    """Stack images and pixels that are ready, in the order of the items."""
    found = [item_image(item, column) for item in items]
    ready = [read_pixels(value, size) if name == PIXELS else None for value, name in found]
    raw = [value for (value, _), pixels in zip(found, ready, strict=True) if pixels is None]
    processed = iter(process(raw) if raw else [])
    rows = [next(processed) if pixels is None else pixels for pixels in ready]
    return {"pixel_values": torch.stack(rows)}


def _process(processor: Any, size: int | None, values: list[Any]) -> list[Tensor]:
    images = [to_rgb(read_image(value)) for value in values]
    result = processor(images=images, return_tensors="pt")["pixel_values"]
    return [_required(pixels, size, processor) for pixels in result]


def _transform(transform: Any, size: int | None, values: list[Any]) -> list[Tensor]:
    return [_required(transform(_as_transforms_read(value)), size, transform) for value in values]


def _as_transforms_read(value: Any) -> Any:
    """Images decoded, in their own mode; anything else may be what a transform was written for."""
    is_file = isinstance(value, str | Path | bytes | bytearray | memoryview | Mapping)
    return read_image(value) if is_file or isinstance(value, Image.Image) else value


def _required(pixels: Any, size: int | None, processor: Any) -> Tensor:
    name = f"modelpool.processor ({getattr(processor, '__name__', type(processor).__name__)})"
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        form = f"dtype {pixels.dtype}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise UnusableItem(
            f"{name} makes an image a {form}, where a floating-point tensor of shape "
            "(3, height, width) is needed"
        )
    require_pixels(pixels, size, name)
    return pixels
