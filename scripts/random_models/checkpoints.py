"""Checkpoints on disk, as ``from_pretrained`` and peft read them, of any shape and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .shapes import ClipShape, Shape
from .weights import departure, generator, random_weights, save_weights
from .words import write_clip_processor, write_flan_t5_tokenizer

__all__ = ["expert_weights", "write_adapter", "write_base", "write_expert", "write_processor"]

# CLIP's experts are vision towers. The published ones are stored with this prefix, which newer
# releases of transformers do not write.
_VISION = "vision_model."


def write_processor(path: Path, shape: Shape) -> None:
    """Write a base's processor, or its tokenizer."""
    _write_config(path, shape)
    if isinstance(shape, ClipShape):
        write_clip_processor(path, shape)
    else:
        write_flan_t5_tokenizer(path)


def write_base(path: Path, shape: Shape, key: str, dtype: torch.dtype) -> None:
    """Write a whole model with its processor or tokenizer.

    Args:
        path: Its directory.
        shape: The shape.
        key: Which weights.
        dtype: Their precision.
    """
    write_processor(path, shape)
    save_weights(path / "model.safetensors", random_weights(shape.model(), key), dtype)


def expert_weights(shape: Shape, base: str, key: str) -> dict[str, Tensor]:
    """Weights some way off the base's: of CLIP the vision tower's.

    Args:
        shape: The shape.
        base: Which weights the base has.
        key: Which expert.
    """
    prefix = _VISION if isinstance(shape, ClipShape) else ""
    return {
        name: departure(name, value, key)
        for name, value in random_weights(shape.model(), base, prefix=prefix).items()
    }


def write_expert(
    path: Path, shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Write a model fine-tuned from a base: of CLIP the vision tower, as published.

    Args:
        path: Its directory.
        shape: The base's shape.
        weights: Weights by name.
        dtype: Their precision in the file.
    """
    if isinstance(shape, ClipShape):
        config: Any = shape.config().vision_config
        content = config.to_dict() | {"architectures": ["CLIPVisionModel"]}
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(content))
    else:
        _write_config(path, shape)
    save_weights(path / "model.safetensors", weights, dtype)


def write_adapter(path: Path, shape: Shape, base: str, key: str) -> None:
    """Write a LoRA adapter of rank 16 in float32, as peft does after training.

    Args:
        path: Its directory.
        shape: The base's shape.
        base: The base's hub id.
        key: Which adapter.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model: Any = shape.model()
    if isinstance(shape, ClipShape):
        # the published ones were trained on the transformer inside the tower
        kind, targets, model = None, ["q_proj", "v_proj"], model.vision_model
    else:
        kind, targets = "SEQ_2_SEQ_LM", ["q", "v"]
    config = LoraConfig(task_type=kind, r=16, lora_alpha=32, target_modules=targets)
    adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
    weights = {
        name: 0.1 * torch.randn(value.shape, generator=generator(key, name))
        for name, value in get_peft_model_state_dict(adapted).items()
    }
    # only now: peft would look for the base's vocabulary on the hub
    config.base_model_name_or_path = base
    config.save_pretrained(str(path))
    save_weights(path / "adapter_model.safetensors", weights, torch.float32)


def _write_config(path: Path, shape: Shape) -> None:
    """Write the whole model's config; directories that are missing are made."""
    config = shape.config()
    config.architectures = [type(shape.model()).__name__]
    config.save_pretrained(path)
