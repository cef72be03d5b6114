"""A pool as mergers see it: its models are those that were checked, whatever lies around them."""

from __future__ import annotations

import copy
from typing import Any, get_args

from fusion_bench import BaseModelPool
from torch import nn
from transformers import BaseImageProcessor, CLIPModel, ProcessorMixin

from ..data.sources import Split, open_dataset
from .models import PoolModels, mark_as_view
from .opening import BASE, source_of_entry

__all__ = ["view_for_mergers"]


def view_for_mergers(models: PoolModels) -> BaseModelPool:
    """A pool that hands out the models that were opened, each call a model of its own.

    So a merger reads the same weights as the calibration, in one precision, and may write into
    what it is given, as several of FusionBench's do.

    Args:
        models: The opened models.

    Returns:
        A pool of the given pool's class, with its data sets and all else that it has.
    """
    pool = models.pool
    view: Any = copy.copy(pool)
    view._models = copy.copy(pool._models)

    def load_model(model_name_or_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        known = isinstance(model_name_or_config, str) and (
            model_name_or_config == BASE or model_name_or_config in models.experts
        )
        if known and not args and not kwargs:
            return models.load(model_name_or_config)
        # other models, or other arguments: what the merger asks the pool for
        loaded = pool.load_model(model_name_or_config, *args, **kwargs)
        is_shared = any(loaded is entry for entry in pool._models.values())
        return copy.deepcopy(loaded) if is_shared else loaded

    def load_clip_model(model_name: str, *args: Any, **kwargs: Any) -> Any:
        source = source_of_entry(pool._models[model_name])
        if source is None or isinstance(pool._models[model_name], str):
            return pool.load_clip_model(model_name, *args, **kwargs)  # pyright: ignore
        return CLIPModel.from_pretrained(source, *args, **kwargs)

    def loader(split: Split) -> Any:
        own = getattr(pool, f"load_{split}_dataset")
        return lambda name, *a, **k: (
            own(name, *a, **k) if a or k else open_dataset(pool, name, split)
        )

    # FusionBench's own loaders know no data sets and no processors that are objects already.
    for split in get_args(Split):
        setattr(view, f"load_{split}_dataset", loader(split))
    given = getattr(pool, "_processor", None)
    if isinstance(given, ProcessorMixin | BaseImageProcessor):
        view.load_processor = lambda *_, **__: given
    view.load_model = load_model
    if hasattr(pool, "load_clip_model"):
        view.load_clip_model = load_clip_model
    mark_as_view(view, models)
    return view
