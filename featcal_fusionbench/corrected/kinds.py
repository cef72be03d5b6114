"""The wrappers that there are."""

from __future__ import annotations

from fusion_bench import BaseModelPool
from torch import nn

from ..errors import ModelPoolError
from .base import CorrectedModel
from .clip_vision import CorrectedClipVision
from .t5 import CorrectedT5

__all__ = ["KINDS", "wrap"]

KINDS: tuple[type[CorrectedModel], ...] = (CorrectedClipVision, CorrectedT5)
"""The wrappers, in the order in which they are asked."""


def wrap(model: nn.Module, pool: BaseModelPool) -> CorrectedModel:
    """Wrap a model of the pool's architecture, without any corrections yet.

    Args:
        model: The model; it becomes part of the wrapper.
        pool: The model pool, for what the wrapper needs besides: CLIP's visual projection.

    Raises:
        ModelPoolError: There is no wrapper for such a model.
    """
    for kind in KINDS:
        if kind.recognises(model):
            return kind.from_pool(model, pool)
    raise ModelPoolError(
        f"models of type {type(model).__name__} have no wrapper for corrections yet (there are: "
        f"{', '.join(kind.architecture for kind in KINDS)})."
    )
