"""Published results, each with its source, all on the experts that FusionBench's pools name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import as_file, files
from typing import Any

from omegaconf import OmegaConf

__all__ = ["PublishedNumberError", "PublishedRow", "labels", "look_up"]

_DATA = "published.yaml"


class PublishedNumberError(KeyError):
    """There is no such published result."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the repr of its message


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published result.

    Attributes:
        tasks: The tasks of the set, which the average runs over.
        label: What tells it from the others of the same backbone and set of tasks.
        source: Where it was read.
        scores: By task, 0 to 1; empty where only the average was published.
        average: The published average over all tasks of the set, 0 to 1; None where there is none.
        note: A remark.
    """

    tasks: tuple[str, ...]
    label: str
    source: str
    scores: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None
    note: str = ""


def labels(backbone: str, task_set: str) -> list[str]:
    """The labels of all published results on one set of tasks.

    Raises:
        PublishedNumberError: There is no such backbone or set of tasks.
    """
    return list(_rows(backbone, task_set))


def look_up(backbone: str, task_set: str, label: str) -> PublishedRow:
    """Look one published result up.

    Args:
        backbone: As the model pools name it: ``clip-vit-base-patch32``, ``flan-t5-base``.
        task_set: ``TA8``, ``TALL14``, ``TALL20``, ``GLUE8_full`` or ``GLUE8_lora16``.
        label: One of ``labels``.

    Raises:
        PublishedNumberError: One of them is unknown; the message suggests near names.
    """
    rows = _rows(backbone, task_set)
    if label not in rows:
        raise _unknown("label", label, rows, f"{backbone}, {task_set}")
    return rows[label]


def _rows(backbone: str, task_set: str) -> Mapping[str, PublishedRow]:
    backbones = _load()
    if backbone not in backbones:
        raise _unknown("backbone", backbone, backbones, "the package")
    task_sets = backbones[backbone]
    if task_set not in task_sets:
        raise _unknown("set of tasks", task_set, task_sets, backbone)
    return task_sets[task_set]


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> PublishedNumberError:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    # Labels may run to sixty; near ones are enough, if there are any.
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return PublishedNumberError(f"No published {what} {name!r} in {where}. {hint}")


@cache
def _load() -> Mapping[str, Mapping[str, Mapping[str, PublishedRow]]]:
    with as_file(files("featcal_fusionbench.tables") / _DATA) as path:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))

    def row(task_set: str, label: str, entry: Mapping[str, Any]) -> PublishedRow:
        tasks = tuple(content["task_sets"][task_set])
        scores = map(_fraction, entry["scores"]) if "scores" in entry else ()
        return PublishedRow(
            tasks=tasks,
            label=label,
            source=content["sources"][entry["source"]],
            scores=dict(zip(tasks, scores, strict=True)) if scores else {},
            average=_fraction(entry["average"]) if "average" in entry else None,
            note=entry.get("note", ""),
        )

    return {
        backbone: {
            task_set: {label: row(task_set, label, rows[label]) for label in rows}
            for task_set, rows in task_sets.items()
        }
        for backbone, task_sets in content["fusionbench_checkpoints"].items()
    }


def _fraction(percent: float) -> float:
    value = float(percent) / 100
    if not (math.isfinite(value) and -1 <= value <= 1):
        raise ValueError(f"{_DATA}: {percent} is no percentage.")
    return value
