"""What all methods of this package share as FusionBench methods, and the merger alone.

Each wraps an upstream merger, any method of FusionBench or of this package, and leaves a report.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from omegaconf import DictConfig, OmegaConf
from torch import nn

from .calibration import PhaseClock
from .compat import apply_transformers_shim
from .errors import MergerError, OutputError, SettingsError
from .evaluation import check_task_pool
from .experts import check_weights, floating_tensors, identities
from .recorder import ReportT, RunRecorder
from .report import MergeReport, MergeSettings, MethodSettings, RunReport, report_name, scalars
from .upstream import MergedSource, make_merger

__all__ = [
    "WORKING_DTYPE",
    "MergeOnlyAlgorithm",
    "PlanningMethod",
    "WrappingMethod",
    "setting_names",
]

# FusionBench's program imports the method before the task pool, which needs this.
apply_transformers_shim()

WORKING_DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""What weights are held in during forwards, by the setting ``forward_dtype``."""

SettingsT = TypeVar("SettingsT", bound=MethodSettings)


def setting_names(settings_type: type[MethodSettings]) -> tuple[str, ...]:
    """The names of a method's settings, in order."""
    return tuple(field.name for field in fields(cast(Any, settings_type)))


class WrappingMethod(LightningFabricMixin, BaseAlgorithm, Generic[SettingsT, ReportT]):
    """A FusionBench method that takes an upstream merger's model and goes on with it.

    Args:
        merger: Configuration of any FusionBench method, nested by Hydra
            (``method@method.merger=wudi/wudi``), or a method already made. A method of this package
            writes its report into ``merger/`` below this one's directory.
        merged_model: Path or hub id of a merged checkpoint to take instead. A pool that holds
            ``_merged_`` has that one taken.
        output_dir: Where the report goes; by default the run's log directory.
        **kwargs: The fields of the method's settings.

    Raises:
        SettingsError: A setting is unknown or outside its range.
    """

    title: ClassVar[str]
    """What the method is called in messages."""
    settings_type: ClassVar[type[MethodSettings]]
    report_type: ClassVar[type[RunReport]]
    returns_plain_model: ClassVar[bool] = True
    """Whether the result has the base's architecture, so that other methods can take it."""

    _config_mapping = BaseAlgorithm._config_mapping | {
        "merger": "merger",
        "merged_model": "merged_model",
        "output_dir": "output_dir",
    }

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        output_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.merger = merger
        self.merged_model = merged_model
        self.output_dir = output_dir
        self._outer: WrappingMethod[Any, Any] | None = None
        known = {}
        for field in fields(cast(Any, self.settings_type)):
            if field.name in kwargs:
                known[field.name] = kwargs.pop(field.name)
            elif field.default is not MISSING:
                known[field.name] = field.default
        for name in kwargs:
            if not name.startswith("_"):
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
                raise SettingsError(f"method.{name} is not a setting of {self.title}: {hint}")
        self.settings = cast(SettingsT, self.settings_type(**known))
        vars(self).update(self.settings.as_dict())  # for `config`, as FusionBench's methods have it
        super().__init__(**kwargs)

    def run(self, modelpool: BaseModelPool | Mapping[str, nn.Module]) -> Any:
        """Take the merged model and go on with it.

        Args:
            modelpool: A pool with ``_pretrained_``, the experts and what data is needed. Not
                changed.

        Returns:
            The model on the host, or None where the run only planned.
        """
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
            source = self._merged_source(pool)
            if isinstance(source.merger, WrappingMethod):
                chained.callback(source.merger._leave)
            model = self._work(pool, source, recorder)
            if model is not None:
                self._name_saved_model(pool, recorder)
            recorder.update(status="planned" if model is None else "complete")
        if model is not None:
            values = scalars(recorder.report)
            self.fabric.log_dict({self._prefix + name: value for name, value in values.items()})
        return model

    @abstractmethod
    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[ReportT]
    ) -> nn.Module | None:
        """What the method does; None where it only planned."""

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

    def _check_task_pool(self, base: nn.Module) -> None:
        """Find what would make the program's evaluation wrong, before the work that it follows."""
        check_task_pool(getattr(self._program, "taskpool", None), base)

    def _load_merged(
        self,
        source: MergedSource,
        base: nn.Module,
        recorder: RunRecorder[ReportT],
    ) -> nn.Module:
        """Get the merged model, checked and named in the report."""
        with recorder.clock.phase("merging"):
            merged = source.load(base)
        if isinstance(source.merger, WrappingMethod):
            nested = source.merger
            recorder.add_output("merger", nested._directory / report_name(nested.method_name))
        with recorder.clock.phase("checks"):
            tensors = floating_tensors(merged)
            checked = check_weights("merged", "merged", tensors, source.description, tensors)
        recorder.update(models=(*recorder.report.models, checked.identity))
        return merged

    @property
    def method_name(self) -> Any:
        """The method's name in reports."""
        return self.report_type.method

    def _save_path(self) -> str | None:
        """Where FusionBench's program will save this method's model; None for nested methods."""
        path = getattr(self._program, "merged_model_save_path", None)
        if path is None or self._outer is not None:
            return None
        if "{log_dir}" in path and self.log_dir is not None:
            path = path.format(log_dir=self.log_dir)
        return path

    def _name_saved_model(self, pool: BaseModelPool, recorder: RunRecorder[ReportT]) -> None:
        """Put the model that FusionBench's program is about to save into the report."""
        path = self._save_path()
        if path is None or not self.fabric.is_global_zero:
            return
        if type(pool).save_model is BaseModelPool.save_model:
            recorder.warn(
                f"pools of type {type(pool).__name__} save a model as one file of pickled tensors, "
                "without processor or tokenizer: use a pool that saves with save_pretrained, such "
                "as featcal_fusionbench.modelpool.Seq2SeqLMPool, for a model that reloads."
            )
        recorder.add_output("model", path)

    def _save_processor(self, pool: BaseModelPool, processor: Any) -> None:
        """Put the processor where FusionBench's program is about to save the model."""
        path = self._save_path()
        if path is None or not self.fabric.is_global_zero:
            return
        saves_directories = type(pool).save_model is not BaseModelPool.save_model
        if saves_directories and hasattr(processor, "save_pretrained"):
            processor.save_pretrained(path)


class PlanningMethod(WrappingMethod[SettingsT, ReportT]):
    """A wrapping method that can stop after everything was checked.

    Args:
        plan_only: Check everything, print what would be done, and return None.
        merger: See :class:`WrappingMethod`, as the rest.
    """

    _config_mapping = WrappingMethod._config_mapping | {"plan_only": "plan_only"}

    def __init__(
        self,
        merger: Any = None,
        merged_model: str | None = None,
        plan_only: bool = False,
        output_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.plan_only = plan_only
        super().__init__(merger, merged_model, output_dir, **kwargs)

    @property
    def only_plans(self) -> bool:
        return self.plan_only


class MergeOnlyAlgorithm(WrappingMethod[MergeSettings, MergeReport]):
    """Runs an upstream merger as the other methods do, and returns its model as it is.

    Unlike the merger alone it never writes into the pool's models, refuses results that are not
    one model, works with transformers releases that are newer than FusionBench, and leaves a
    report with the merger's cost.
    """

    title = "merge_only"
    settings_type = MergeSettings
    report_type = MergeReport

    def _work(
        self, pool: BaseModelPool, source: MergedSource, recorder: RunRecorder[MergeReport]
    ) -> nn.Module:
        with recorder.clock.phase("checks"):
            recorder.update(models=identities(pool))
            base = pool.load_model("_pretrained_")
            self._check_task_pool(base)
        return self._load_merged(source, base, recorder)


def _as_dict(merger: Any) -> dict[str, Any]:
    if merger is None:
        return {}
    if isinstance(merger, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(merger, resolve=True))
    return dict(merger) if isinstance(merger, Mapping) else {"_target_": type(merger).__qualname__}
