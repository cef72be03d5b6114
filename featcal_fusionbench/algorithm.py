"""FusionBench methods: FeatCal on top of any merger, and the merger alone."""

from __future__ import annotations

import dataclasses
import difflib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import DictConfig, OmegaConf
from torch import nn

from .calibration import CalibrationSettings, PhaseClock, SettingsError, Weights, calibrate
from .calibration.drift import measure_drift
from .compat import apply_transformers_shim
from .completion import complete_all
from .experts import check_weights, floating_tensors
from .preparation import Prepared, TaskInputs, prepare
from .recorder import RunRecorder
from .report import PlanEstimate, PlanRow, plan_table, scalars
from .upstream import MergedSource, make_merger

__all__ = ["FeatCalAlgorithm", "MergeOnlyAlgorithm"]

# FusionBench's program imports the method before the task pool, which needs this.
apply_transformers_shim()

_SETTINGS = {field.name: field.default for field in dataclasses.fields(CalibrationSettings)}
_WORKING_DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


class MergeOnlyAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Runs an upstream merger as FeatCal does, and returns its model as it is.

    Unlike the merger alone it never writes into the pool's models, refuses results that are not
    one model, and works with transformers releases that are newer than FusionBench.

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra
            (``method@method.merger=wudi/wudi``), or a method already made.
        merged_model: Path or hub id of a merged checkpoint to take instead of running the merger.
    """

    _config_mapping = BaseAlgorithm._config_mapping | {
        "merger": "merger",
        "merged_model": "merged_model",
    }

    def __init__(self, merger: Any = None, merged_model: str | None = None, **kwargs: Any) -> None:
        self.merger = merger
        self.merged_model = merged_model
        super().__init__(**kwargs)

    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> Any:
        """Return the merged model, an ``nn.Module``."""
        pool = _as_pool(modelpool)
        return self._merged_source(pool).load(pool.load_model("_pretrained_"))

    def _merged_source(self, pool: BaseModelPool) -> MergedSource:
        merger = None
        if self.merged_model is None and not pool.has_merged:
            merger = make_merger(self.merger, self._program, self.fabric)
        return MergedSource(pool, merger, self.merged_model)


class FeatCalAlgorithm(MergeOnlyAlgorithm):
    """Merges with an upstream merger and calibrates the result (FeatCal, arXiv 2605.13030).

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra, or a method already made.
        merged_model: Path or hub id of a merged checkpoint to calibrate instead. A pool that holds
            ``_merged_`` has that one calibrated.
        plan_only: Print what would be done and what it would take, and return None.
        output_dir: Where report and figure go; by default the run's log directory.
        **kwargs: The fields of :class:`CalibrationSettings`.

    Raises:
        SettingsError: A setting is unknown or outside its range.
    """

    _config_mapping = MergeOnlyAlgorithm._config_mapping | {
        name: name for name in ("plan_only", "output_dir", *_SETTINGS)
    }

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        plan_only: bool = False,
        output_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.plan_only = plan_only
        self.output_dir = output_dir
        known = {name: kwargs.pop(name, default) for name, default in _SETTINGS.items()}
        for name in kwargs:
            if not name.startswith("_"):
                close = difflib.get_close_matches(name, _SETTINGS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_SETTINGS)}."
                raise SettingsError(f"method.{name} is not a setting of FeatCal: {hint}")
        self.settings = CalibrationSettings(**known)
        vars(self).update(self.settings.as_dict())  # for `config`, as FusionBench's methods have it
        super().__init__(merger=merger, merged_model=merged_model, **kwargs)

    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> Any:
        """Merge and calibrate.

        Args:
            modelpool: A pool with ``_pretrained_``, the experts and their train data. Not changed.

        Returns:
            The calibrated model on the host, or None with ``plan_only``.
        """
        pool = _as_pool(modelpool)
        directory = Path(self.output_dir or self.log_dir or "outputs/featcal")
        clock = PhaseClock(self.fabric.device)
        recorder = RunRecorder(
            directory,
            self.settings,
            _as_dict(self.merger),
            clock,
            enabled=self.fabric.is_global_zero,
        )
        with recorder, tempfile.TemporaryDirectory(prefix="featcal-") as scratch:
            source = self._merged_source(pool)
            with clock.phase("checks"):
                prepared = prepare(
                    pool,
                    self.settings,
                    Path(scratch),
                    self.fabric.device,
                    show_progress=self.fabric.is_global_zero,
                )
            self._record(recorder, prepared)
            if self.plan_only:
                recorder.update(status="planned")
                return None
            with clock.phase("merging"):
                merged = source.load(prepared.base_model)
            model = self._calibrate(merged, source.description, prepared, recorder, clock)
            self._save_processor(pool, prepared.processor, recorder)
            recorder.update(status="complete")
        self.fabric.log_dict(scalars(recorder.report))
        return model

    def _record(self, recorder: RunRecorder, prepared: Prepared) -> None:
        """Put data, models and warnings into the report, and print the plan."""
        recorder.update(
            data=tuple(inputs.data for inputs in prepared.inputs.values()),
            models=(
                prepared.base.identity,
                *(expert.identity for expert in prepared.experts.values()),
            ),
        )
        recorder.update(holding=prepared.fit.holding)
        recorder.warn(*prepared.warnings)
        rows = [
            PlanRow(
                "" if stage.block is None else stage.block.name,
                module.name,
                module.kind,
                module.shape,
                module.has_bias,
                "" if group.rule is None else str(group.rule),
            )
            for stage in prepared.fit.plan.stages
            for group in stage.groups
            for module in group.modules
        ]
        estimate = PlanEstimate(
            flops=prepared.fit.estimate.flops,
            seconds=prepared.fit.estimate.seconds,
            memory_bytes=prepared.fit.estimate.memory_bytes,
            available_bytes=prepared.fit.available_bytes,
            holding=prepared.fit.holding,
        )
        recorder.print(plan_table(rows, prepared.fit.plan.skipped, estimate))

    def _calibrate(
        self,
        merged: nn.Module,
        source: str,
        prepared: Prepared,
        recorder: RunRecorder,
        clock: PhaseClock,
    ) -> nn.Module:
        with clock.phase("checks"):
            tensors = floating_tensors(merged)
            checked = check_weights("merged", "merged", tensors, source, tensors)
        recorder.update(models=(*recorder.report.models, checked.identity))
        experts = {task: expert.weights for task, expert in prepared.experts.items()}
        inputs = self._completed_inputs(prepared, experts, clock)
        heldout = {task: of.heldout for task, of in inputs.items()}
        dtypes = {name: value.dtype for name, value in merged.named_parameters()}
        merged.to(self.fabric.device, _WORKING_DTYPE[self.settings.forward_dtype])
        plan, architecture = prepared.fit.plan, prepared.architecture

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
        with recorder.progress as progress, clock.phase("calibration"):
            result = calibrate(
                merged,
                prepared.base.weights,
                experts,
                {task: of.calibration for task, of in inputs.items()},
                plan,
                self.settings,
                observer=progress,
            )
        recorder.update(result=result, drift_after=drift())
        merged.to("cpu")
        for name, value in merged.named_parameters():  # some models mix precisions
            value.data = value.data.to(dtypes[name])
        return merged

    def _completed_inputs(
        self, prepared: Prepared, experts: Mapping[str, Weights], clock: PhaseClock
    ) -> Mapping[str, TaskInputs]:
        complete = prepared.architecture.complete_inputs(self.settings)
        if complete is None:
            return prepared.inputs
        with clock.phase("experts' answers"):
            return complete_all(
                prepared.inputs,
                prepared.base_model,
                experts,
                complete,
                self.fabric.device,
                _WORKING_DTYPE[self.settings.forward_dtype],
                show_progress=self.fabric.is_global_zero,
            )

    def _save_processor(self, pool: BaseModelPool, processor: Any, recorder: RunRecorder) -> None:
        """Put the processor where FusionBench's program is about to save the model."""
        path = getattr(self._program, "merged_model_save_path", None)
        if path is None or not self.fabric.is_global_zero:
            return
        if "{log_dir}" in path and self.log_dir is not None:
            path = path.format(log_dir=self.log_dir)
        if type(pool).save_model is BaseModelPool.save_model:
            recorder.warn(
                f"pools of type {type(pool).__name__} save a model as one file of pickled tensors, "
                "without processor or tokenizer: use a pool that saves with save_pretrained, such "
                "as featcal_fusionbench.modelpool.Seq2SeqLMPool, for a model that reloads."
            )
        elif hasattr(processor, "save_pretrained"):
            processor.save_pretrained(path)
        recorder.update(outputs={**recorder.report.outputs, "model": path})


def _as_pool(modelpool: BaseModelPool | Mapping[str, nn.Module]) -> BaseModelPool:
    return modelpool if isinstance(modelpool, BaseModelPool) else BaseModelPool(dict(modelpool))


def _as_dict(merger: Any) -> dict[str, Any]:
    if isinstance(merger, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(merger, resolve=True))
    return dict(merger) if isinstance(merger, Mapping) else {"_target_": type(merger).__qualname__}
