"""A T5 of a few thousand weights with full and LoRA experts, and a GLUE of a few dozen rows.

`build_pico_t5` writes below one directory all that FusionBench's FLAN-T5 path needs offline:

- `base/`: a `T5ForConditionalGeneration` with a tokenizer of its own;
- `experts/<task>/` and `adapters/<task>/`: an expert in full, and as a LoRA adapter of the base;
- `glue/`: a data set with GLUE's eight text tasks as configurations, which
  `datasets.load_dataset("glue", name)` reads when this directory is the current one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache
def tokenizer() -> Any:
    """Unigram pieces with T5's special tokens at T5's places, trained on the texts below."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore
    words.decoder = decoders.Metaspace()  # pyright: ignore
    trainer = trainers.UnigramTrainer(
        vocab_size=220,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    words.train_from_iterator(_corpus(), trainer)
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=256,
    )


def _corpus() -> list[str]:
    from fusion_bench.tasks.flan_t5_text_generation.glue_prompt_templates import (
        glue_prompt_templates,
    )

    prompts = [template["input_text"] for template in glue_prompt_templates.values()]
    answers = "acceptable unacceptable entailment neutral contradiction yes no positive negative"
    return [*prompts, answers, "0.0 1.2 2.4 3.6 4.8 5.0 7 9", *(" ".join(WORDS) for _ in range(3))]


WORDS = (
    "the film is good bad cat dog runs sleeps question answered by text or not a red blue house "
    "in under over it was never always seen read told"
).split()
