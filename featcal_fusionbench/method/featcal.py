"""FeatCal as a FusionBench method: any merger's model, calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusion_bench import BaseModelPool, auto_register_config
from torch import nn

from ..architectures.clip_vision import ClipVisionSettings
from ..architectures.t5 import DecoderInputs, T5Settings
from ..calibration import (
    CalibrationResult,
    CalibrationSettings,
    ModuleResult,
    Plan,
    SilentObserver,
    Weights,
    calibrate,
)
from ..calibration.drift import measure_drift
from ..calibration.settings import FailurePolicy, Granularity, HoldActivations, StatisticsDtype
from ..process.scratch import scratch_directory
from ..report import RichProgress
from ..report.plan import plan_table
from ..settings import ForwardDtype
from .base import WORKING_DTYPE, PlanningMethod
from .expert_answers import complete_all
from .featcal_report import FeatCalReport
from .merged import MergedSource
from .preparation import Prepared, TaskInputs, plan_calibration
from .recorder import RunRecorder

__all__ = ["FeatCalAlgorithm"]


@auto_register_config
class FeatCalAlgorithm(PlanningMethod[CalibrationSettings, FeatCalReport]):
    """Merges with an upstream merger and calibrates the result (FeatCal, arXiv 2605.13030).

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra, or a method already made.
        merged_model: Path or hub id of a merged checkpoint to calibrate instead. A pool that holds
            ``_merged_`` has that one calibrated.
        plan_only: Print what would be done and what it would take, and return None.
        output_dir: Where report and figure go; by default the run's log directory.

    All others are fields of :class:`CalibrationSettings`, :class:`ClipVisionSettings` or
    :class:`T5Settings`.

    Raises:
        SettingsError: A setting is unknown or outside its range.
    """

    title = "FeatCal"
    settings_type = CalibrationSettings
    report_type = FeatCalReport

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        plan_only: bool = False,
        output_dir: str | None = None,
        *,
        granularity: Granularity = CalibrationSettings.granularity,
        ridge_lambda: float = CalibrationSettings.ridge_lambda,
        anchor_rho: float = CalibrationSettings.anchor_rho,
        target_alpha: float = CalibrationSettings.target_alpha,
        epsilon: float = CalibrationSettings.epsilon,
        calibrate_bias: bool = CalibrationSettings.calibrate_bias,
        calibrate_norm: bool = CalibrationSettings.calibrate_norm,
        include: Sequence[str] | str | None = CalibrationSettings.include,
        exclude: Sequence[str] | str | None = CalibrationSettings.exclude,
        n_samples: int = CalibrationSettings.n_samples,
        n_heldout: int = CalibrationSettings.n_heldout,
        batch_size: int = CalibrationSettings.batch_size,
        seed: int = CalibrationSettings.seed,
        input_column: str | Mapping[str, str] | None = CalibrationSettings.input_column,
        statistics_dtype: StatisticsDtype = CalibrationSettings.statistics_dtype,
        forward_dtype: ForwardDtype = CalibrationSettings.forward_dtype,
        hold_activations: HoldActivations = CalibrationSettings.hold_activations,
        on_failure: FailurePolicy = CalibrationSettings.on_failure,
        nonclass_row_weight: float = ClipVisionSettings.nonclass_row_weight,
        decoder_inputs: DecoderInputs = T5Settings.decoder_inputs,
        decoder_tokens: int = T5Settings.decoder_tokens,
        **unknown: Any,
    ) -> None:
        super().__init__(**unknown)

    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[FeatCalReport]
    ) -> nn.Module | None:
        with scratch_directory() as scratch:
            with recorder.clock.phase("checks"):
                prepared = self._prepare(pool, scratch, recorder)
                fit = plan_calibration(prepared, self.settings, self.fabric.device)
            recorder.update(holding=fit.holding)
            recorder.warn(*([fit.warning] if fit.warning else []))
            recorder.print(plan_table(fit))
            if self.plan_only:
                return None
            merged = self._load_merged(source, prepared.models, recorder)
            model = self._calibrate(merged, prepared, fit.plan, recorder)
            self._finish(model, prepared.models, recorder)
        self._save_processor(pool, prepared.processor)
        return model

    def _calibrate(
        self,
        merged: nn.Module,
        prepared: Prepared,
        plan: Plan,
        recorder: RunRecorder[FeatCalReport],
    ) -> nn.Module:
        clock = recorder.clock
        experts = {task: expert.weights for task, expert in prepared.experts.items()}
        inputs = self._completed_inputs(prepared, experts, recorder)
        heldout = {task: of.heldout for task, of in inputs.items()}
        merged.to(self.fabric.device, WORKING_DTYPE[self.settings.forward_dtype])
        architecture = prepared.architecture

        def drift() -> tuple[Any, ...]:
            with clock.phase("drift"):
                return measure_drift(
                    merged,
                    experts,
                    heldout,
                    plan.blocks,
                    plan.trace,
                    architecture.final_features,
                    architecture.drift_rows,
                )

        recorder.update(drift_before=drift())
        with RichProgress(enabled=recorder.enabled) as progress, clock.phase("calibration"):
            result = calibrate(
                merged,
                prepared.base.weights,
                experts,
                {task: of.calibration for task, of in inputs.items()},
                plan,
                self.settings,
                observer=_Recording(recorder, progress),
            )
        recorder.update(result=result, drift_after=drift())
        return merged.to("cpu")

    def _completed_inputs(
        self,
        prepared: Prepared,
        experts: Mapping[str, Weights],
        recorder: RunRecorder[FeatCalReport],
    ) -> Mapping[str, TaskInputs]:
        complete = prepared.architecture.complete_inputs()
        if complete is None:
            return prepared.inputs
        with recorder.clock.phase("experts' answers"):
            return complete_all(
                prepared.inputs,
                prepared.base_model,
                experts,
                complete,
                self.fabric.device,
                WORKING_DTYPE[self.settings.forward_dtype],
                show_progress=self.fabric.is_global_zero,
            )


class _Recording(SilentObserver):
    """Keeps the modules that are done in the report, however the run ends, and shows progress."""

    def __init__(self, recorder: RunRecorder[FeatCalReport], progress: RichProgress) -> None:
        self._recorder = recorder
        self._progress = progress
        self._modules: list[ModuleResult] = []

    def on_start(self, total_flops: float) -> None:
        self._progress.on_start(total_flops)

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        self._progress.on_step(block, module, task, flops)

    def on_module(self, result: ModuleResult) -> None:
        self._modules.append(result)
        self._recorder.update(result=CalibrationResult(tuple(self._modules)))
        self._progress.on_module(result)
