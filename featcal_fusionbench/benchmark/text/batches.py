"""Batches of tokenised items, padded to their longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IGNORED = -100
"""Label that the loss leaves out."""


def pad(sequences: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Ids of several sequences, padded on the right, (sequences, longest)."""
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[fill] * (longest - len(ids))] for ids in sequences])


def collate(items: Sequence[Mapping[str, Sequence[int]]], pad_id: int) -> dict[str, Tensor]:
    """Make the keyword arguments of a T5's forward.

    Args:
        items: With ``input_ids``, ``labels`` and, if they are padded, ``attention_mask``.
        pad_id: Id of the padding piece.

    Returns:
        ``input_ids`` and ``attention_mask`` (batch, longest), ``labels`` (batch, longest answer)
        with -100 on padding.
    """
    ids = [item["input_ids"] for item in items]
    masks = [item.get("attention_mask", [1] * len(item["input_ids"])) for item in items]
    return {
        "input_ids": pad(ids, pad_id),
        "attention_mask": pad(masks, 0),
        "labels": pad([item["labels"] for item in items], IGNORED),
    }
