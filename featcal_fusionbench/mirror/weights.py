"""Random weights by name: the same under every release, whatever was drawn before."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["departure", "generator", "random_weights", "save_weights"]


def generator(*keys: str) -> torch.Generator:
    """A generator seeded by names; Python's own ``hash`` differs from process to process."""
    return torch.Generator().manual_seed(zlib.crc32("/".join(keys).encode()))


def random_weights(model: nn.Module, key: str, prefix: str = "") -> dict[str, Tensor]:
    """Float32 weights for a model's parameters, of sizes at which signals neither die nor grow.

    Args:
        model: Gives names and shapes; it may be on the meta device.
        key: Which weights.
        prefix: Of which parameters, by the beginning of their names.
    """
    return {
        name: _random(name, value.shape, key)
        for name, value in model.named_parameters()
        if name.startswith(prefix)
    }


def _random(name: str, shape: torch.Size, key: str) -> Tensor:
    if name == "logit_scale":
        return torch.full(shape, 4.6)
    noise = torch.randn(shape, generator=generator(key, name))
    if len(shape) < 2:
        # norms, biases and the class embedding
        return noise.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
    if "embedding" in name or "shared" in name:
        return noise.mul_(0.5)
    return noise.mul_(shape[1:].numel() ** -0.5)


def departure(name: str, value: Tensor, key: str) -> Tensor:
    """An expert's tensor: a step of a fifth of the weight's size away from the base's.

    That is far enough for merging to hurt. Every parameter moves, as in fine-tuning: WUDI divides
    by the size of task vectors.

    Args:
        name: The tensor's name.
        value: The base's.
        key: Which expert.
    """
    noise = torch.randn(value.shape, generator=generator(key, name))
    scale = 0.2 * value.std() if value.ndim > 1 else 0.02
    return noise.mul_(scale).add_(value)


def save_weights(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a safetensors file that transformers takes for its own."""
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})
