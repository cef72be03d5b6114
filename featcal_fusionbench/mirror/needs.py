"""What FusionBench's configs name: models and data sets, read from the composed configs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import hydra
from fusion_bench import import_object
from fusion_bench.constants import DEFAULT_CONFIG_PATH
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import MirrorError

__all__ = ["CORRUPTIONS", "DatasetNeed", "ModelNeed", "Needs", "Selection", "read_needs"]

CORRUPTIONS = (
    "contrast",
    "gaussian_noise",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "spatter",
)
"""Splits of corrupted images; FusionBench's robustness configs list them in a comment."""

Kind = Literal["base", "expert", "adapter", "processor"]
# What the older task pools read their data with, by type.
_OLDER = {
    "clip_vit_classification": "datasets.load_dataset",
    "FlanT5GLUETextGenerationTaskPool": (
        "fusion_bench.tasks.flan_t5_text_generation.glue_load_dataset.load_glue_dataset"
    ),
}
_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w-][\w.-]*")


@dataclass(frozen=True)
class Selection:
    """A model pool and a task pool, as on the command line of ``fusion_bench``.

    Attributes:
        modelpool: What stands behind ``modelpool=``.
        taskpool: What stands behind ``taskpool=``.
        overrides: Further overrides of either.
    """

    modelpool: str
    taskpool: str
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``fusion_bench`` that select this."""
        return (f"modelpool={self.modelpool}", f"taskpool={self.taskpool}", *self.overrides)

    @property
    def method(self) -> str:
        """The method that calibrates such models by default."""
        t5 = self.modelpool.startswith("Seq2SeqLMPool")
        return "featcal/flan_t5_task_arithmetic" if t5 else "featcal"


@dataclass(frozen=True)
class ModelNeed:
    """A model on the hub.

    Attributes:
        base: Hub id of the base that it has the architecture of; the base's is its own.
        kind: ``base`` (the whole model with its processor or tokenizer), ``expert`` (for CLIP a
            vision tower), ``adapter`` (LoRA), or ``processor`` (a base of which only that is read).
    """

    base: str
    kind: Kind


@dataclass(frozen=True)
class DatasetNeed:
    """One configuration of a data set on the hub.

    Attributes:
        task: Name that FusionBench knows the classes by; GLUE's is the configuration's.
        splits: Splits that are read, in order of their names.
    """

    task: str
    splits: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """Models by hub id, and data sets by hub id and configuration (``default`` for none)."""

    models: Mapping[str, ModelNeed] = field(default_factory=dict)
    datasets: Mapping[tuple[str, str], DatasetNeed] = field(default_factory=dict)

    def __or__(self, other: Needs) -> Needs:
        """What either needs.

        Raises:
            MirrorError: They take one hub id for two different models.
        """
        models = dict(self.models)
        for name, need in other.models.items():
            known = models.setdefault(name, need)
            if {known.kind, need.kind} == {"base", "processor"}:
                models[name] = ModelNeed(name, "base")
            elif known != need:
                raise MirrorError(
                    f"{name} is {known.kind} of {known.base} in one config and {need.kind} of "
                    f"{need.base} in another: make two mirrors."
                )
        datasets = dict(self.datasets)
        for key, need in other.datasets.items():
            known = datasets.get(key, need)
            datasets[key] = DatasetNeed(known.task, tuple(sorted({*known.splits, *need.splits})))
        return Needs(models, datasets)

    def to_json(self) -> Any:
        """These needs as JSON."""
        return {
            "models": {name: dataclasses.asdict(need) for name, need in self.models.items()},
            "datasets": [
                {"dataset": dataset, "config": config, **dataclasses.asdict(need)}
                for (dataset, config), need in self.datasets.items()
            ],
        }

    @classmethod
    def from_json(cls, content: Any) -> Needs:
        """The inverse of `to_json`."""
        return cls(
            {name: ModelNeed(**need) for name, need in content["models"].items()},
            {
                (entry["dataset"], entry["config"]): DatasetNeed(
                    entry["task"], tuple(entry["splits"])
                )
                for entry in content["datasets"]
            },
        )


def read_needs(selection: Selection) -> Needs:
    """Compose a selection within FusionBench's primary config and collect what it names.

    Raises:
        MirrorError: There is no such config, or it names something by means unknown here.
    """
    config = _compose(selection)
    try:
        return _needs_of(config)
    except (MirrorError, OmegaConfBaseException) as error:
        raise MirrorError(f"{' '.join(selection.arguments)}: {error}") from error


def _compose(selection: Selection) -> DictConfig:
    overrides = list(selection.arguments)
    try:
        with hydra.initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
            config = hydra.compose("fabric_model_fusion", overrides=overrides)
        OmegaConf.resolve(config.modelpool)
        OmegaConf.resolve(config.taskpool)
    except (HydraException, OmegaConfBaseException) as error:
        raise MirrorError(f"{' '.join(overrides)} cannot be composed: {error}") from error
    return config


def _needs_of(config: DictConfig) -> Needs:
    pool, tasks = config.modelpool, config.taskpool
    models = pool.get("models") or {}
    if "_pretrained_" not in models:
        raise MirrorError("the model pool has no `_pretrained_` to take the architecture from.")
    base = _hub_id(_source(models["_pretrained_"])[0])
    needs = Needs({base: ModelNeed(base, "base")})
    for name, entry in models.items():
        if name == "_pretrained_":
            continue
        source, adapted = _source(entry)
        if adapted is not None:
            needs |= Needs({adapted: ModelNeed(adapted, "base")})
            needs |= Needs({_hub_id(source): ModelNeed(adapted, "adapter")})
        elif source != base:
            needs |= Needs({_hub_id(source): ModelNeed(base, "expert")})
    processors = [pool.get("processor"), pool.get("tokenizer")]
    processors += [tasks.get(key) for key in ("processor", "data_processor", "tokenizer")]
    for entry in processors:
        if entry is not None:
            source = _hub_id(_source(entry)[0])
            needs |= Needs({source: ModelNeed(source, "processor")})
    if entry := tasks.get("clip_model"):
        source = _hub_id(_source(entry)[0])
        needs |= Needs({source: ModelNeed(source, "base")})
    for task, entry in _dataset_entries(pool, tasks):
        needs |= Needs(datasets=dict([_dataset(task, entry)]))
    return needs


def _source(entry: Any) -> tuple[str, str | None]:
    """Hub id of a model or processor, and of the base where it is a LoRA adapter."""
    if isinstance(entry, str):
        return entry, None
    for key, base in (
        ("pretrained_model_name_or_path", None),
        ("model_name", None),
        ("peft_model_path", "base_model_path"),
        ("peft_name", "base_model_name"),
    ):
        if key in entry:
            return str(entry[key]), None if base is None else _hub_id(str(entry[base]))
    raise MirrorError(f"no hub id is seen in {OmegaConf.to_container(entry)}.")


def _hub_id(name: str) -> str:
    if not _HUB_ID.fullmatch(name):
        raise MirrorError(
            f"{name!r} is not an id on the hub. A mirror is made for pools that name nothing else."
        )
    return name


def _dataset_entries(pool: DictConfig, tasks: DictConfig) -> Iterator[tuple[str, Any]]:
    """Name and entry of every data set; the same name may come more than once."""
    for part in (pool, tasks):
        for key in ("train_datasets", "val_datasets", "test_datasets"):
            yield from (part.get(key) or {}).items()
    kind = tasks.get("type")
    if kind is None:
        return
    # FusionBench's older task pools
    if kind not in _OLDER:
        raise MirrorError(f"task pools of type {kind} are unknown here.")
    for task in tasks.tasks:
        entry = {str(key): value for key, value in task.dataset.items()}
        if kind == "clip_vit_classification":
            entry["path"] = entry.pop("name")
        yield entry.get("path", task.name), {"_target_": _OLDER[kind], **entry}


def _dataset(task: str, entry: Any) -> tuple[tuple[str, str], DatasetNeed]:
    target = str(entry.get("_target_"))
    function = target.rpartition(".")[2]
    if function == "train_validation_split":
        return _dataset(task, entry["dataset"])
    if function == "load_glue_dataset":
        # the hub id stands in FusionBench's code; all splits are prepared whichever is used
        return (entry.get("path", "glue"), entry["name"]), DatasetNeed(entry["name"], ())
    if function == "load_dataset":
        names = [*entry.get("_args_", ())]
        path = entry.get("path") or names[0]
        name = entry.get("name") or (names[1] if len(names) > 1 else "default")
    elif function == "load_fer2013":
        path = inspect.signature(import_object(target)).parameters["path"].default
        name = "default"
    else:
        raise MirrorError(f"the data of {task} are read by {target}, which is unknown here.")
    split = entry.get("split")
    if split is None:
        raise MirrorError(f"the data of {task} are read without a split.")
    splits = CORRUPTIONS if split in CORRUPTIONS else (split,)
    return (_hub_id(path), name), DatasetNeed(task, tuple(sorted(splits)))
