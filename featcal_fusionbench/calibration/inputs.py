"""The inputs of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Inputs", "place_inputs"]

Inputs = Mapping[str, Any]
"""Keyword arguments of one forward of one batch."""


def place_inputs(inputs: Inputs, model: nn.Module) -> dict[str, Any]:
    """The inputs on the model's device, floating ones in its dtype."""
    like = next(model.parameters())

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)

    return {key: place(value) for key, value in inputs.items()}
