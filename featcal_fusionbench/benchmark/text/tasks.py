"""The tasks of the embedded text benchmark: names, prompts, metrics, and their data sets.

Every task is text to text: an input is "<prompt> : <text>", the answer a word or a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from . import corpora
from .corpora import Corpus, Example

SPLITS = ("train", "test")

Metric = Literal["accuracy", "spearman_rho"]


@dataclass(frozen=True)
class Task:
    """One text-to-text task.

    Attributes:
        name: Key in the pools and tables.
        prompt: What stands before every text.
        read: Reads its texts.
        metric: Exact match of the answer, or rank correlation of the answers as numbers.
    """

    name: str
    prompt: str
    read: Callable[[], Corpus]
    metric: Metric = "accuracy"

    def input(self, text: str) -> str:
        """The whole input for a text."""
        return f"{self.prompt} : {text}"


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("reuters", "news topic", corpora.read_reuters),
        Task("newsgroups", "group theme", corpora.read_newsgroups),
        Task("authors", "tweet author", corpora.read_authors),
        Task("movies", "movie sentiment", corpora.read_movies),
        Task("amazon", "product sentiment", corpora.read_amazon),
        Task("intensity", "tweet intensity", corpora.read_intensity, "spearman_rho"),
    )
}


class TextSplit(Dataset):
    """One split of one task, tokenised.

    Items are ``{"input_ids": list[int], "attention_mask": list[int], "labels": list[int]}``, not
    padded; both texts end with the end token.
    """

    def __init__(
        self,
        task: Task,
        examples: list[Example],
        tokenizer: PreTrainedTokenizerBase,
        input_length: int,
    ) -> None:
        self.examples = examples
        inputs = [task.input(example.text) for example in examples]
        encoded = tokenizer(inputs, truncation=True, max_length=input_length)
        self._inputs: list[list[int]] = encoded["input_ids"]  # pyright: ignore[reportAttributeAccessIssue]
        answers = tokenizer([example.answer for example in examples])
        self._labels: list[list[int]] = answers["input_ids"]  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self._inputs[index]
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": self._labels[index],
        }


def load_split(task: str, split: str, directory: str | Path) -> TextSplit:
    """Load a split of a built benchmark; the target of the data sets in both YAML files.

    Args:
        task: A key of ``TASKS``.
        split: ``train`` (also the calibration set) or ``test``.
        directory: Directory of the build.

    Raises:
        FileNotFoundError: The benchmark has not been built.
    """
    if task not in TASKS or split not in SPLITS:
        raise ValueError(f"no split {split!r} of task {task!r}; tasks: {', '.join(TASKS)}")
    examples = read_examples(Path(directory), task)[split]
    tokenizer = AutoTokenizer.from_pretrained(Path(directory) / "tokenizer")
    recipe = json.loads((Path(directory) / "recipe.json").read_text())
    return TextSplit(TASKS[task], examples, tokenizer, recipe["input_length"])


def read_examples(directory: Path, task: str) -> dict[str, list[Example]]:
    """The texts and answers of a task of a build, by split."""
    path = directory / "data" / f"{task}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: build the embedded text benchmark first, by "
            "`python -m featcal_fusionbench.benchmark text --build-only`"
        )
    document = json.loads(path.read_text(encoding="utf-8"))
    return {split: [Example(*pair) for pair in pairs] for split, pairs in document.items()}
