"""Processors and tokenizers that work as the published ones do, with vocabularies made here."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from .shapes import ClipShape

__all__ = ["WORDS", "flan_t5_tokenizer", "write_clip_processor", "write_flan_t5_tokenizer"]

WORDS = (
    "the film is good bad cat dog runs sleeps question answered by text or not a red blue house "
    "in under over it was never always seen read told"
).split()
"""Words of made-up sentences."""

_SPECIAL = ("<pad>", "</s>", "<unk>")
_T5_PIECES = 220


def _clip_vocabulary(merges: int) -> tuple[list[str], list[str]]:
    """CLIP's byte-level symbols, each inside and at the end of a word, and merges of two entries.

    A text of more than 77 tokens is an error, so the merges are first of all those that make
    FusionBench's prompts short. What is left of the vocabulary is filled with pairs.
    """
    codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(code) for code in codes] + [chr(256 + i) for i in range(256 - len(codes))]
    ends = [f"{symbol}</w>" for symbol in symbols]
    pairs = dict.fromkeys(itertools.islice(_word_merges(), merges))
    names = dict.fromkeys([*symbols, *ends, *map("".join, pairs)])
    for pair in itertools.product(symbols, ends):
        if len(pairs) == merges:
            break
        if "".join(pair) not in names:
            names["".join(pair)] = pairs[pair] = None
    vocabulary = [*names, "<|startoftext|>", "<|endoftext|>"]
    return vocabulary, [" ".join(pair) for pair in pairs]


def _word_merges() -> Iterable[tuple[str, str]]:
    """Merges that make FusionBench's class names and prompts short, of frequent words first.

    Each word is put together from its beginning. tokenizers has a trainer, but its merges differ
    from process to process.
    """
    # words of letters alone: there a symbol is its character
    counts = Counter(w for text in _prompts() for w in re.findall("[a-z]{2,}", text.lower()))
    # a set that keeps the order
    pairs: dict[tuple[str, str], None] = {}
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        for end in range(1, len(word)):
            last = "</w>" if end + 1 == len(word) else ""
            pairs[word[:end], word[end] + last] = None
    return pairs


def _prompts() -> Iterator[str]:
    from fusion_bench.tasks.clip_classification import (
        CLIPTemplateFactory,
        get_classnames_and_templates,
    )

    for task in CLIPTemplateFactory.get_available_datasets():
        try:
            names, templates = get_classnames_and_templates(task)
        except ImportError:  # FusionBench 0.2.33 misspells the module of mango-leaf-disease
            continue
        yield from names
        yield from (template("") for template in templates)


def write_clip_processor(path: Path, shape: ClipShape) -> None:
    """Write what ``CLIPProcessor.from_pretrained`` reads."""
    vocabulary, merges = _clip_vocabulary(shape.merges)
    ids = {symbol: i for i, symbol in enumerate(vocabulary)}
    (path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    lines = ["#version: 0.2", *merges, ""]
    (path / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    size = shape.image_size
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(images))


@lru_cache
def flan_t5_tokenizer() -> Any:
    """Unigram pieces with T5's special tokens at T5's places, of the words of GLUE's prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.Unigram(_pieces(), unk_id=_SPECIAL.index("<unk>")))
    words.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore
    words.decoder = decoders.Metaspace()  # pyright: ignore
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
    )


def _pieces() -> list[tuple[str, float]]:
    """Pieces with their log-probabilities: special tokens, characters, the most frequent words.

    Not by the trainer of tokenizers, for the reason that ``_word_merges`` gives.
    """
    counts = Counter(f"\u2581{word}" for text in _corpus() for word in text.split())
    characters = sorted({character for word in counts for character in word})
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    room = _T5_PIECES - len(_SPECIAL) - len(characters)
    total = counts.total()
    rare = -math.log(total) - 1  # rarer than any word
    return [
        *((token, 0.0) for token in _SPECIAL),
        *((character, rare) for character in characters),
        *((word, math.log(counts[word] / total)) for word in frequent[:room]),
    ]


def _corpus() -> list[str]:
    from fusion_bench.tasks.flan_t5_text_generation.glue_prompt_templates import (
        glue_prompt_templates,
    )

    prompts = [template["input_text"] for template in glue_prompt_templates.values()]
    answers = "acceptable unacceptable entailment neutral contradiction yes no positive negative"
    return [*prompts, *[answers] * 5, "0.0 1.2 2.4 3.6 4.8 5.0 7 9", *[" ".join(WORDS)] * 3]


def write_flan_t5_tokenizer(path: Path) -> None:
    """Write what ``AutoTokenizer.from_pretrained`` reads, under old releases and new ones."""
    words = flan_t5_tokenizer()
    words.backend_tokenizer.save(str(path / "tokenizer.json"))
    config = {
        # transformers 5 would write a class that 4 does not have
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": words.model_max_length,
        "model_input_names": words.model_input_names,
        "pad_token": words.pad_token,
        "eos_token": words.eos_token,
        "unk_token": words.unk_token,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
