"""The inputs of all tasks: loaded, drawn, and each of them read once before the long work."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_bench import BaseModelPool
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..architectures import Architecture
from ..calibration.inputs import Inputs
from ..data.draws import (
    TRAINING_SPLITS,
    Batches,
    draw,
    draw_from_stream,
    load_calibration_dataset,
    require_datasets,
    shortfalls,
)
from ..data.items import Problems, reason_of
from ..data.sources import Split, is_stream, source_of, unformatted
from ..errors import CalibrationDataError, SettingsError
from ..report import TaskData
from ..settings import SampleSettings

__all__ = ["Samples", "TaskInputs", "draw_samples"]


@dataclass(frozen=True)
class TaskInputs:
    """What was drawn for one task, and its batches: read when iterated over, or in memory."""

    data: TaskData
    calibration: Batches | Sequence[Inputs]
    heldout: Batches | Sequence[Inputs]


@dataclass(frozen=True)
class Samples:
    """The inputs of a run.

    Attributes:
        inputs: Calibration and held-out inputs by task.
        example: One prepared input, of texts rather a long one.
        warnings: What the user should know.
    """

    inputs: Mapping[str, TaskInputs]
    example: Inputs
    warnings: tuple[str, ...]


def draw_samples(
    pool: BaseModelPool,
    tasks: Sequence[str],
    architecture: Architecture[Any],
    processor: Any,
    base_model: nn.Module,
    settings: SampleSettings,
    splits: Sequence[Split] = TRAINING_SPLITS,
    *,
    show_progress: bool,
) -> Samples:
    """Load, draw and read the inputs of all tasks.

    Every input drawn is decoded once, so that what cannot be read is found here, for all tasks at
    once. What was read is let go: batches read their inputs again. Items of streams stay in memory.

    Args:
        pool: The model pool; it is not changed.
        tasks: The tasks.
        architecture: The architecture of the models.
        processor: What its ``load_processor`` gave.
        base_model: The base.
        settings: How many inputs, and how they are made.
        splits: Splits to draw from; of each task the first that the pool has.
        show_progress: Whether to show a bar while inputs are read.

    Raises:
        CalibrationDataError: Data are missing or cannot be read; all tasks at fault are named.
        SettingsError: ``input_column`` names a task that there is none of.
    """
    _require_known_tasks(settings, tasks)
    found = require_datasets(pool, tasks, splits)
    prepare = {
        task: architecture.prepare_inputs(processor, base_model, settings.column_of(task))
        for task in tasks
    }
    errors: list[str] = []
    drawn: dict[str, tuple[TaskData, Any]] = {}
    for task in tasks:
        try:
            dataset = load_calibration_dataset(pool, task, found[task])
            if architecture.reads_plain_items(processor):
                dataset = unformatted(dataset)
            drawn[task] = _draw(pool, task, found[task], dataset, settings)
        except CalibrationDataError as error:
            errors.append(str(error))
    _raise_all(errors)

    inputs: dict[str, TaskInputs] = {}
    examples: list[Inputs] = []
    warnings: list[str] = []
    total = sum(len(data.indices) + len(data.heldout_indices) for data, _ in drawn.values())
    with tqdm(total=total, desc="Reading inputs", leave=False, disable=not show_progress) as bar:
        for task, (data, items) in drawn.items():
            unreadable = Problems()
            read = _read(items, (*data.indices, *data.heldout_indices), unreadable, bar.update)
            try:
                checked = architecture.check_items(
                    task, read, processor, base_model, settings.column_of(task)
                )
                if not errors and not unreadable:
                    examples += Batches(items, data.indices[:1], 1, prepare[task], task)
                    parts = (
                        Batches(
                            items,
                            sorted(indices, key=lambda index: checked.lengths.get(index, 0)),
                            settings.batch_size,
                            prepare[task],
                            task,
                        )
                        for indices in (data.indices, data.heldout_indices)
                    )
                    inputs[task] = TaskInputs(data, *parts)
                    warnings += checked.warnings
            except CalibrationDataError as error:
                errors.append(str(error))
            if unreadable:
                errors.append(
                    f"the calibration data of task {task} cannot be read: {unreadable}. Mend or "
                    f"leave out these items (modelpool.{data.split}_datasets.{task})."
                )
    _raise_all(errors)
    for of in inputs.values():
        warnings += shortfalls(of.data, settings.n_heldout)
    return Samples(inputs, max(examples, key=_tensor_bytes), tuple(warnings))


def _raise_all(errors: Sequence[str]) -> None:
    if errors:
        raise CalibrationDataError("\n".join(errors))


def _require_known_tasks(settings: SampleSettings, tasks: Sequence[str]) -> None:
    columns = settings.input_column
    unknown = [task for task in columns if task not in tasks] if isinstance(columns, dict) else []
    if unknown:
        close = difflib.get_close_matches(unknown[0], tasks, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(tasks)}."
        raise SettingsError(
            f"input_column names {', '.join(unknown)}, which is no task of the model pool: {hint}"
        )


def _draw(
    pool: BaseModelPool, task: str, split: Split, dataset: Any, settings: SampleSettings
) -> tuple[TaskData, Any]:
    """What is drawn, and something that gives the items by index."""
    source = source_of(pool, task, split)
    counts = {key: getattr(settings, key) for key in ("n_samples", "n_heldout", "seed")}
    if is_stream(dataset):
        return draw_from_stream(dataset, task, source, split, **counts)
    return draw(task, source, split, len(dataset), **counts), dataset


def _read(
    items: Any, indices: Sequence[int], unreadable: Problems, on_item: Callable[[], Any]
) -> Iterator[tuple[int, Any]]:
    for index in indices:
        try:
            item = items[index]
        except Exception as error:
            unreadable.add(reason_of(error), index)
        else:
            yield index, item
        on_item()


def _tensor_bytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
