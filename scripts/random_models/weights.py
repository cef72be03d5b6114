"""Random weights by name: the same under every release, whatever was drawn before."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["departure", "fill", "generator", "random_weights", "save_weights"]

Model = TypeVar("Model", bound=nn.Module)


def generator(*keys: object) -> torch.Generator:
    """A generator seeded by names; Python's own ``hash`` differs from process to process."""
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, keys)).encode()))


def random_weights(model: nn.Module, *keys: str, prefix: str = "") -> dict[str, Tensor]:
    """Weights for a model's parameters, of sizes at which signals neither die nor grow.

    Args:
        model: Gives names, shapes and precisions; it may be on the meta device.
        keys: Which weights.
        prefix: Of which parameters, by the beginning of their names.
    """
    return {
        name: _random(name, value, keys)
        for name, value in model.named_parameters()
        if name.startswith(prefix)
    }


def fill(model: Model, *keys: str) -> Model:
    """Give a model such weights.

    Args:
        model: Changed in place.
        keys: Which weights.

    Returns:
        The model, in evaluation mode.
    """
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(_random(name, value, keys))
    return model.eval()


def _random(name: str, like: Tensor, keys: tuple[str, ...]) -> Tensor:
    if name == "logit_scale":
        return torch.full(like.shape, 4.6)
    noise = torch.randn(like.shape, generator=generator(*keys, name), dtype=like.dtype)
    if like.ndim < 2:
        # norms, biases and the class embedding
        return noise.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
    if "embed" in name or "shared" in name:
        return noise.mul_(0.5)
    return noise.mul_(like.shape[1:].numel() ** -0.5)


def departure(name: str, value: Tensor, key: str, step: float = 0.2, shift: float = 0.02) -> Tensor:
    """An expert's tensor: a step away from the base's.

    A fifth of the weight's size is far enough for merging to hurt. Every parameter moves, as in
    fine-tuning: WUDI divides by the size of task vectors.

    Args:
        name: The tensor's name.
        value: The base's.
        key: Which expert.
        step: Size of the step of a matrix, relative to its own.
        shift: Size of the step of a vector.
    """
    noise = torch.randn(value.shape, generator=generator(key, name), dtype=value.dtype)
    scale = step * value.std() if value.ndim > 1 else shift
    return noise.mul_(scale).add_(value)


def save_weights(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a safetensors file that transformers takes for its own."""
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
