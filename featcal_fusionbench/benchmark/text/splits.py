"""Make the train and test texts of every task from its corpus."""

from __future__ import annotations

import numpy as np

from .corpora import Corpus, Example
from .recipe import Recipe
from .tasks import TASKS, Task

LONGEST = 600
"""Characters kept of a text: more than an input can take (pieces have four on average)."""


def split_examples(task: Task, recipe: Recipe) -> dict[str, list[Example]]:
    """Draw the train and test texts of one task.

    Of equal texts only the first is kept, whatever its answer, so no text is in both splits.
    Where the publisher split the texts, each split is drawn from its own part.

    Args:
        task: The task.
        recipe: Its seed and sizes.

    Returns:
        At most ``train_size`` and ``test_size`` examples.
    """
    rng = np.random.default_rng([recipe.seed, list(TASKS).index(task.name)])
    corpus = _without_repeats(task.read())
    if "all" in corpus:
        order = rng.permutation(len(corpus["all"]))
        # the test texts come from the end, so a larger training set never takes from them
        stop = min(recipe.train_size, len(order) - recipe.test_size)
        chosen = {"train": order[:stop], "test": order[-recipe.test_size :]}
        return {s: [corpus["all"][index] for index in chosen[s]] for s in chosen}
    sizes = {"train": recipe.train_size, "test": recipe.test_size}
    return {
        split: [corpus[split][index] for index in rng.permutation(len(corpus[split]))[:size]]
        for split, size in sizes.items()
    }


def _without_repeats(corpus: Corpus) -> Corpus:
    """Shorten the texts, and keep the first of those that are equal then."""
    seen: set[str] = set()
    kept: Corpus = {}
    for split, examples in corpus.items():
        kept[split] = []
        for example in examples:
            text = example.text[:LONGEST]
            if text.lower() not in seen:
                seen.add(text.lower())
                kept[split].append(Example(text, example.answer))
    return kept
