"""Calibration samples: which inputs of which data set, drawn without replacement per task."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from fusion_bench import BaseModelPool, instantiate
from omegaconf import DictConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..calibration.inputs import Inputs
from ..errors import CalibrationDataError
from ..report import TaskData
from .items import reason_of
from .sources import Split, is_stream, open_dataset

__all__ = [
    "TRAINING_SPLITS",
    "Batches",
    "PrepareInputs",
    "Split",
    "draw",
    "draw_from_stream",
    "load_calibration_dataset",
    "load_tokenizer",
    "make_tokenizer",
    "require_datasets",
    "shortfalls",
]

PrepareInputs = Callable[[Sequence[Any]], Inputs]
"""Turns items of a data set into the keyword arguments of one forward."""

TRAINING_SPLITS: tuple[Split, ...] = ("train", "val")
"""What inputs are drawn from, unless a method is told to take test inputs."""
_READ_OF_STREAMS = 4


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
    if data.note:
        found.append(f"task {data.task}: {data.source} is {data.note}")
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
            f"{alternatives} to a Hugging Face data set, a directory of parquet files, a "
            "directory of images or a list of items. Labels are not needed."
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
    """Load one task's data set, or take it as it is where the pool has an object.

    Raises:
        CalibrationDataError: It cannot be loaded, is no data set, or is empty.
    """
    try:
        dataset = open_dataset(pool, task, split)
        size = None if is_stream(dataset) else len(dataset)
    except CalibrationDataError:
        raise
    except Exception as error:
        raise CalibrationDataError(
            f"the calibration data of task {task} cannot be loaded "
            f"(modelpool.{split}_datasets.{task}): {type(error).__name__}: {error}"
        ) from error
    if size == 0:
        raise _empty(task, split)
    return dataset


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
    order = torch.randperm(available, generator=_generator(task, seed)).tolist()
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


def draw_from_stream(
    stream: Iterable[Any],
    task: str,
    source: str,
    split: Split,
    *,
    n_samples: int,
    n_heldout: int,
    seed: int,
) -> tuple[TaskData, dict[int, Any]]:
    """Draw items of a stream, with equal probabilities, from those that it begins with.

    Args:
        stream: Gives items one after another; read once.
        task: The task.
        source: Its data set, as the pool names it.
        split: The split that it is.
        n_samples: Items to calibrate on; all that there are, if they are fewer.
        n_heldout: Further items to measure drift on.
        seed: Seed of the run.

    Returns:
        What was drawn, and the items by their position, held in memory. A stream that ends within
        the first 4 · (n_samples + n_heldout) items is drawn from as a whole.

    Raises:
        CalibrationDataError: The stream is empty, or fails while it is read.
    """
    generator, wanted = _generator(task, seed), n_samples + n_heldout
    limit = _READ_OF_STREAMS * wanted
    kept: list[tuple[int, Any]] = []
    seen = 0
    try:
        for seen, item in enumerate(itertools.islice(iter(stream), limit), 1):
            if seen <= wanted:
                kept.append((seen - 1, item))
                continue
            place = int(torch.randint(seen, (1,), generator=generator))
            if place < wanted:
                kept[place] = (seen - 1, item)
    except Exception as error:
        raise CalibrationDataError(
            f"the stream of task {task} (modelpool.{split}_datasets.{task}) fails after {seen} "
            f"items: {type(error).__name__}: {error}"
        ) from error
    if not kept:
        raise _empty(task, split)
    # places in the list are no chance, so order and held-out items are drawn too
    order = torch.randperm(len(kept), generator=generator).tolist()
    indices = [kept[place][0] for place in order]
    ended = seen < limit
    note = (
        f"a stream: inputs are drawn from its first {limit} items, {_READ_OF_STREAMS} times "
        "n_samples + n_heldout; shuffle it if it is in the order of its classes."
    )
    data = TaskData(
        task=task,
        source=source,
        split=split,
        available=seen if ended else None,
        requested=n_samples,
        used=min(n_samples, len(indices)),
        indices=tuple(indices[:n_samples]),
        heldout_indices=tuple(indices[n_samples:]),
        note="" if ended else note,
    )
    return data, dict(kept)


def _generator(task: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{task}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _empty(task: str, split: Split) -> CalibrationDataError:
    return CalibrationDataError(
        f"the calibration data of task {task} is empty: check modelpool.{split}_datasets.{task}."
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
                batch = self._read(chunk)
            except Exception as error:
                raise self._at_fault(chunk, error) from error
            yield batch

    def _read(self, indices: Sequence[int]) -> Inputs:
        return self._prepare([self._dataset[int(i)] for i in indices])

    def _at_fault(self, chunk: Sequence[int], error: Exception) -> CalibrationDataError:
        """The error of a batch, said of those of its items that fail alone too, if any do."""
        alone: dict[int, Exception] = {}
        for index in chunk:
            try:
                self._read([index])
            except Exception as one:
                alone[int(index)] = one
        named = list(alone) or [int(index) for index in chunk]
        error = alone[named[0]] if alone else error
        together = "" if alone or len(named) == 1 else "together "
        return CalibrationDataError(
            f"items {named} of task {self._task} cannot {together}be turned into inputs: "
            f"{reason_of(error)}"
        )
