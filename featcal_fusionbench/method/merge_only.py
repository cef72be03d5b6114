"""The FusionBench method that runs a merger and nothing more."""

from __future__ import annotations

from fusion_bench import BaseModelPool
from torch import nn

from ..pools.models import open_models
from ..process.scratch import scratch_directory
from .base import WrappingMethod, setting_names
from .merge_only_report import MergeReport, MergeSettings
from .merged import MergedSource
from .recorder import RunRecorder

__all__ = ["MergeOnlyAlgorithm"]


class MergeOnlyAlgorithm(WrappingMethod[MergeSettings, MergeReport]):
    """Runs an upstream merger as the other methods do, and returns its model as it is.

    Unlike the merger alone it never writes into the pool's models, refuses results that are not
    one model, works with transformers releases that are newer than FusionBench, and leaves a
    report with the merger's cost.
    """

    title = "merge_only"
    settings_type = MergeSettings
    report_type = MergeReport

    _config_mapping = WrappingMethod._config_mapping | {
        name: name for name in setting_names(MergeSettings)
    }

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
