"""What all methods of this package share as FusionBench methods.

Each wraps an upstream merger, any method of FusionBench or of this package, and leaves a report.
"""

from __future__ import annotations

import difflib
import logging
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ..architectures import KNOWN
from ..calibration import PhaseClock
from ..compat import apply_transformers_shim
from ..data.draws import TRAINING_SPLITS, Split
from ..errors import MergerError, OutputError, SettingsError
from ..pools.adapter_entries import ADAPTER_CONFIG
from ..pools.finishing import finish, keep_when_saving_fails, save_whole, silence_extras
from ..pools.models import PoolModels, check_weights
from ..pools.opening import floating_tensors
from ..process.claims import claim_log_dir, claim_path
from ..process.interrupts import terminable
from ..process.outputs import in_log_dir, require_room, require_savable
from ..process.streams import forgiving_streams
from ..process.surroundings import own_surroundings
from ..report import RunReport, report_name
from ..settings import MethodSettings, SampleSettings, Settings
from .merged import MergedSource, make_merger
from .preparation import Prepared, prepare
from .recorder import ReportT, RunRecorder
from .taskpool_check import check_task_pool

__all__ = [
    "WORKING_DTYPE",
    "PlanningMethod",
    "WrappingMethod",
]

log = logging.getLogger(__name__)

# FusionBench's program imports the method before the task pool, which needs this.
apply_transformers_shim()

WORKING_DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""What weights are held in during forwards, by the setting ``forward_dtype``."""

SettingsT = TypeVar("SettingsT", bound=MethodSettings)
SampleSettingsT = TypeVar("SampleSettingsT", bound=SampleSettings)
AnySettings = TypeVar("AnySettings", bound=Settings)


class WrappingMethod(LightningFabricMixin, BaseAlgorithm, Generic[SettingsT, ReportT]):
    """A FusionBench method that takes an upstream merger's model and goes on with it.

    A subclass names its parameters, those below and the fields of its settings, in a constructor
    under FusionBench's ``auto_register_config``, which makes them attributes.

    Attributes:
        merger: Configuration of any FusionBench method, nested by Hydra
            (``method@method.merger=wudi/wudi``), or a method already made. A method of this package
            writes its report into ``merger/`` below this one's directory.
        merged_model: Path or hub id of a merged checkpoint to take instead. A pool that holds
            ``_merged_`` has that one taken.
        output_dir: Where the report goes; by default the run's log directory.
        settings: The method's settings.
        architectures: The known architectures, with the settings that the method has for them.

    Args:
        **unknown: What the subclass did not name.

    Raises:
        SettingsError: A setting is unknown or outside its range.
    """

    merger: Any
    merged_model: str | None
    output_dir: str | None

    title: ClassVar[str]
    """What the method is called in messages."""
    settings_type: ClassVar[type[MethodSettings]]
    report_type: ClassVar[type[RunReport]]
    returns_plain_model: ClassVar[bool] = True
    """Whether the result has the base's architecture, so that other methods can take it."""

    def __init__(self, **unknown: Any) -> None:
        known = [name for name in self._config_mapping.values() if not name.startswith("_")]
        for name in unknown:
            if not name.startswith("_"):
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
                raise SettingsError(f"method.{name} is not a setting of {self.title}: {hint}")
        self._outer: WrappingMethod[Any, Any] | None = None
        self.settings = self._settings_of(cast("type[SettingsT]", self.settings_type))
        self.architectures = tuple(kind(self._settings_of(kind.settings_type)) for kind in KNOWN)
        super().__init__(**unknown)

    def _settings_of(self, settings_type: type[AnySettings]) -> AnySettings:
        """Settings made of this method's attributes; what it does not name has its default."""
        names = {field.name for field in fields(settings_type)} & set(self._config_mapping)
        return settings_type(**{name: getattr(self, name) for name in names})

    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> Any:
        """Take the merged model and go on with it.

        What the caller has set in torch (autocast, ``no_grad``, ``inference_mode``, default dtype
        and device) does not change the result, and its random generators are as they were
        afterwards. SIGTERM and SIGHUP end the run as Ctrl-C does.

        Args:
            modelpool: A pool with ``_pretrained_``, the experts and what data is needed. Not
                changed.

        Returns:
            The model on the host, or None where the run only planned.

        Raises:
            CalibrationError: Something cannot be used, or the result not be written; the message
                names it and the remedy.
        """
        with terminable(), forgiving_streams(), own_surroundings(self._merger_seed):
            return self._run(modelpool)

    def _run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> nn.Module | None:
        moved = self._claim_log_dir()
        self._claim_output_dir()
        pool = modelpool if isinstance(modelpool, BaseModelPool) else BaseModelPool(dict(modelpool))
        clock = PhaseClock(self.fabric.device)
        runs_merger = self.merged_model is None and not pool.has_merged
        recorder = RunRecorder(
            self._directory,
            cast("type[ReportT]", self.report_type),
            self.settings,
            merger=_as_dict(self.merger) if runs_merger else {},
            merged_model=self.merged_model,
            clock=clock,
            enabled=self.fabric.is_global_zero,
        )
        with recorder, ExitStack() as chained:
            recorder.warn(*moved)
            self._check_outputs(pool)
            source = self._merged_source(pool)
            if isinstance(source.merger, WrappingMethod):
                chained.callback(source.merger._leave)
            recorder.warn(*self._seeds_without_effect(source.merger))
            model = self._work(pool, source, recorder)
            if model is not None:
                self._name_saved_model(pool, recorder)
                self._keep_when_saving_fails(model)
            recorder.update(status="planned" if model is None else "complete")
        if model is not None:
            recorder.log_scalars(self.fabric, self._prefix)
        return model

    @abstractmethod
    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[ReportT]
    ) -> nn.Module | None:
        """What the method does; None where it only planned."""

    @property
    def _merger_seed(self) -> int:
        """Seed of a merger that draws: the program's ``seed``, or this method's where it has none.

        So one ``seed=`` gives one merged model, whichever method of this package takes it.
        """
        seed = getattr(self._program, "seed", None)
        return self.settings.seed if seed is None else int(seed)

    def _seeds_without_effect(self, merger: Any) -> list[str]:
        program, own = getattr(self._program, "seed", None), self.settings.seed
        if merger is None or isinstance(merger, WrappingMethod):
            if own and self.settings_type is MethodSettings:
                return [f"{self._setting('seed')}={own} has no effect: nothing is drawn by it."]
            return []
        if program is not None and own not in (0, program):
            return [
                f"The merger draws by seed={program}, not by {self._setting('seed')}={own}: set "
                "both alike, or leave seed out."
            ]
        return []

    def _setting(self, name: str) -> str:
        """A setting of this method as the command line calls it, also of a nested method."""
        return f"method.{self._prefix.replace('/', '.')}{name}"

    @property
    def _directory(self) -> Path:
        if self.output_dir is not None:
            return Path(self.output_dir)
        if self._outer is not None:
            return self._outer._directory / "merger"
        return Path(self.log_dir or "outputs/featcal")

    @property
    def _prefix(self) -> str:
        """What the names of logged numbers start with: one part per method around this one."""
        return "" if self._outer is None else f"{self._outer._prefix}merger/"

    def _claim_log_dir(self) -> tuple[str, ...]:
        """Let no other run write to the log directory; warnings."""
        if self._outer is not None or self.log_dir is None:
            return ()
        moved = claim_log_dir(self)
        return () if moved is None else (moved,)

    def _claim_output_dir(self) -> None:
        """Let no other job of a multirun write its report where this method does."""
        has_own = self._outer is not None or self.log_dir is not None
        if self.fabric.is_global_zero and (self.output_dir is not None or not has_own):
            claim_path(self._directory, self._setting("output_dir"))

    def _check_outputs(self, pool: BaseModelPool) -> None:
        """Find what the program could not write after this method; nothing is loaded yet."""
        if self._outer is not None or not self.fabric.is_global_zero:
            return
        settings = {"merged_model_save_path": _saves_directories(pool)}
        if getattr(self._program, "taskpool", None) is not None:
            settings["report_save_path"] = False
        for setting, is_directory in settings.items():
            given = getattr(self._program, setting, None)
            if given is None:
                continue
            path = in_log_dir(given, self.log_dir, setting)
            if setting == "report_save_path" and not os.path.dirname(path):
                raise OutputError(
                    f"{setting}={path} has no directory, which FusionBench needs: give ./{path}."
                )
            require_savable(path, setting, is_directory=is_directory)
            if is_directory and Path(path, ADAPTER_CONFIG).exists():
                raise OutputError(
                    f"{setting}={path} holds an adapter, which readers would take in place of the "
                    "model: give another directory."
                )
            if "{log_dir}" not in given:
                claim_path(path, setting)

    def _merged_source(self, pool: BaseModelPool) -> MergedSource:
        merger = None
        if self.merged_model is None and not pool.has_merged:
            merger = make_merger(self.merger, self._program, self.fabric)
            if isinstance(merger, WrappingMethod):
                self._adopt(merger)
        return MergedSource(pool, merger, self.merged_model)

    def _adopt(self, merger: WrappingMethod[Any, Any]) -> None:
        """Make a method of this package the upstream of this one, with a directory of its own."""
        if not merger.returns_plain_model:
            raise MergerError(
                f"{self.title} cannot take the result of {merger.title}: it is not one model of "
                f"the base's architecture but a merged model with one module per task. Chain them "
                f"the other way round, or use {merger.title}'s own upstream merger."
            )
        if merger.only_plans:
            raise MergerError(
                "method.merger.plan_only=true returns no model: set method.plan_only=true instead."
            )
        merger._outer = self
        if merger._directory.absolute() == self._directory.absolute():
            raise OutputError(
                f"method.merger.output_dir={merger.output_dir} is the directory of the outer "
                "method's own report: leave it out, and `merger/` below that one is taken."
            )
        merger._claim_output_dir()
        merger.check_chain()

    def _leave(self) -> None:
        """Stop being the upstream of another method: a method object may run alone again."""
        self._outer = None

    @property
    def only_plans(self) -> bool:
        """Whether a run only plans and returns no model."""
        return False

    def check_chain(self) -> None:
        """Find upstream methods, level by level, that cannot be chained; nothing is loaded.

        Raises:
            MergerError: One of them cannot be made, or cannot be the upstream of the next.
        """
        if self.merged_model is None:
            merger = make_merger(self.merger, self._program, self.fabric)
            if isinstance(merger, WrappingMethod):
                self._adopt(merger)

    def _check_what_follows(self, base: nn.Module) -> None:
        """Find, before the long work, why evaluating or saving its result would fail or be wrong.

        Args:
            base: The base, which the result will be like.
        """
        check_task_pool(getattr(self._program, "taskpool", None), base)
        path = self._save_path()
        if path is not None:
            size = sum(tensor.nbytes for tensor in (*base.parameters(), *base.buffers()))
            require_room(path, size, "merged_model_save_path")

    def _load_merged(
        self,
        source: MergedSource,
        models: PoolModels,
        recorder: RunRecorder[ReportT],
    ) -> nn.Module:
        """Get the merged model, checked and named in the report."""
        with recorder.clock.phase("merging"):
            merged, warnings = source.load(models, self._merger_seed)
        recorder.warn(*warnings)
        if isinstance(source.merger, WrappingMethod):
            nested = source.merger
            recorder.add_output("merger", nested._directory / report_name(nested.method_name))
        with recorder.clock.phase("checks"):
            tensors = floating_tensors(merged)
            checked = check_weights("merged", "merged", tensors, source.description, tensors)
        silence_extras(merged)
        recorder.update(models=(*recorder.report.models, checked.identity))
        return merged

    def _finish(self, model: nn.Module, models: PoolModels, recorder: RunRecorder[ReportT]) -> None:
        """Give the result the base's precision and configuration."""
        dtypes = {name: value.dtype for name, value in floating_tensors(models.base_model).items()}
        recorder.warn(*finish(model, dtypes, models.extras))

    @property
    def method_name(self) -> Any:
        """The method's name in reports."""
        return self.report_type.method

    def _save_path(self) -> str | None:
        """Where FusionBench's program will save this method's model; None for nested methods."""
        path = getattr(self._program, "merged_model_save_path", None)
        if path is None or self._outer is not None:
            return None
        return in_log_dir(path, self.log_dir, "merged_model_save_path")

    def _name_saved_model(self, pool: BaseModelPool, recorder: RunRecorder[ReportT]) -> None:
        """Put the model that FusionBench's program is about to save into the report."""
        path = self._save_path()
        if path is None or not self.fabric.is_global_zero:
            return
        if not _saves_directories(pool):
            recorder.warn(
                f"pools of type {type(pool).__name__} save a model as one file of pickled tensors, "
                "without processor or tokenizer: use a pool that saves with save_pretrained, such "
                "as featcal_fusionbench.pools.seq2seq_modelpool.Seq2SeqLMPool, if it shall reload."
            )
        recorder.add_output("model", path)

    def _keep_when_saving_fails(self, model: Any) -> None:
        """Let the result be kept with the report where it cannot be saved as asked."""
        if self._outer is not None or not hasattr(model, "save_pretrained"):
            return
        save = partial(save_whole, model) if self.returns_plain_model else model.save_pretrained
        keep_when_saving_fails(model, save, self._directory / "model")

    def _save_processor(self, pool: BaseModelPool, processor: Any) -> None:
        """Put the processor where FusionBench's program is about to save the model."""
        path = self._save_path()
        if path is None or not self.fabric.is_global_zero:
            return
        if _saves_directories(pool) and hasattr(processor, "save_pretrained"):
            try:
                processor.save_pretrained(path)
            except OSError as error:  # not worth the model, which is kept elsewhere if need be
                log.warning("The processor could not be saved to %s: %s", path, error)


class PlanningMethod(WrappingMethod[SampleSettingsT, ReportT]):
    """A wrapping method that can stop after everything was checked.

    Attributes:
        plan_only: Check everything, print what would be done, and return None.
    """

    plan_only: bool

    @property
    def only_plans(self) -> bool:
        return self.plan_only

    def _prepare(
        self,
        pool: BaseModelPool,
        scratch: Path,
        recorder: RunRecorder[ReportT],
        splits: Sequence[Split] = TRAINING_SPLITS,
    ) -> Prepared:
        """Models and data, checked and named in the report; see :func:`prepare`."""
        prepared = prepare(
            pool,
            self.settings,
            self.architectures,
            scratch,
            show_progress=recorder.enabled,
            splits=splits,
        )
        self._check_what_follows(prepared.base_model)
        recorder.update(
            data=prepared.data,
            models=prepared.identities,
            architecture_settings=prepared.architecture.settings.as_dict(),
        )
        recorder.warn(*prepared.warnings)
        return prepared


def _saves_directories(pool: BaseModelPool) -> bool:
    """Whether the pool saves a model as a directory; FusionBench's plain pool writes one file."""
    return type(pool).save_model is not BaseModelPool.save_model


def _as_dict(merger: Any) -> dict[str, Any]:
    if merger is None:
        return {}
    if isinstance(merger, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(merger, resolve=True))
    return dict(merger) if isinstance(merger, Mapping) else {"_target_": type(merger).__qualname__}
