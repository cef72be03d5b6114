"""FusionBench's GLUE task pool, which tells a model that needs it the task."""

from __future__ import annotations

from typing import Any

from fusion_bench.compat.taskpool.flan_t5_glue_text_generation import (
    FlanT5GLUETextGenerationTaskPool as UpstreamPool,
)
from omegaconf import OmegaConf

from .t5 import CorrectedT5

__all__ = ["FlanT5GLUETextGenerationTaskPool"]


class FlanT5GLUETextGenerationTaskPool(UpstreamPool):
    """Evaluates what FusionBench's pool evaluates, and models with one correction per task too.

    Args:
        **config: What FusionBench's pool takes: ``tasks``, ``tokenizer``, ``batch_size`` and so on.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(OmegaConf.create(config))
        self._corrected: CorrectedT5 | None = None

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate a model on every task."""
        self._corrected = model if isinstance(model, CorrectedT5) else None
        evaluated: Any = model  # annotated as a T5 there; anything that generates will do
        try:
            return super().evaluate(evaluated, *args, **kwargs)
        finally:
            self._corrected = None

    def load_task(self, task_name_or_config: Any) -> Any:
        """Load a task, which is evaluated next."""
        task = super().load_task(task_name_or_config)
        if self._corrected is not None:
            self._corrected.set_task(task.config.name)
        return task
