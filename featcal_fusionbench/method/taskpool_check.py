"""Whether the run's task pool fits the models: found before the long work, not in its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import CLIPConfig, CLIPModel, CLIPVisionModel

from ..errors import TaskPoolError

__all__ = ["check_task_pool"]

_TOWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size", "image_size")


def check_task_pool(task_pool: Any, base: nn.Module) -> None:
    """Refuse a CLIP task pool whose own CLIP is another one than the model pool's.

    Such a pool puts the merged vision tower before its own projection and text tower. Where the
    widths agree, as ViT-B/16's and B/32's do, nothing fails and every accuracy is wrong.

    Args:
        task_pool: FusionBench's task pool of the run, or None.
        base: The base, of any architecture.

    Raises:
        TaskPoolError: The task pool's CLIP cannot be read, or has another vision tower.
    """
    source = getattr(task_pool, "_clip_model", None)
    if source is None or not isinstance(base, CLIPVisionModel):
        return
    name, config = _clip_config(source)
    if config is None:
        return
    theirs, ours = config.vision_config, base.config
    differing = [
        f"{key} {getattr(theirs, key)} where the models have {getattr(ours, key)}"
        for key in _TOWER
        if getattr(theirs, key) != getattr(ours, key)
    ]
    if differing:
        raise TaskPoolError(
            f"the task pool evaluates with {name}, whose vision tower is another one "
            f"({'; '.join(differing)}), so its projection and text features do not belong to these "
            "models: set taskpool.base_model to the CLIP that the model pool's base was taken from."
        )


def _clip_config(source: Any) -> tuple[str, CLIPConfig | None]:
    """Name and configuration of a task pool's CLIP; None where neither can be told."""
    if isinstance(source, CLIPModel):
        return source.config.name_or_path or "a given CLIPModel", source.config
    if isinstance(source, Mapping):
        if source.get("_target_") != "transformers.CLIPModel.from_pretrained":
            return "", None
        source = source.get("pretrained_model_name_or_path")
    if not isinstance(source, str):
        return "", None
    try:
        return source, CLIPConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise TaskPoolError(
            f"the task pool's CLIP {source} cannot be read: set taskpool.base_model to a path or "
            f"hub id, or run without evaluation (taskpool=dummy). ({type(error).__name__}: {error})"
        ) from error
