"""CLIP vision towers: only the class token of the last block is read by what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from transformers import BaseImageProcessor, CLIPVisionModel, ProcessorMixin

from ..calibration import CalibrationSettings, RowRule, RowRules, Spent
from ..calibration.inputs import Inputs
from ..data import PrepareInputs
from ..errors import CalibrationDataError
from ..settings import SampleSettings
from .base import Architecture

__all__ = ["ClassTokenRows", "ClipVision", "clip_vision_rows"]


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


class ClipVision(Architecture):
    """``transformers.CLIPVisionModel``, in either layout (with or without ``vision_model``)."""

    name = "CLIP vision tower"

    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is a CLIP vision tower."""
        return isinstance(model, CLIPVisionModel)

    def row_rules(self, settings: CalibrationSettings) -> RowRules:
        """Row weights of the last block."""
        return clip_vision_rows(settings.nonclass_row_weight)

    def spent(self, model: nn.Module) -> Spent:
        """The pixels, once they are embedded, and the embeddings, once the first block has run."""
        collected = model.config.output_hidden_states  # pyright: ignore
        return Spent(inputs=("pixel_values",), block_inputs=not collected)

    def load_processor(self, pool: BaseModelPool) -> Any:
        """The pool's CLIP processor."""
        try:
            return pool.load_processor()  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            raise CalibrationDataError(
                "the model pool's processor cannot be loaded: set modelpool.processor to the path "
                f"or hub id of a CLIP processor ({type(error).__name__}: {error})"
            ) from error

    def prepare_inputs(
        self, processor: Any, model: nn.Module, settings: SampleSettings
    ) -> PrepareInputs:
        """Images to ``pixel_values`` of shape (batch, 3, height, width), as evaluation does it."""
        if isinstance(processor, ProcessorMixin | BaseImageProcessor):
            return partial(_process, processor)
        return partial(_transform, processor)


def _process(processor: Any, items: Sequence[Any]) -> Inputs:
    images = [_image(item).convert("RGB") for item in items]
    return {"pixel_values": processor(images=images, return_tensors="pt")["pixel_values"]}


def _transform(transform: Callable[[Any], Tensor], items: Sequence[Any]) -> Inputs:
    return {"pixel_values": torch.stack([transform(_image(item)) for item in items])}


def _image(item: Any) -> Any:
    """The image of an item: of a mapping, of an (image, label) pair, or the item itself."""
    if isinstance(item, Mapping):
        if "image" in item:
            return item["image"]
        raise KeyError(f"no column 'image' among {sorted(item)}: rename the column of the data set")
    return item[0] if isinstance(item, tuple | list) else item
