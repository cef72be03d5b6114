"""GLUE as FusionBench puts it to FLAN-T5, prepared row by row as it is read."""

from __future__ import annotations

from typing import Any

import datasets
from fusion_bench.tasks.flan_t5_text_generation.glue_preprocessors import glue_processors
from fusion_bench.tasks.flan_t5_text_generation.glue_prompt_templates import glue_prompt_templates

from ..errors import CalibrationDataError
from .draws import make_tokenizer

__all__ = ["load_glue_dataset"]


def load_glue_dataset(name: str, tokenizer: Any, split: str = "train", path: str = "glue") -> Any:
    """Load one GLUE task with FusionBench's prompts and answers.

    FusionBench's own loader tokenises every split of a task, pads each row to the model's length
    (some 14 GB for all tasks' train splits) and keeps the result in a cache that does not know by
    which tokenizer it was made. A calibration reads a few hundred rows: only those are tokenised,
    to the same ids, and nothing is kept.

    Args:
        name: ``cola``, ``mnli``, ``mrpc``, ``qnli``, ``qqp``, ``rte``, ``sst2`` or ``stsb``.
        tokenizer: Path, hub id or configuration of the models' tokenizer, or the tokenizer.
        split: Split of the data set.
        path: Hub id or directory of a data set with GLUE's configurations and columns.

    Returns:
        A ``datasets.Dataset`` of rows with ``input_ids``, ``attention_mask`` and ``labels``.

    Raises:
        CalibrationDataError: The task is none of GLUE's.
    """
    if name not in glue_processors:
        raise CalibrationDataError(
            f"{name!r} is no task of GLUE that FusionBench has prompts for: use one of "
            f"{', '.join(glue_processors)}."
        )
    preprocessor = glue_processors[name](
        template=glue_prompt_templates[name],
        tokenizer=make_tokenizer(tokenizer),
        tokenizer_kwargs={"padding": "max_length", "truncation": True, "return_tensors": "pt"},
    )
    return datasets.load_dataset(path, name, split=split).with_transform(preprocessor)
