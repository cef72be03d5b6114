"""The tokenizer: WordPiece with those of MiniLM's pieces that the training texts use most.

Its pieces are MiniLM's so that their embeddings can be taken over, see ``minilm.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(16))
"""Stand for the corrupted spans of an input, and mark them in its target."""
SPECIAL = (PAD, END, UNKNOWN, *SENTINELS)

_CONTINUES = "##"
"""Marks a piece that does not begin a word."""


def reduce_tokenizer(source: str, texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Leave of a WordPiece tokenizer the pieces that some texts use, the most frequent first.

    Ids 0, 1 and 2 are padding, end and unknown, as T5's are; the sentinels follow.

    Args:
        source: ``tokenizer.json`` of a BERT.
        texts: What the tokenizer is to encode well.
        vocabulary: Number of pieces at most, special ones included. ASCII's characters are kept
            whether they are in use or not, so that every word and number can be spelt.
    """
    full = Tokenizer.from_str(source)
    full.no_padding()
    full.no_truncation()
    counts: Counter[str] = Counter()
    for encoding in full.encode_batch(list(texts), add_special_tokens=False):
        counts.update(encoding.tokens)
    characters = [piece for piece in full.get_vocab() if _is_character(piece)]
    # BERT writes its special pieces in brackets; a bracket alone is a character
    ranked = [p for p, _ in counts.most_common() if _is_character(p) or not p.startswith("[")]
    kept = list(dict.fromkeys([*sorted(characters), *ranked]))[: vocabulary - len(SPECIAL)]
    pieces = [*SPECIAL, *sorted(kept, key=lambda piece: (-counts[piece], piece))]
    model = models.WordPiece(
        {piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}",
        pair=f"$A {END} $B {END}",
        special_tokens=[(END, pieces.index(END))],
    )
    return tokenizer


def _is_character(piece: str) -> bool:
    character = piece.removeprefix(_CONTINUES)
    return len(character) == 1 and character.isascii()


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
