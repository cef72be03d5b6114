"""GLUE's eight text tasks: the published columns and splits, a few dozen made-up rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Features, Value
from random_models.words import WORDS

__all__ = ["GLUE", "GlueTask", "glue_features", "glue_rows", "glue_splits"]


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        texts: Columns of the texts.
        classes: Names of the labels; none where the label is a score from 0 to 5.
    """

    texts: tuple[str, ...]
    classes: tuple[str, ...]


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable")),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "mrpc": GlueTask(_PAIR, ("not_equivalent", "equivalent")),
    "qnli": GlueTask(("question", "sentence"), _ENTAILMENT),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate")),
    "rte": GlueTask(_PAIR, _ENTAILMENT),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "stsb": GlueTask(_PAIR, ()),
}


def glue_splits(task: str) -> tuple[str, ...]:
    """The splits of a task, as published."""
    if task == "mnli":
        kinds = ("matched", "mismatched")
        return ("train", *(f"{split}_{kind}" for split in ("validation", "test") for kind in kinds))
    return ("train", "validation", "test")


def glue_features(task: str) -> Features:
    """The columns of a task."""
    columns, classes = GLUE[task].texts, GLUE[task].classes
    features = Features({column: Value("string") for column in columns})
    features["label"] = ClassLabel(names=list(classes)) if classes else Value("float32")
    features["idx"] = Value("int32")
    return features


def glue_rows(task: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Sentences with labels that depend on one word. Test splits are published without labels."""
    chance = random.Random(f"{task}/{split}")
    columns, classes = GLUE[task].texts, GLUE[task].classes
    for index in range(count):
        row: dict[str, Any] = {
            column: " ".join(chance.choices(WORDS, k=chance.randint(2, 8))) for column in columns
        }
        label = chance.randrange(len(classes) or 6)
        row[columns[0]] += f" {WORDS[label + 3]}"
        if split.startswith("test"):
            label = -1
        yield row | {"label": label if classes else float(label), "idx": index}
