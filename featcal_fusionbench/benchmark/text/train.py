"""Training on this machine: the base on the texts of all tasks, the experts from the base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from featcal_fusionbench.benchmark.text.batches import collate
from featcal_fusionbench.benchmark.text.corruption import corrupt
from featcal_fusionbench.benchmark.text.recipe import BaseRecipe, ExpertRecipe, ModelRecipe
from featcal_fusionbench.benchmark.training import (
    Advance,
    device,
    index_batches,
    mixed_precision,
    optimiser_and_schedule,
)

PAD_ID, END_ID = 0, 1
WARMUP, WEIGHT_DECAY = 0.1, 0.01
"""Of the base."""

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
        model: untrained.
        corpus: windows of training texts, without end pieces.
        supervised: labelled examples of all tasks.
        sentinels: ids of the sentinels.
        recipe: steps, batch sizes, learning rate.
        seed: of batches and spans.
        advance: called once a step.
    """
    rng = np.random.default_rng([seed, 1])
    texts = index_batches(len(corpus), recipe.corrupted, recipe.steps, seed)
    mixture = index_batches(len(supervised), recipe.supervised, recipe.steps, seed + 1)

    def batches() -> Iterator[dict[str, Tensor]]:
        for plain, labelled in zip(texts, mixture, strict=True):
            items = [corrupt(corpus[i], sentinels, END_ID, rng) for i in plain.tolist()]
            items += [supervised[i] for i in labelled.tolist()]
            yield collate(items, PAD_ID)

    # one pass over the texts: nothing to regularise, so no dropout
    _train(
        model.eval(), batches(), recipe.steps, recipe.learning_rate, WARMUP, WEIGHT_DECAY, advance
    )


def tune_expert(
    model: T5ForConditionalGeneration,
    items: Items,
    recipe: ExpertRecipe,
    seed: int,
    advance: Advance,
) -> None:
    """Fine-tune a copy of the base, in place, for one task; all its weights are trained.

    Args:
        model: starts as the base.
        items: the task's train split.
        recipe: steps, batch size, learning rate.
        seed: of the order of texts.
        advance: called once a step.
    """
    chosen = index_batches(len(items), recipe.batch_size, recipe.steps, seed)
    batches = (collate([items[i] for i in indices.tolist()], PAD_ID) for indices in chosen)
    _train(
        model.train(),
        batches,
        recipe.steps,
        recipe.learning_rate,
        recipe.warmup,
        recipe.weight_decay,
        advance,
    )


def _train(
    model: T5ForConditionalGeneration,
    batches: Iterator[dict[str, Tensor]],
    steps: int,
    learning_rate: float,
    warmup: float,
    decay: float,
    advance: Advance,
) -> None:
    nn.Module.to(model, device())
    optimiser, schedule = optimiser_and_schedule(
        list(model.parameters()), steps, learning_rate, warmup, decay
    )
    for batch in batches:
        batch = {name: value.to(device()) for name, value in batch.items()}
        with mixed_precision():
            loss = model(**batch, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        advance()
    nn.Module.to(model, torch.device("cpu")).eval()
