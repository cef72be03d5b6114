"""The plain model inside what a user may hand over: wrappers, adapters, a whole CLIP."""

from __future__ import annotations

import copy

import torch
from peft import PeftModel
from torch import nn
from transformers import CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection

from .adapters import merged_copy

__all__ = ["plain_copy", "plain_model"]


def plain_model(model: nn.Module, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Take a model out of what is around it: a compiled or parallel wrapper, PEFT, a whole CLIP.

    Args:
        model: The model as it was given; it is not changed.
        name: Its name in the pool, for messages.

    Returns:
        The plain model, which shares its tensors with the given one unless an adapter had to be
        merged, and warnings about parts that are left out.

    Raises:
        ModelPoolError: An adapter cannot be merged.
    """
    inner = _unwrapped(model)
    if isinstance(inner, PeftModel):
        inner = _unwrapped(merged_copy(inner, name))
    if isinstance(inner, CLIPModel | CLIPVisionModelWithProjection):
        warning = (
            f"model {name!r} is a {type(inner).__name__}: only its vision tower is used, not its "
            "projection or text tower."
        )
        return _tower(inner.vision_model), (warning,)
    if type(inner).__name__ == "CLIPVisionTransformer":  # a class of transformers before 5.6 alone
        return _tower(inner), ()
    return inner, ()


def plain_copy(model: nn.Module, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """As :func:`plain_model`, but a model of its own, whatever was given."""
    plain, warnings = plain_model(model, name)
    return copy.deepcopy(plain), warnings


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif type(model).__name__ in ("DataParallel", "DistributedDataParallel", "_FabricModule"):
            model = model.get_submodule("module")
        else:
            return model


def _tower(transformer: nn.Module) -> nn.Module:
    """A vision tower as the model class that has it, in either layout."""
    if isinstance(transformer, CLIPVisionModel):  # the flat layout has no class between
        return transformer
    with torch.device("meta"):
        model = CLIPVisionModel(transformer.config)  # pyright: ignore[reportArgumentType]
    model.vision_model = transformer
    return model.train(transformer.training)
