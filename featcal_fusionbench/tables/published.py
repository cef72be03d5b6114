"""Published results, each with its source, in two trees that are never mixed.

The two trees hold results on different experts: what a merger reaches on one set of experts says
nothing about another. So every look-up names its tree, and a column of values from both is refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.resources import as_file, files
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf

__all__ = [
    "MixedTreesError",
    "PublishedNumberError",
    "PublishedRow",
    "Tree",
    "labels",
    "look_up",
    "require_one_tree",
]

_DATA = "published.yaml"


class Tree(str, Enum):
    """Whose checkpoints a result was measured on."""

    FUSIONBENCH = "fusionbench_checkpoints"
    """The experts that FusionBench's model pools name."""
    OTHER = "other_checkpoints"
    """Any others."""


class PublishedNumberError(KeyError):
    """There is no such published result."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows the repr of its message


class MixedTreesError(ValueError):
    """Published results on different checkpoints were to stand in one column."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published result.

    Attributes:
        tree: Whose checkpoints it was measured on.
        backbone: The model.
        task_set: Key of the set of tasks.
        tasks: The tasks of the set, which the average runs over.
        label: What tells it from the others of the same tree, backbone and set of tasks.
        source: Where it was read.
        scores: By task, 0 to 1; empty where only the average was published.
        average: The published average over all tasks of the set, 0 to 1; None where there is none.
        note: A remark.
    """

    tree: Tree
    backbone: str
    task_set: str
    tasks: tuple[str, ...]
    label: str
    source: str
    scores: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None
    note: str = ""


def labels(tree: Tree | str, backbone: str, task_set: str) -> list[str]:
    """The labels of all published results on one set of tasks.

    Raises:
        PublishedNumberError: The tree has no such backbone or set of tasks.
    """
    return list(_rows(tree, backbone, task_set))


def look_up(tree: Tree | str, backbone: str, task_set: str, label: str) -> PublishedRow:
    """Look one published result up.

    Args:
        tree: Whose checkpoints.
        backbone: As the model pools name it: ``clip-vit-base-patch32``, ``flan-t5-base``.
        task_set: ``TA8``, ``TALL14``, ``TALL20``, ``GLUE8_full`` or ``GLUE8_lora16``.
        label: One of ``labels``.

    Raises:
        PublishedNumberError: One of them is unknown; the message suggests near names.
    """
    rows = _rows(tree, backbone, task_set)
    if label not in rows:
        raise _unknown("label", label, rows, f"{Tree(tree).value}, {backbone}, {task_set}")
    return rows[label]


def require_one_tree(rows: Iterable[PublishedRow]) -> Tree | None:
    """Make sure that published results may stand in one column.

    Returns:
        Their tree; None where there are no results.

    Raises:
        MixedTreesError: They are of several trees; the message names results of each.
    """
    by_tree: dict[Tree, PublishedRow] = {}
    for row in rows:
        by_tree.setdefault(row.tree, row)
    if len(by_tree) > 1:
        named = " and ".join(f"{row.label} ({tree.value})" for tree, row in by_tree.items())
        raise MixedTreesError(
            f"{named} were measured on different checkpoints and cannot be compared with one "
            f"another: take all values of a column from one tree."
        )
    return next(iter(by_tree), None)


def _rows(tree: Tree | str, backbone: str, task_set: str) -> Mapping[str, PublishedRow]:
    try:
        tree = Tree(tree)
    except ValueError:
        raise _unknown("tree", str(tree), [t.value for t in Tree], "the package") from None
    backbones = _load()[tree]
    if backbone not in backbones:
        raise _unknown("backbone", backbone, backbones, tree.value)
    task_sets = backbones[backbone]
    if task_set not in task_sets:
        raise _unknown("set of tasks", task_set, task_sets, f"{tree.value}, {backbone}")
    return task_sets[task_set]


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> PublishedNumberError:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    # Labels may run to sixty; near ones are enough, if there are any.
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return PublishedNumberError(f"No published {what} {name!r} in {where}. {hint}")


@cache
def _load() -> Mapping[Tree, Mapping[str, Mapping[str, Mapping[str, PublishedRow]]]]:
    with as_file(files("featcal_fusionbench.tables") / _DATA) as path:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
    return MappingProxyType(
        {
            tree: {
                backbone: {
                    task_set: {
                        label: _row(content, entry, (tree, backbone, task_set, label))
                        for label, entry in entries.items()
                    }
                    for task_set, entries in task_sets.items()
                }
                for backbone, task_sets in content[tree.value].items()
            }
            for tree in Tree
        }
    )


def _row(
    content: Mapping[str, Any], entry: Mapping[str, Any], key: tuple[Tree, str, str, str]
) -> PublishedRow:
    tree, backbone, task_set, label = key
    average = entry.get("average")
    return PublishedRow(
        tree=tree,
        backbone=backbone,
        task_set=task_set,
        tasks=tuple(content["task_sets"][task_set]),
        label=label,
        source=content["sources"][entry["source"]],
        scores=MappingProxyType(
            {task: _fraction(value) for task, value in entry.get("scores", {}).items()}
        ),
        average=None if average is None else _fraction(average),
        note=entry.get("note", ""),
    )


def _fraction(percent: float) -> float:
    value = float(percent) / 100
    if not (math.isfinite(value) and -1 <= value <= 1):
        raise ValueError(f"{_DATA}: {percent} is no percentage.")
    return value
