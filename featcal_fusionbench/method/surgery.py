"""Representation Surgery and ProbSurgery as FusionBench methods, after any upstream merger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from fusion_bench import BaseModelPool, auto_register_config
from rich.text import Text
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..architectures.t5 import DecoderInputs, T5Settings
from ..baselines import (
    ProbSurgerySettings,
    Representations,
    RepresentationSurgerySettings,
    SurgeryResult,
    SurgerySettings,
    TaskSurgery,
    train_module,
)
from ..baselines.modules import Correction, make_module
from ..baselines.settings import TrainOn
from ..calibration.inputs import Inputs, place_inputs
from ..corrected import CorrectedModel, wrap
from ..data.draws import TRAINING_SPLITS
from ..pools.view import view_for_mergers
from ..process.scratch import scratch_directory
from ..settings import ForwardDtype
from .base import WORKING_DTYPE, PlanningMethod
from .expert_answers import each_expert
from .merged import MergedSource
from .preparation import Prepared
from .recorder import ReportT, RunRecorder
from .surgery_report import ProbSurgeryReport, RepresentationSurgeryReport

__all__ = ["ProbSurgeryAlgorithm", "RepresentationSurgeryAlgorithm", "TEST_INPUTS_LABEL"]

TEST_INPUTS_LABEL = "trained on test inputs"

SurgerySettingsT = TypeVar("SurgerySettingsT", bound=SurgerySettings)


class _SurgeryAlgorithm(PlanningMethod[SurgerySettingsT, ReportT]):
    """What both methods do: collect representations, train one module per task, wrap the model."""

    returns_plain_model = False

    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[ReportT]
    ) -> nn.Module | None:
        settings = self.settings
        on_test = settings.train_on == "test"
        with scratch_directory() as scratch:
            with recorder.clock.phase("checks"):
                splits = ("test",) if on_test else TRAINING_SPLITS
                prepared = self._prepare(pool, scratch, recorder, splits)
                wrapper = wrap(prepared.base_model, view_for_mergers(prepared.models))
                width = _width(wrapper, prepared.example)
            if on_test:
                recorder.update(labels=(TEST_INPUTS_LABEL,))
                recorder.warn(
                    f"{self.title} is {TEST_INPUTS_LABEL}, without their labels (train_on=test, as "
                    "in its paper): not to be compared with methods that never saw them."
                )
            recorder.print(Text(self._plan(prepared, width)))
            if self.plan_only:
                return None
            merged = self._load_merged(source, prepared.models, recorder)
            model = self._train(wrapper.around(merged), prepared, recorder)
            self._finish(model.model, prepared.models, recorder)
        self._save_processor(pool, prepared.processor)
        return model

    def _plan(self, prepared: Prepared, width: int) -> str:
        settings = self.settings
        inputs = sum(data.used + len(data.heldout_indices) for data in prepared.data)
        parameters = sum(p.numel() for p in make_module(settings, width).parameters())
        return (
            f"{self.title} plan: {inputs:,} inputs of {len(prepared.data)} tasks once through the "
            f"merged model and once through the task's expert; then per task a module of "
            f"{parameters:,} parameters on representations of width {width}, "
            f"{settings.steps_per_task:,} steps of {settings.train_batch_size} inputs."
        )

    def _train(
        self, model: CorrectedModel, prepared: Prepared, recorder: RunRecorder[ReportT]
    ) -> CorrectedModel:
        settings = self.settings
        clock, device = recorder.clock, self.fabric.device
        dtypes = {name: value.dtype for name, value in model.named_parameters()}
        model.to(device, WORKING_DTYPE[settings.forward_dtype])
        with clock.phase("features"):
            collected = self._collect(model, prepared, show_progress=recorder.enabled)
        corrections: dict[str, Correction] = {}
        results: list[TaskSurgery] = []
        bar = tqdm(collected.items(), desc=self.title, leave=False, disable=not recorder.enabled)
        for task, (training, heldout) in bar:
            with clock.phase("training"):
                module, result = train_module(
                    task,
                    _placed(training, device),
                    None if heldout is None else _placed(heldout, device),
                    settings,
                )
            corrections[task] = module.to("cpu")
            results.append(result)
            recorder.update(result=SurgeryResult(tuple(results)))
        model.to("cpu")
        for name, value in model.named_parameters():  # some models mix precisions
            value.data = value.data.to(dtypes[name])
        model.set_corrections(corrections, settings)
        return model

    def _collect(
        self, merged: CorrectedModel, prepared: Prepared, *, show_progress: bool
    ) -> dict[str, tuple[Representations, Representations | None]]:
        """Training and held-out representations by task, each input once through both models."""
        settings = self.settings
        complete = prepared.architecture.complete_inputs()
        device, dtype = self.fabric.device, WORKING_DTYPE[settings.forward_dtype]
        experts = {task: checked.weights for task, checked in prepared.experts.items()}
        total = sum(len(of.calibration) + len(of.heldout) for of in prepared.inputs.values())
        low = settings.forward_dtype == "bfloat16"
        collected = {}
        with (
            tqdm(
                total=total, desc="Representations", leave=False, disable=not show_progress
            ) as bar,
            torch.no_grad(),
        ):
            for task, model in each_expert(prepared.base_model, experts, device, dtype):
                expert = merged.around(model)
                parts: list[list[_Rows]] = [[], []]
                inputs = prepared.inputs[task]
                for part, batches in zip(parts, (inputs.calibration, inputs.heldout), strict=True):
                    for batch in batches:
                        batch = batch if complete is None else complete(model, batch)
                        # the answers are those that FeatCal reads, so not in low precision
                        with torch.autocast(device.type, torch.bfloat16, enabled=low):
                            part.append(_rows(merged, expert, place_inputs(batch, model)))
                        bar.update()
                training, heldout = parts
                collected[task] = (_joined(training), _joined(heldout) if heldout else None)
        return collected


_Rows = tuple[Tensor, Tensor, Tensor]
"""Representations of one batch, on the host: the merged model's, the expert's, and the mask."""


def _rows(merged: CorrectedModel, expert: CorrectedModel, batch: Inputs) -> _Rows:
    of_expert, mask = expert.representation(batch)
    of_merged, _ = merged.representation(batch)
    return of_merged.float().cpu(), of_expert.float().cpu(), mask.cpu()


def _width(wrapper: CorrectedModel, example: Inputs) -> int:
    """Width of the representation, by a forward of the base, which also shows that it works."""
    with torch.no_grad():
        features, _ = wrapper.representation(place_inputs(example, wrapper.model))
    return features.shape[-1]


def _joined(parts: list[_Rows]) -> Representations:
    """Batches under one another, with their positions filled up to the longest."""
    positions = max(mask.shape[1] for _, _, mask in parts)

    def filled(value: Tensor) -> Tensor:
        missing = positions - value.shape[1]
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1)

    merged, expert, mask = (torch.cat([filled(part[i]) for part in parts]) for i in range(3))
    return Representations(merged, expert, mask)


def _placed(representations: Representations, device: torch.device) -> Representations:
    return Representations(
        representations.merged.to(device),
        representations.expert.to(device),
        representations.mask.to(device),
    )


@auto_register_config
class RepresentationSurgeryAlgorithm(
    _SurgeryAlgorithm[RepresentationSurgerySettings, RepresentationSurgeryReport]
):
    """Merges with an upstream merger and corrects the final representation (arXiv 2402.02705).

    The result is the merged model with one small module per task; the task must be known when it
    is used. See ``featcal_fusionbench.corrected`` for what it is and how it is saved and loaded.

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra, or a method already made.
        merged_model: Path or hub id of a merged checkpoint to take instead.
        plan_only: Check everything, print what would be done, and return None.
        output_dir: Where the report goes; by default the run's log directory.

    All others are fields of :class:`RepresentationSurgerySettings` or of :class:`T5Settings`.
    """

    title = "Representation Surgery"
    settings_type = RepresentationSurgerySettings
    report_type = RepresentationSurgeryReport

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        plan_only: bool = False,
        output_dir: str | None = None,
        *,
        hidden_width: int = RepresentationSurgerySettings.hidden_width,
        learning_rate: float = RepresentationSurgerySettings.learning_rate,
        steps: int = RepresentationSurgerySettings.steps,
        train_batch_size: int = RepresentationSurgerySettings.train_batch_size,
        train_on: TrainOn = RepresentationSurgerySettings.train_on,
        n_samples: int = RepresentationSurgerySettings.n_samples,
        n_heldout: int = RepresentationSurgerySettings.n_heldout,
        batch_size: int = RepresentationSurgerySettings.batch_size,
        seed: int = RepresentationSurgerySettings.seed,
        input_column: str | Mapping[str, str] | None = RepresentationSurgerySettings.input_column,
        forward_dtype: ForwardDtype = RepresentationSurgerySettings.forward_dtype,
        decoder_inputs: DecoderInputs = T5Settings.decoder_inputs,
        decoder_tokens: int = T5Settings.decoder_tokens,
        **unknown: Any,
    ) -> None:
        super().__init__(**unknown)


@auto_register_config
class ProbSurgeryAlgorithm(_SurgeryAlgorithm[ProbSurgerySettings, ProbSurgeryReport]):
    """As :class:`RepresentationSurgeryAlgorithm`, with a correction that is a distribution.

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra, or a method already made.
        merged_model: Path or hub id of a merged checkpoint to take instead.
        plan_only: Check everything, print what would be done, and return None.
        output_dir: Where the report goes; by default the run's log directory.

    All others are fields of :class:`ProbSurgerySettings` or of :class:`T5Settings`.
    """

    title = "ProbSurgery"
    settings_type = ProbSurgerySettings
    report_type = ProbSurgeryReport

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        plan_only: bool = False,
        output_dir: str | None = None,
        *,
        hidden_width: int = ProbSurgerySettings.hidden_width,
        learning_rate: float = ProbSurgerySettings.learning_rate,
        rounds: int = ProbSurgerySettings.rounds,
        batches_per_round: int = ProbSurgerySettings.batches_per_round,
        kl_weight: float = ProbSurgerySettings.kl_weight,
        train_batch_size: int = ProbSurgerySettings.train_batch_size,
        train_on: TrainOn = ProbSurgerySettings.train_on,
        n_samples: int = ProbSurgerySettings.n_samples,
        n_heldout: int = ProbSurgerySettings.n_heldout,
        batch_size: int = ProbSurgerySettings.batch_size,
        seed: int = ProbSurgerySettings.seed,
        input_column: str | Mapping[str, str] | None = ProbSurgerySettings.input_column,
        forward_dtype: ForwardDtype = ProbSurgerySettings.forward_dtype,
        decoder_inputs: DecoderInputs = T5Settings.decoder_inputs,
        decoder_tokens: int = T5Settings.decoder_tokens,
        **unknown: Any,
    ) -> None:
        super().__init__(**unknown)
