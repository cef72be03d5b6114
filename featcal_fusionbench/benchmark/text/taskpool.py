"""A task pool for text-to-text models: greedy answers, exact match or rank correlation.

FusionBench's own (``FlanT5GLUETextGenerationTaskPool``) reads GLUE by name, with GLUE's answers
and prompts; it cannot be given other data sets.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from fusion_bench import BaseTaskPool, instantiate
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import DictConfig
from torch import nn

from ...corrected import CorrectedT5
from .batches import collate

log = logging.getLogger(__name__)

METRICS = ("accuracy", "spearman_rho")


class TextGenerationTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates a sequence-to-sequence model by what it generates greedily.

    Every process of a distributed run evaluates everything: the data sets are small.

    Args:
        test_datasets: By task, a data set or its configuration; items hold ``input_ids``,
            ``labels`` and, if they are padded, ``attention_mask``, as lists of ids.
        tokenizer: The tokenizer, or its configuration.
        metrics: By task, ``accuracy`` (exact match of the answer; the default) or ``spearman_rho``
            (rank correlation of answers that are numbers).
        batch_size: Inputs per call of ``generate``.
        max_new_tokens: Longest answer, in pieces.
        fast_dev_run: Evaluate one batch a task.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        "_test_datasets": "test_datasets",
        "_tokenizer": "tokenizer",
        "_metrics": "metrics",
        "batch_size": "batch_size",
        "max_new_tokens": "max_new_tokens",
        "fast_dev_run": "fast_dev_run",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | DictConfig,
        *,
        tokenizer: Any,
        metrics: Mapping[str, str] | DictConfig | None = None,
        batch_size: int = 100,
        max_new_tokens: int = 8,
        fast_dev_run: bool = False,
        **kwargs: Any,
    ) -> None:
        self._test_datasets = test_datasets
        self._tokenizer = tokenizer
        self._metrics = metrics or {}
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.fast_dev_run = fast_dev_run
        for task, metric in self._metrics.items():
            if metric not in METRICS:
                raise ValueError(
                    f"taskpool.metrics.{task}={metric!r} is unknown: use {' or '.join(METRICS)}."
                )
        super().__init__(**kwargs)

    def evaluate(self, model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate a model on every task.

        Returns:
            By task its metric; ``model_info``; and under ``average`` the mean ``score``, in which
            Spearman's rho counts like an accuracy (an undefined one as 0).
        """
        tokenizer = self._tokenizer
        if isinstance(tokenizer, DictConfig):
            tokenizer = instantiate(tokenizer)
        model = self.fabric.to_device(model).eval()
        report: dict[str, Any] = {
            "model_info": {"all_params": sum(p.numel() for p in model.parameters())}
        }
        scores = []
        for key, dataset in self._test_datasets.items():
            task = str(key)
            if isinstance(dataset, DictConfig):
                dataset = instantiate(dataset)
            if isinstance(model, CorrectedT5):
                model.set_task(task)
            found, expected = self._answers(model, dataset, tokenizer)
            metric = self._metrics.get(task, "accuracy")
            measure = exact_match if metric == "accuracy" else rank_correlation
            report[task] = measure(found, expected)
            if problem := report[task].get("problem"):
                log.warning("task %s: %s", task, problem)
            scores.append(report[task][metric] or 0.0)
        report["average"] = {"score": statistics.fmean(scores)}
        log.info("Evaluation result: %s", report)
        return report

    @torch.inference_mode()
    def _answers(self, model: Any, dataset: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
        """What the model answers, and what it should."""
        device = next(model.parameters()).device
        size = min(len(dataset), self.batch_size) if self.fast_dev_run else len(dataset)
        found: list[str] = []
        expected: list[str] = []
        for start in range(0, size, self.batch_size):
            stop = min(start + self.batch_size, size)
            items = [dataset[index] for index in range(start, stop)]
            batch = collate(items, tokenizer.pad_token_id)
            generated = model.generate(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                num_beams=1,
            )
            labels = batch["labels"].clamp(min=0)  # 0 is padding, or another special piece
            for ids, answers in ((generated, found), (labels, expected)):
                texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
                answers += [text.strip() for text in texts]
        return found, expected


def exact_match(found: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """Share of answers that are what they should be, letter by letter."""
    return {"accuracy": statistics.fmean(f == e for f, e in zip(found, expected, strict=True))}


def rank_correlation(found: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """Spearman's rho of answers that are numbers; ties share their mean rank.

    Answers that are no number are counted as ``unreadable`` and take the mean of the others, so
    that they tell nothing either way.

    Returns:
        ``spearman_rho``, None where it is undefined, since one side never varies; ``problem`` then
        says so.
    """
    numbers = [_number(text) for text in found]
    readable = [number for number in numbers if number is not None]
    mean = statistics.fmean(readable) if readable else 0.0
    report: dict[str, Any] = {"unreadable": len(numbers) - len(readable)}
    given = pd.Series([mean if number is None else number for number in numbers]).rank()
    wanted = pd.Series([float(text) for text in expected]).rank()
    if min(given.nunique(), wanted.nunique()) < 2:
        problem = "Spearman's rho is undefined (NaN): all answers are alike"
        return {"spearman_rho": None, **report, "problem": problem}
    return {"spearman_rho": float(given.corr(wanted)), **report}


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
