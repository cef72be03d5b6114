"""Calibration samples: which inputs of which data set, drawn without replacement per task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from fusion_bench import BaseModelPool, instantiate
from omegaconf import DictConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .calibration.inputs import Inputs
from .errors import CalibrationDataError
from .report import TaskData

__all__ = [
    "TRAINING_SPLITS",
    "Batches",
    "PrepareInputs",
    "Split",
    "draw",
    "load_calibration_dataset",
    "load_tokenizer",
    "make_tokenizer",
    "require_datasets",
    "shortfalls",
    "source_of",
]

PrepareInputs = Callable[[Sequence[Any]], Inputs]
"""Turns items of a data set into the keyword arguments of one forward."""

Split = Literal["train", "val", "test"]
"""The splits that a model pool has data sets of."""
TRAINING_SPLITS: tuple[Split, ...] = ("train", "val")
"""What inputs are drawn from, unless a method is told to take test inputs."""


def shortfalls(data: TaskData, n_heldout: int) -> list[str]:
    """What a task has too few inputs for, as warnings."""
    found = []
    if data.used < data.requested:
        found.append(
            f"task {data.task}: {data.source} has only {data.available} items, so that "
            f"{data.used} instead of n_samples={data.requested} are used."
        )
    if len(data.heldout_indices) < n_heldout:
        found.append(
            f"task {data.task}: {len(data.heldout_indices)} instead of n_heldout={n_heldout} items "
            "are left to measure drift on; lower n_samples or use a larger data set."
        )
    return found


def require_datasets(
    pool: BaseModelPool, tasks: Sequence[str], splits: Sequence[Split] = TRAINING_SPLITS
) -> dict[str, Split]:
    """For each task, the first of some splits that the pool has data of.

    Raises:
        CalibrationDataError: Tasks have none of them; all are named.
    """
    found: dict[str, Split] = {}
    for task in tasks:
        for split in splits:
            if _has_dataset(pool, task, split):
                found[task] = split
                break
    missing = [task for task in tasks if task not in found]
    if missing:
        first, *others = splits
        alternatives = f" (or {', '.join(f'{split}_datasets' for split in others)})" * bool(others)
        raise CalibrationDataError(
            f"no calibration inputs for {', '.join(missing)}: set modelpool.{first}_datasets.<task>"
            f"{alternatives} to a Hugging Face data set, a directory of parquet files or a "
            "directory of images. Labels are not needed."
        )
    return found


def _has_dataset(pool: BaseModelPool, task: str, split: Split) -> bool:
    datasets = getattr(pool, f"_{split}_datasets")
    return datasets is not None and task in datasets


def load_tokenizer(pool: BaseModelPool) -> PreTrainedTokenizerBase:
    """The tokenizer of a pool's configuration.

    Raises:
        CalibrationDataError: There is none, or it cannot be loaded.
    """
    config = getattr(pool, "_tokenizer", None)
    if config is None:
        raise CalibrationDataError(
            "the model pool has no tokenizer: set modelpool.tokenizer to the path or hub id of "
            "the one that the base was trained with."
        )
    try:
        return make_tokenizer(config)
    except Exception as error:
        raise CalibrationDataError(
            f"the model pool's tokenizer cannot be loaded: set modelpool.tokenizer to the path or "
            f"hub id of the base's ({type(error).__name__}: {error})"
        ) from error


def make_tokenizer(config: Any) -> PreTrainedTokenizerBase:
    """A tokenizer from its path or hub id, from a configuration, or as it is."""
    if isinstance(config, str):
        return AutoTokenizer.from_pretrained(config)
    return instantiate(config) if isinstance(config, Mapping | DictConfig) else config


def load_calibration_dataset(pool: BaseModelPool, task: str, split: Split) -> Any:
    """Load one task's data set through the pool.

    Raises:
        CalibrationDataError: It cannot be loaded, or is empty.
    """
    try:
        dataset: Any = getattr(pool, f"load_{split}_dataset")(task)
        size = len(dataset)
    except Exception as error:
        raise CalibrationDataError(
            f"the calibration data of task {task} cannot be loaded "
            f"(modelpool.{split}_datasets.{task}): {type(error).__name__}: {error}"
        ) from error
    if size == 0:
        raise CalibrationDataError(
            f"the calibration data of task {task} is empty: check "
            f"modelpool.{split}_datasets.{task}."
        )
    return dataset


def source_of(pool: BaseModelPool, task: str, split: Split) -> str:
    """The data set of a task as the pool's configuration names it."""
    datasets = getattr(pool, f"_{split}_datasets")
    entry = None if datasets is None else datasets[task]
    if isinstance(entry, DictConfig | dict):
        parts = [str(entry[k]) for k in ("path", "name", "data_dir", "split") if entry.get(k)]
        return ", ".join(parts) or str(entry.get("_target_", entry))
    return entry if isinstance(entry, str) else type(entry).__name__


def draw(
    task: str, source: str, split: str, available: int, *, n_samples: int, n_heldout: int, seed: int
) -> TaskData:
    """Draw calibration and held-out items without replacement.

    The generator is the task's own: neither other tasks nor what a library does with the global
    random state changes what is drawn.

    Args:
        task: The task.
        source: Its data set, as the pool names it.
        split: The split that it is.
        available: Items in the data set.
        n_samples: Items to calibrate on; all that there are, if they are fewer.
        n_heldout: Further items to measure drift on; what is left, if that is fewer.
        seed: Seed of the run.
    """
    digest = hashlib.sha256(f"{seed}/{task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    order = torch.randperm(available, generator=generator).tolist()
    used = min(n_samples, available)
    return TaskData(
        task=task,
        source=source,
        split=split,
        available=available,
        requested=n_samples,
        used=used,
        indices=tuple(order[:used]),
        heldout_indices=tuple(order[used : used + n_heldout]),
    )


class Batches:
    """Batches of a data set's items, prepared when they are read.

    Args:
        dataset: Gives an item by index.
        indices: The items.
        batch_size: Items per batch.
        prepare: Makes the inputs of one forward.
        task: Its name, for messages.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Sequence[int],
        batch_size: int,
        prepare: PrepareInputs,
        task: str,
    ) -> None:
        self._dataset = dataset
        self._chunks = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        self._prepare = prepare
        self._task = task

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Inputs]:
        for chunk in self._chunks:
            try:
                yield self._prepare([self._dataset[int(i)] for i in chunk])
            except Exception as error:
                raise CalibrationDataError(
                    f"items {list(chunk)[:3]}… of task {self._task} cannot be turned into inputs: "
                    f"{type(error).__name__}: {error}"
                ) from error
