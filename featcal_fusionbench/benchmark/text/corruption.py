"""Span corruption, T5's pretraining task (arXiv 1910.10683): fill in what was cut out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

NOISE = 0.15
"""Share of the pieces that is cut out."""
SPAN = 3
"""Mean length of a span."""
SHORTEST = 12
"""Windows with fewer pieces are not worth a place in a batch."""


def windows(sequences: Iterable[Sequence[int]], length: int) -> list[list[int]]:
    """Cut sequences into windows of at most ``length`` pieces, without overlap."""
    cut = []
    for ids in sequences:
        cut += [list(ids[start : start + length]) for start in range(0, len(ids), length)]
    return [window for window in cut if len(window) >= SHORTEST]


def corrupt(
    ids: Sequence[int], sentinels: Sequence[int], end: int, rng: np.random.Generator
) -> dict[str, list[int]]:
    """Replace spans by sentinels; the target names each sentinel and what it stands for.

    Args:
        ids: Pieces, at least two.
        sentinels: Ids of the sentinels, as many as there may be spans.
        end: Id of the end piece.
        rng: Draws the spans.

    Returns:
        ``input_ids`` and ``labels``, both with the end piece.
    """
    noise = max(1, round(NOISE * len(ids)))
    spans = min(max(1, round(noise / SPAN)), len(sentinels), len(ids) - noise)
    cut, kept = _composition(noise, spans, rng), _composition(len(ids) - noise, spans, rng)
    inputs: list[int] = []
    labels: list[int] = []
    position = 0
    for sentinel, keep, drop in zip(sentinels, kept, cut, strict=False):
        inputs += [*ids[position : position + keep], sentinel]
        labels += [sentinel, *ids[position + keep : position + keep + drop]]
        position += keep + drop
    return {"input_ids": [*inputs, end], "labels": [*labels, end]}


def _composition(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Positive numbers that add up to ``total``, every such list equally likely."""
    borders = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff([0, *borders, total]).tolist()
