"""Shapes of the bases: the published ones, and tiny ones that differ where those do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["SHAPES", "ClipShape", "Shape", "Size", "T5Shape", "Tower"]

Size = Literal["true", "pico"]


@dataclass(frozen=True)
class Tower:
    """A tower of a CLIP."""

    width: int
    mlp: int
    layers: int
    heads: int

    def config(self, **more: int) -> dict[str, int]:
        """Keyword arguments of its config."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            **more,
        }


@dataclass(frozen=True)
class ClipShape:
    """A CLIP.

    Attributes:
        vision: The tower of the images.
        text: The tower of the texts.
        image_size: Height and width of the images in pixels.
        patch: Height and width of a patch.
        projection: Width of what the towers share.
        merges: Merges of the tokenizer; the vocabulary has 514 entries besides.
    """

    vision: Tower
    text: Tower = Tower(32, 64, 2, 2)
    image_size: int = 16
    patch: int = 8
    projection: int = 16
    merges: int = 3000

    def config(self) -> CLIPConfig:
        """The whole model's config."""
        vocabulary = self.merges + 514
        text = self.text.config(
            projection_dim=self.projection,
            vocab_size=vocabulary,
            max_position_embeddings=77,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
        vision = self.vision.config(
            projection_dim=self.projection, image_size=self.image_size, patch_size=self.patch
        )
        return CLIPConfig(text_config=text, vision_config=vision, projection_dim=self.projection)

    def model(self, device: str = "meta") -> nn.Module:
        """The whole model; on the meta device it has no weights."""
        with torch.device(device):
            return CLIPModel(self.config())

    def vision_model(self) -> CLIPVisionModel:
        """The tower of the images alone, with transformers' initial weights."""
        config: Any = self.config().vision_config
        return CLIPVisionModel(config)


@dataclass(frozen=True)
class T5Shape:
    """A T5, as FLAN-T5 unless its head is tied or its MLPs have no gate.

    Attributes:
        width: Width of the residual stream.
        head: Width of a head.
        mlp: Width inside the MLPs.
        layers: Blocks of the encoder, and of the decoder.
        heads: Number of heads.
        vocabulary: Entries of the vocabulary.
        tied: Whether the head is the embeddings.
        gated: Whether the MLPs have a gate.
    """

    width: int
    head: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int
    tied: bool = False
    gated: bool = True

    def config(self, **more: Any) -> T5Config:
        """The model's config, with more of its values."""
        values: dict[str, Any] = {
            "d_model": self.width,
            "d_kv": self.head,
            "d_ff": self.mlp,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "vocab_size": self.vocabulary,
            "feed_forward_proj": "gated-gelu" if self.gated else "relu",
            "tie_word_embeddings": self.tied,
            "decoder_start_token_id": 0,
            **more,
        }
        return T5Config(**values)

    def model(self, device: str = "meta", **more: Any) -> Any:
        """The model, with more values of its config; on the meta device it has no weights."""
        with torch.device(device):
            model = T5ForConditionalGeneration(self.config(**more))
        if not self.tied:
            # transformers 5 unties a head only while it loads a checkpoint that has its own
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model


Shape = ClipShape | T5Shape

_TEXT_BASE = Tower(512, 2048, 12, 8)
_VISION_BASE = Tower(768, 3072, 12, 12)
SHAPES: Mapping[Size, Mapping[str, Shape]] = {
    "true": {
        "openai/clip-vit-base-patch32": ClipShape(_VISION_BASE, _TEXT_BASE, 224, 32, 512, 48894),
        "openai/clip-vit-base-patch16": ClipShape(_VISION_BASE, _TEXT_BASE, 224, 16, 512, 48894),
        "openai/clip-vit-large-patch14": ClipShape(
            Tower(1024, 4096, 24, 16), Tower(768, 3072, 12, 12), 224, 14, 768, 48894
        ),
        "google/flan-t5-base": T5Shape(768, 64, 2048, 12, 12, 32128),
        "google/flan-t5-large": T5Shape(1024, 64, 2816, 24, 16, 32128),
    },
    "pico": {
        "openai/clip-vit-base-patch32": ClipShape(Tower(32, 64, 2, 2)),
        "openai/clip-vit-base-patch16": ClipShape(Tower(32, 64, 2, 2), patch=4),
        "openai/clip-vit-large-patch14": ClipShape(Tower(48, 96, 3, 3), patch=4, projection=24),
        "google/flan-t5-base": T5Shape(32, 8, 48, 2, 4, 256),
        "google/flan-t5-large": T5Shape(48, 8, 64, 3, 6, 256),
    },
}
"""Shapes of the bases by size and hub id; the tiny ones have a few thousand weights."""
