"""Shapes of the bases: the published ones, and tiny ones that differ where those do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, T5Config, T5ForConditionalGeneration

from .errors import MirrorError

__all__ = ["Architecture", "ClipShape", "Size", "T5Shape", "architecture", "pico_clip"]

Size = Literal["true", "pico"]


@dataclass(frozen=True)
class ClipShape:
    """A CLIP: its towers as keyword arguments of their configs, and the merges of its tokenizer.

    The vocabulary has 514 entries besides the merges.
    """

    vision: Mapping[str, int]
    text: Mapping[str, int]
    projection: int
    merges: int

    @property
    def image_size(self) -> int:
        """Height and width of the images that it takes."""
        return self.vision["image_size"]

    def config(self) -> CLIPConfig:
        """The whole model's config."""
        vocabulary = self.merges + 514
        ids = {
            "vocab_size": vocabulary,
            "max_position_embeddings": 77,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "pad_token_id": vocabulary - 1,
        }
        width = {"projection_dim": self.projection}
        return CLIPConfig(
            text_config={**self.text, **ids, **width},
            vision_config={**self.vision, **width},
            projection_dim=self.projection,
        )

    def model(self) -> nn.Module:
        """The whole model, without weights."""
        with torch.device("meta"):
            return CLIPModel(self.config())


@dataclass(frozen=True)
class T5Shape:
    """A FLAN-T5 as keyword arguments of its config."""

    shape: Mapping[str, int]

    def config(self) -> T5Config:
        """The model's config."""
        values: dict[str, Any] = {
            **self.shape,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
        }
        return T5Config(**values)

    def model(self) -> nn.Module:
        """The model, without weights. Its embeddings are shared, and its head is not."""
        with torch.device("meta"):
            model = T5ForConditionalGeneration(self.config())
        # transformers 5 unties a head only while it loads a checkpoint that has its own
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        return model


Architecture = ClipShape | T5Shape


def _tower(hidden: int, mlp: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _t5(width: int, head: int, mlp: int, layers: int, heads: int, vocabulary: int) -> T5Shape:
    return T5Shape(
        {
            "d_model": width,
            "d_kv": head,
            "d_ff": mlp,
            "num_layers": layers,
            "num_heads": heads,
            "vocab_size": vocabulary,
        }
    )


def _base_clip(patch: int) -> ClipShape:
    vision = _tower(768, 3072, 12, 12, image_size=224, patch_size=patch)
    return ClipShape(vision, _tower(512, 2048, 12, 8), projection=512, merges=48894)


def pico_clip(patch: int = 8) -> ClipShape:
    """A CLIP of a few thousand weights besides its vocabulary."""
    vision = _tower(32, 64, 2, 2, image_size=16, patch_size=patch)
    return ClipShape(vision, _tower(32, 64, 2, 2), projection=16, merges=3000)


_TRUE: dict[str, Architecture] = {
    "openai/clip-vit-base-patch32": _base_clip(32),
    "openai/clip-vit-base-patch16": _base_clip(16),
    "openai/clip-vit-large-patch14": ClipShape(
        _tower(1024, 4096, 24, 16, image_size=224, patch_size=14),
        _tower(768, 3072, 12, 12),
        projection=768,
        merges=48894,
    ),
    "google/flan-t5-base": _t5(768, 64, 2048, 12, 12, 32128),
    "google/flan-t5-large": _t5(1024, 64, 2816, 24, 16, 32128),
}
_PICO: dict[str, Architecture] = {
    "openai/clip-vit-base-patch32": pico_clip(),
    "openai/clip-vit-base-patch16": pico_clip(patch=4),
    "openai/clip-vit-large-patch14": ClipShape(
        _tower(48, 96, 3, 3, image_size=16, patch_size=4),
        _tower(32, 64, 2, 2),
        projection=24,
        merges=3000,
    ),
    "google/flan-t5-base": _t5(32, 8, 48, 2, 4, 256),
    "google/flan-t5-large": _t5(48, 8, 64, 3, 6, 256),
}
_SHAPES: dict[Size, dict[str, Architecture]] = {"true": _TRUE, "pico": _PICO}


def architecture(base: str, size: Size) -> Architecture:
    """The shape of a base.

    Args:
        base: Its hub id.
        size: ``true`` for the published shape.

    Raises:
        MirrorError: Its shape is not known here.
    """
    try:
        return _SHAPES[size][base]
    except KeyError:
        raise MirrorError(
            f"the shape of {base} is unknown: a mirror can hold {', '.join(_TRUE)} and what was "
            "fine-tuned from them."
        ) from None
