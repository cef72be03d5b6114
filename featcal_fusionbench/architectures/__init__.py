"""What the engine cannot find by structure: how inputs are made, and which rows count how much.

One module per architecture; to add one, write it and list it in ``KNOWN``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import ModelPoolError
from .base import Architecture, CompleteInputs, ItemCheck
from .clip_vision import ClipVision
from .t5 import T5

__all__ = [
    "KNOWN",
    "Architecture",
    "CompleteInputs",
    "ItemCheck",
    "architecture_of",
]

KNOWN: tuple[type[Architecture[Any]], ...] = (ClipVision, T5)
"""The architectures, in the order in which they are asked."""


def architecture_of(model: nn.Module, among: Sequence[Architecture[Any]]) -> Architecture[Any]:
    """The architecture of a model.

    Args:
        model: The model.
        among: One of each of ``KNOWN``, with its settings.

    Raises:
        ModelPoolError: None of them.
    """
    for architecture in among:
        if architecture.recognises(model):
            return architecture
    raise ModelPoolError(
        f"models of type {type(model).__name__} are not supported yet (supported: "
        f"{', '.join(a.name for a in among)}). CONTRIBUTING.md says how to add an architecture."
    )
