"""Training on this machine: the base on the texts of all tasks, the experts from the base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from ..cache import ExpertRecipe
from ..training import Advance, device, index_batches, minimise, mixed_precision
from .batches import collate
from .corruption import corrupt
from .recipe import BaseRecipe, ModelRecipe

PAD_ID, END_ID = 0, 1

Items = Sequence[dict[str, list[int]]]


def untrained_t5(recipe: ModelRecipe) -> T5ForConditionalGeneration:
    """A T5 of the recipe's shape with new weights (global RNG)."""
    config = T5Config(
        vocab_size=recipe.vocabulary,
        d_model=recipe.width,
        d_kv=recipe.width // recipe.heads,
        d_ff=recipe.feed_forward,
        num_layers=recipe.encoder_layers,
        num_decoder_layers=recipe.decoder_layers,
        num_heads=recipe.heads,
        feed_forward_proj="gated-gelu",
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,  # pyright: ignore[reportCallIssue]
    )
    return T5ForConditionalGeneration(config)


def pretrain(
    model: T5ForConditionalGeneration,
    corpus: Sequence[Sequence[int]],
    supervised: Items,
    sentinels: Sequence[int],
    recipe: BaseRecipe,
    seed: int,
    advance: Advance,
) -> None:
    """Train the base, in place: span corruption and a thin supervised mixture in every batch.

    Args:
        model: Untrained.
        corpus: Windows of training texts, without end pieces.
        supervised: Labelled examples of all tasks.
        sentinels: Ids of the sentinels.
        recipe: Steps, batch sizes, learning rate.
        seed: Of batches and spans.
        advance: Called once a step.
    """
    rng = np.random.default_rng([seed, 1])
    texts = index_batches(len(corpus), recipe.corrupted, recipe.steps, seed)
    mixture = index_batches(len(supervised), recipe.supervised, recipe.steps, seed + 1)
    batches = (
        [corrupt(corpus[i], sentinels, END_ID, rng) for i in plain.tolist()]
        + [supervised[i] for i in labelled.tolist()]
        for plain, labelled in zip(texts, mixture, strict=True)
    )
    # one pass over the texts: nothing to regularise, so no dropout
    rate = recipe.learning_rate
    _train(model.eval(), batches, steps=recipe.steps, learning_rate=rate, advance=advance)


def tune_expert(
    model: T5ForConditionalGeneration,
    items: Items,
    recipe: ExpertRecipe,
    seed: int,
    advance: Advance,
) -> None:
    """Fine-tune a copy of the base, in place, for one task; all its weights are trained.

    Args:
        model: Starts as the base.
        items: The task's train split.
        recipe: Steps, batch size, learning rate.
        seed: Of the order of texts.
        advance: Called once a step.
    """
    chosen = index_batches(len(items), recipe.batch_size, recipe.steps, seed)
    batches = ([items[i] for i in indices.tolist()] for indices in chosen)
    _train(model.train(), batches, advance=advance, **recipe.schedule)


def _train(model: T5ForConditionalGeneration, batches: Iterable[Items], **schedule: Any) -> None:
    def losses() -> Iterator[Tensor]:
        for items in batches:
            batch = {name: ids.to(device()) for name, ids in collate(items, PAD_ID).items()}
            with mixed_precision():
                loss = model(**batch, use_cache=False).loss
            yield loss

    nn.Module.to(model, device())
    minimise(losses(), model.parameters(), largest_norm=1.0, **schedule)
    nn.Module.to(model, torch.device("cpu")).eval()
