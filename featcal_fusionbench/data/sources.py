"""What a model pool may name as a data set, opened: paths, configurations, objects, streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import datasets
from fusion_bench import BaseModelPool
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchStream

from ..errors import CalibrationDataError

__all__ = ["Split", "is_fusion_benchs", "is_stream", "open_dataset", "source_of", "unformatted"]

Split = Literal["train", "val", "test"]
"""The splits that a model pool has data sets of."""
_NAMES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "val"),
    "test": ("test",),
}


def open_dataset(pool: BaseModelPool, task: str, split: Split) -> Any:
    """Open a task's data set.

    Paths and configurations go through the pool's loader, except that FusionBench's pools cannot
    load what is a data set already, and most of them no path.

    Returns:
        Items by index, or a stream of them (see :func:`is_stream`).

    Raises:
        CalibrationDataError: The entry is nothing that can be opened, or has several splits of
            which none is named as the pool's.
        Exception: What the loader raises.
    """
    setting = f"modelpool.{split}_datasets.{task}"
    entry = getattr(pool, f"_{split}_datasets")[task]
    loader = getattr(pool, f"load_{split}_dataset")
    function = getattr(loader, "__func__", loader)
    is_mapping = isinstance(entry, Mapping | DictConfig)
    is_config = is_mapping and "_target_" in entry
    is_path = isinstance(entry, str | Path)
    if is_mapping and not is_config and any(isinstance(v, str) for v in entry.values()):
        raise CalibrationDataError(
            f"{setting} has no _target_: write `_target_: datasets.load_dataset` beside its "
            f"{', '.join(map(str, entry))}."
        )
    takes_paths = function is not getattr(BaseModelPool, f"load_{split}_dataset")
    if is_config or not is_fusion_benchs(loader) or (isinstance(entry, str) and takes_paths):
        dataset = loader(task)
    else:
        dataset = datasets.load_dataset(str(entry)) if is_path else entry
    if isinstance(dataset, Mapping):
        dataset = _one_split(dataset, split, setting)
    _require_items(dataset, setting)
    return dataset


def source_of(pool: BaseModelPool, task: str, split: Split) -> str:
    """The data set of a task as the pool's configuration names it."""
    entries = getattr(pool, f"_{split}_datasets")
    entry = None if entries is None else entries[task]
    if isinstance(entry, DictConfig | dict) and not isinstance(entry, datasets.DatasetDict):
        parts = [str(entry[k]) for k in ("path", "name", "data_dir", "split") if entry.get(k)]
        return ", ".join(parts) or str(entry.get("_target_", type(entry).__name__))
    return str(entry) if isinstance(entry, str | Path) else type(entry).__name__


def is_fusion_benchs(function: Any) -> bool:
    """Whether a loader of a pool is FusionBench's, not one that a user wrote."""
    return str(getattr(function, "__module__", "")).startswith("fusion_bench.")


def is_stream(dataset: Any) -> bool:
    """Whether items can be read one after another only."""
    return isinstance(dataset, datasets.IterableDataset | TorchStream) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    )


def unformatted(dataset: Any) -> Any:
    """A data set of the library ``datasets`` without its format (torch, numpy, …).

    As arrays, images lose what their numbers mean: a palette, or colours that are no RGB. Formats
    that are functions stay.
    """
    if isinstance(dataset, datasets.Dataset):
        form = dataset.format
        if form["type"] in (None, "custom"):
            return dataset
        kept = form["columns"] if not form["output_all_columns"] else None
        return dataset.with_format(None, columns=kept)
    return dataset.with_format(None) if isinstance(dataset, datasets.IterableDataset) else dataset


def _one_split(splits: Mapping[str, Any], split: Split, setting: str) -> Any:
    """The split that the pool's entry stands for, else the only one."""
    for name in _NAMES[split]:
        if name in splits:
            return splits[name]
    if len(splits) == 1:
        (only,) = splits.values()
        return only
    raise CalibrationDataError(
        f"{setting} has the splits {', '.join(map(str, splits)) or '(none)'}, and none is called "
        f"{' or '.join(_NAMES[split])}: name the one to read, `{{_target_: datasets.load_dataset, "
        "path: …, split: …}`, or give that split alone."
    )


def _require_items(dataset: Any, setting: str) -> None:
    problem = None
    if isinstance(dataset, DataLoader):
        problem = "a DataLoader, which gives batches: give its `.dataset`"
    elif isinstance(dataset, Iterator):
        problem = f"a {type(dataset).__name__}, which can be read once only: give a list"
    elif isinstance(dataset, str | bytes | type) or not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    ):
        problem = f"a {type(dataset).__name__}, which is no data set: give one, or a list of items"
    if problem is not None:
        raise CalibrationDataError(f"{setting} is {problem}.")
