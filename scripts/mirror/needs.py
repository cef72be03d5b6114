"""What FusionBench's configs name: models and data sets, read from the composed configs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from featcal_fusionbench.sweeps.compose import compose_config
from featcal_fusionbench.sweeps.errors import ExperimentError
from featcal_fusionbench.sweeps.preflight import Kind, Source, sources_of

from .sets import CORRUPTIONS, Selection

__all__ = ["DatasetNeed", "MirrorError", "ModelNeed", "Needs", "is_glue", "read_needs"]

_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w-][\w.-]*")


class MirrorError(Exception):
    """A mirror cannot be made: of these configs, or in this directory."""


@dataclass(frozen=True)
class ModelNeed:
    """A model on the hub.

    Attributes:
        base: Hub id of the base that it has the architecture of; the base's is its own.
        kind: ``base`` (the whole model with its processor or tokenizer), ``expert`` (for CLIP a
            vision tower), ``adapter`` (LoRA), or ``processor`` (a base of which only that is read).
    """

    base: str
    kind: Literal["base", "expert", "adapter", "processor"]


@dataclass(frozen=True)
class DatasetNeed:
    """One configuration of a data set on the hub.

    Attributes:
        task: Name that FusionBench knows the classes by; GLUE's is the configuration's.
        splits: Splits that are read, in order of their names; none of GLUE: all are prepared.
    """

    task: str
    splits: tuple[str, ...] = ()


class Needs:
    """Models by hub id, and data sets by hub id and configuration (``default`` for none)."""

    def __init__(self) -> None:
        self.models: dict[str, ModelNeed] = {}
        self.datasets: dict[tuple[str, str], DatasetNeed] = {}

    def add_model(self, name: str, need: ModelNeed) -> None:
        """Add a model.

        Raises:
            MirrorError: It has been taken for another one.
        """
        known = self.models.setdefault(name, need)
        if {known.kind, need.kind} == {"base", "processor"}:
            self.models[name] = ModelNeed(name, "base")
        elif known != need:
            raise MirrorError(
                f"{name} is {known.kind} of {known.base} in one config and {need.kind} of "
                f"{need.base} in another: make two mirrors."
            )

    def add_dataset(self, name: str, config: str, need: DatasetNeed) -> None:
        """Add splits of a data set."""
        known = self.datasets.get((name, config), need)
        splits = tuple(sorted({*known.splits, *need.splits}))
        self.datasets[name, config] = DatasetNeed(known.task, splits)


def read_needs(selections: Iterable[Selection]) -> Needs:
    """Compose selections within FusionBench's primary config and collect what they name.

    Raises:
        MirrorError: There is no such config, or it names something by means unknown here.
    """
    needs = Needs()
    for selection in selections:
        try:
            _collect(compose_config(selection.arguments), needs)
        except (ExperimentError, OmegaConfBaseException, MirrorError) as error:
            raise MirrorError(f"{' '.join(selection.arguments)}: {error}") from error
    return needs


def is_glue(dataset: str) -> bool:
    """Whether a hub id is GLUE's."""
    return dataset.rpartition("/")[2] == "glue"


def _collect(config: DictConfig, needs: Needs) -> None:
    if "_pretrained_" not in (config.modelpool.get("models") or {}):
        raise MirrorError("the model pool has no `_pretrained_` to take the architecture from.")
    sources = sources_of(config)
    bases = (s.id for s in sources if s.setting.startswith("modelpool.models._pretrained_"))
    base = next(bases, "")
    adapted = base  # by the adapter that is named next
    for source in sources:
        if source.kind is Kind.UNKNOWN:
            raise MirrorError(f"{source.setting}: {source.id} is unknown here.")
        if not _HUB_ID.fullmatch(source.id):
            raise MirrorError(
                f"{source.id!r} is not an id on the hub. A mirror is made for pools that name "
                "nothing else."
            )
        key = source.setting.rpartition(".")[2]
        if source.kind is Kind.DATASET:
            needs.add_dataset(source.id, source.name or "default", _data(source))
        elif source.kind is Kind.PROCESSOR:
            needs.add_model(source.id, ModelNeed(source.id, "processor"))
        elif key in ("peft_model_path", "peft_name"):
            needs.add_model(source.id, ModelNeed(adapted, "adapter"))
        elif (
            source.id == base
            or key in ("base_model_path", "base_model_name")
            or source.setting.startswith("taskpool.")
        ):
            adapted = source.id
            needs.add_model(source.id, ModelNeed(source.id, "base"))
        else:
            needs.add_model(source.id, ModelNeed(base, "expert"))


def _data(source: Source) -> DatasetNeed:
    if is_glue(source.id):
        return DatasetNeed(source.name)
    if not source.split:
        raise MirrorError(f"{source.setting} is read without a split.")
    # the older task pools name no tasks beside the data
    task = source.id if source.setting.endswith(".tasks") else source.setting.split(".")[2]
    splits = CORRUPTIONS if source.split in CORRUPTIONS else (source.split,)
    return DatasetNeed(task, tuple(sorted(splits)))
