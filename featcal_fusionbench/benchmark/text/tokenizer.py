"""The tokenizer: byte-pair encoding (arXiv 1508.07909) of the training texts, lower-cased.

T5's own is a Unigram model; the trainer of those gives another vocabulary each time it is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(16))
"""Stand for the corrupted spans of an input, and mark them in its target."""

MAX_ALPHABET = 200
"""Characters that are pieces; the rarer ones (of other scripts, mostly) are unknown."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer whose ids 0, 1 and 2 are padding, end and unknown, as T5's are.

    Args:
        texts: what it is to encode well.
        vocabulary: number of pieces, special ones included.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, UNKNOWN, *SENTINELS],
        limit_alphabet=MAX_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}",
        pair=f"$A {END} $B {END}",
        special_tokens=[(END, tokenizer.token_to_id(END))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write what ``AutoTokenizer.from_pretrained`` reads, in transformers 4 and 5 alike."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "additional_special_tokens": list(SENTINELS),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
