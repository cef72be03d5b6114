"""The text side: a small CLIP tokenizer and text tower, tuned on this machine to frozen images.

Locked-image tuning (LiT, arXiv 2111.07991): the vision tower is not touched; the text tower and
both projections learn to match a few labelled training images a class. So the base model is no
zero-shot model in CLIP's sense: its text tower has seen the class names and a few images of each.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
)

from .recipe import Recipe
from .tasks import TASKS, Task
from .tower import IMAGE_MEAN, IMAGE_STD

CONTEXT_LENGTH = 32
_START, _END, _WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"


def prompts(task: Task, template: int) -> list[str]:
    """One prompt a class, in label order."""
    return [task.templates[template](classname) for classname in task.classnames]


def learn_merges(texts: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges (arXiv 1508.07909) that make every word of the texts one token.

    The most frequent pair is merged first; of equally frequent ones the first in the alphabet.
    """
    counts = Counter(word for text in texts for word in text.split())
    words = {word: [*word[:-1], word[-1] + _WORD_END] for word in counts}
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in zip(pieces, pieces[1:], strict=False):
                pairs[pair] += counts[word]
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for pieces in words.values():
            index = 0
            while index < len(pieces) - 1:
                if (pieces[index], pieces[index + 1]) == best:
                    pieces[index : index + 2] = ["".join(best)]
                index += 1


def write_processor(directory: Path, image_size: int) -> None:
    """Write the tokenizer's and image processor's files for ``CLIPProcessor``."""
    texts = [p for task in TASKS.values() for t in (0, 1) for p in prompts(task, t)]
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    merges = learn_merges(texts)
    pieces = characters + [character + _WORD_END for character in characters]
    pieces += ["".join(pair) for pair in merges] + [_START, _END]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n")
    tokenizer = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": _START,
        "eos_token": _END,
        "unk_token": _END,
        "pad_token": _END,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    size = {"height": image_size, "width": image_size}
    CLIPImageProcessor(
        size={"shortest_edge": image_size},
        crop_size=size,
        image_mean=list(IMAGE_MEAN),
        image_std=list(IMAGE_STD),
    ).save_pretrained(directory)


def tokenize(tokenizer: CLIPTokenizer, texts: list[str]) -> dict[str, Tensor]:
    """Token ids and attention mask, each (texts, longest)."""
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def untrained_base(
    tower_config: CLIPVisionConfig, tokenizer: CLIPTokenizer, recipe: Recipe
) -> CLIPModel:
    """A CLIP model with the tower's shape and a new, untrained text side (global RNG)."""
    vocabulary = tokenizer.get_vocab()
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=recipe.text.width,
        intermediate_size=4 * recipe.text.width,
        num_hidden_layers=recipe.text.layers,
        num_attention_heads=recipe.text.width // 64,
        max_position_embeddings=CONTEXT_LENGTH,
        projection_dim=recipe.projection_dim,
        bos_token_id=vocabulary[_START],
        eos_token_id=vocabulary[_END],
        pad_token_id=vocabulary[_END],
    )
    vision = {**tower_config.to_dict(), "projection_dim": recipe.projection_dim}
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision, projection_dim=recipe.projection_dim
    )
    return CLIPModel(config)
