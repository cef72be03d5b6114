"""The FusionBench method that runs a merger and nothing more."""

from __future__ import annotations

from typing import Any

from fusion_bench import BaseModelPool, auto_register_config
from torch import nn

from ..pools.models import open_models
from ..process.scratch import scratch_directory
from ..settings import MethodSettings
from .base import WrappingMethod
from .merge_only_report import MergeReport
from .merged import MergedSource
from .recorder import RunRecorder

__all__ = ["MergeOnlyAlgorithm"]


@auto_register_config
class MergeOnlyAlgorithm(WrappingMethod[MethodSettings, MergeReport]):
    """Runs an upstream merger as the other methods do, and returns its model as it is.

    Unlike the merger alone it never writes into the pool's models, refuses results that are not
    one model, works with transformers releases that are newer than FusionBench, and leaves a
    report with the merger's cost.

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra, or a method already made.
        merged_model: Path or hub id of a merged checkpoint to take instead.
        output_dir: Where the report goes; by default the run's log directory.
        seed: Of a merger that draws, where the program has no seed.

    Raises:
        SettingsError: A setting is unknown or outside its range.
    """

    title = "merge_only"
    settings_type = MethodSettings
    report_type = MergeReport

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        output_dir: str | None = None,
        seed: int = MethodSettings.seed,
        **unknown: Any,
    ) -> None:
        super().__init__(**unknown)

    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[MergeReport]
    ) -> nn.Module:
        with scratch_directory() as scratch:
            with recorder.clock.phase("checks"):
                models = open_models(pool, scratch, show_progress=recorder.enabled)
                self._check_what_follows(models.base_model)
            recorder.update(models=models.identities)
            recorder.warn(*models.warnings)
            merged = self._load_merged(source, models, recorder)
            self._finish(merged, models, recorder)
        return merged
