"""Whether all models and data sets of a table are there, before its first run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import datasets.config
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError
from omegaconf import DictConfig

from .compose import plain
from .errors import SweepError

__all__ = ["Found", "Kind", "Place", "Source", "check_sources", "require_all", "sources_of"]

HUB_TIMEOUT = 10.0

_CONFIGS = ("config.json", "adapter_config.json")
_MODELS = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = (*_MODELS, *(f"{name}.index.json" for name in _MODELS))
_WEIGHTS += ("adapter_model.safetensors", "adapter_model.bin")
_PROCESSORS = tuple(f"{of}_config.json" for of in ("preprocessor", "processor", "tokenizer"))
_PROCESSORS += ("config.json",)


class Kind(Enum):
    """What a path or hub id stands for."""

    MODEL = "model"
    PROCESSOR = "processor"
    DATASET = "data set"
    DIRECTORY = "directory"
    UNKNOWN = "entry of an unknown form"


@dataclass(frozen=True)
class Source:
    """One thing that a configuration names by a path or hub id.

    Attributes:
        kind: What it is.
        id: Its path or hub id; of an entry of an unknown form, what loads it.
        name: Configuration of a data set; empty: the default one.
        split: Split of a data set.
        setting: Where the configuration names it: what to override to have it elsewhere.
    """

    kind: Kind
    id: str
    name: str = ""
    split: str = ""
    setting: str = ""

    @property
    def title(self) -> str:
        """What and which."""
        return " ".join(filter(None, (self.kind.value, self.id, self.name)))


class Place(Enum):
    """Where a source was found."""

    LOCAL = "local"
    CACHED = "cached"
    HUB = "to download"
    MISSING = "missing"


@dataclass(frozen=True)
class Found:
    """What was found out about a source.

    Attributes:
        source: The source, with the first of its settings.
        settings: All settings that name it.
        place: Where it is.
        bytes: What is to be downloaded, where the hub says so.
        problem: Why it counts as missing.
    """

    source: Source
    settings: tuple[str, ...]
    place: Place
    bytes: int | None = None
    problem: str = ""


def sources_of(config: DictConfig) -> list[Source]:
    """Everything that a composed configuration's pools read by a path or hub id."""
    found: list[Source] = []
    for group in ("modelpool", "taskpool"):
        found += _pool_sources(group, plain(config[group], resolve=True))
    return found


def _pool_sources(group: str, content: Mapping[str, Any]) -> Iterator[Source]:
    for name, value in content.items():
        setting = f"{group}.{name}"
        if name == "models":
            for model, entry in value.items():
                yield from _entry(Kind.MODEL, entry, f"{setting}.{model}")
        elif name in ("base_model", "clip_model"):
            yield from _entry(Kind.MODEL, value, setting)
        elif name in ("processor", "data_processor", "tokenizer"):
            yield from _entry(Kind.PROCESSOR, value, setting)
        elif name.endswith("_datasets"):
            for task, entry in (value or {}).items():
                yield from _dataset(entry, f"{setting}.{task}")
    kind = str(content.get("type") or content.get("_target_"))
    if "FlanT5GLUE" in kind:
        for entry in content["tasks"]:
            of = entry["dataset"]
            # the task pool itself knows where GLUE is: `glue` in the current directory, or the hub
            yield Source(Kind.DATASET, "glue", of["name"], of["split"], "the directory ./glue")
    elif kind == "clip_vit_classification":
        for entry in content["tasks"]:
            of = entry["dataset"]
            yield Source(Kind.DATASET, of["name"], split=of["split"], setting=f"{group}.tasks")
    elif "type" in content:
        yield Source(Kind.UNKNOWN, kind, setting=f"{group}.type")


# Where models, tokenizers and processors are named; a base before what adapts it.
_KEYS = (
    "pretrained_model_name_or_path",
    "base_model_path",
    "base_model_name",
    "peft_model_path",
    "peft_name",
)


def _entry(kind: Kind, entry: Any, setting: str) -> Iterator[Source]:
    """What an entry of a model or a processor names."""
    if isinstance(entry, str):
        yield Source(kind, entry, setting=setting)
    elif isinstance(entry, Mapping):
        keys = [key for key in _KEYS if isinstance(entry.get(key), str)]
        if "load_fft_vision_model_hf" in str(entry.get("_target_")):
            # elsewhere a model's name need not be one on the hub
            keys.append("model_name")
        for key in keys:
            yield Source(kind, entry[key], setting=f"{setting}.{key}")
        if isinstance(entry.get("directory"), str):
            yield Source(Kind.DIRECTORY, entry["directory"], setting=f"{setting}.directory")
        elif not keys:
            yield _unknown(entry, setting)


def _dataset(entry: Any, setting: str) -> Iterator[Source]:
    if isinstance(entry, str):
        yield Source(Kind.DATASET, entry, setting=setting)
        return
    if not isinstance(entry, Mapping):
        return
    function = str(entry.get("_target_")).rpartition(".")[2]
    split = str(entry.get("split") or "")
    if function == "train_validation_split":
        yield from _dataset(entry["dataset"], f"{setting}.dataset")
    elif function in _KNOWN_PATHS:
        path = entry.get("path", _KNOWN_PATHS[function])
        yield Source(Kind.DATASET, path, entry.get("name", ""), split, f"+{setting}.path")
    elif isinstance(entry.get("directory"), str):
        yield Source(Kind.DIRECTORY, entry["directory"], setting=f"{setting}.directory")
    elif isinstance(entry.get("path"), str):
        name = str(entry.get("name") or "")
        yield Source(Kind.DATASET, entry["path"], name, split, f"{setting}.path")
    elif function == "load_dataset" and entry.get("_args_"):
        path, name = [*entry["_args_"], entry.get("name") or ""][:2]
        yield Source(Kind.DATASET, path, name, split, f"{setting}._args_")
    else:
        yield _unknown(entry, setting)


# Loaders that know where their data are.
_KNOWN_PATHS = {"load_glue_dataset": "glue", "load_fer2013": "clip-benchmark/wds_fer2013"}


def _unknown(entry: Mapping[str, Any], setting: str) -> Source:
    return Source(Kind.UNKNOWN, str(entry.get("_target_", dict(entry))), setting=setting)


def check_sources(sources: Iterable[Source]) -> list[Found]:
    """Look for every source: as a local path, in the caches, on the hub; each one once.

    The hub is asked unless ``HF_HUB_OFFLINE`` is set, and not again once it did not answer.
    Entries of an unknown form are left to what loads them.
    """
    settings: dict[Source, list[str]] = {}
    for source in sources:
        if source.kind is Kind.UNKNOWN:
            continue
        key = Source(source.kind, source.id, source.name, source.split)
        named = settings.setdefault(key, [])
        if source.setting not in named:
            named.append(source.setting)
    hub = _Hub()
    return [_find(source, tuple(named), hub) for source, named in settings.items()]


def require_all(found: Iterable[Found]) -> None:
    """Make sure that nothing is missing.

    Raises:
        SweepError: Something is; all of it is named, with the overrides that give it elsewhere.
    """
    missing = [item for item in found if item.place is Place.MISSING]
    if not missing:
        return
    lines = [f"{len(missing)} models or data sets are missing:"]
    for item in missing:
        shown = ", ".join(
            setting if setting.startswith("the ") else f"{setting}=PATH-OR-ID"
            for setting in item.settings[:3]
        )
        more = len(item.settings) - 3
        lines.append(
            f"  {item.source.title}: {item.problem}. Set {shown}"
            + (f" and {more} more" if more > 0 else "")
        )
    lines.append("Overrides are given after the options and hold for all cells.")
    raise SweepError("\n".join(lines))


def _find(source: Source, settings: tuple[str, ...], hub: _Hub) -> Found:
    path = Path(source.id).expanduser()
    if path.exists() or path.is_absolute() or source.kind is Kind.DIRECTORY:
        problem = _local_problem(source, path)
        return Found(source, settings, Place.MISSING if problem else Place.LOCAL, problem=problem)
    in_cache = _dataset_problem if source.kind is Kind.DATASET else _model_problem
    if not (problem := in_cache(source)):
        return Found(source, settings, Place.CACHED)
    size, hub_problem = hub.look_up(source)
    if hub_problem:
        joined = f"{problem}, and {hub_problem}"
        return Found(source, settings, Place.MISSING, problem=joined)
    return Found(source, settings, Place.HUB, bytes=size)


def _local_problem(source: Source, path: Path) -> str:
    if not path.exists():
        return "there is no such file or directory"
    if source.kind is Kind.MODEL and path.is_dir():
        for what, names in (("configuration", _CONFIGS), ("weights", _WEIGHTS)):
            if not any((path / name).exists() for name in names):
                return f"the directory has no {what} ({names[0]}, …)"
    if source.kind is Kind.PROCESSOR and path.is_dir():
        if not any((path / name).exists() for name in _PROCESSORS):
            return f"the directory has no {_PROCESSORS[0]}"
    return ""


def _model_problem(source: Source) -> str:
    """What the hub's cache lacks of a model or processor."""
    wanted = [_PROCESSORS] if source.kind is Kind.PROCESSOR else [_CONFIGS, _WEIGHTS]
    for names in wanted:
        if not any(isinstance(try_to_load_from_cache(source.id, name), str) for name in names):
            return f"not in the hub's cache {constants.HF_HUB_CACHE}"
    return ""


def _dataset_problem(source: Source) -> str:
    """Why ``datasets``, which reads from its own cache alone offline, would not find a data set."""
    root = Path(datasets.config.HF_DATASETS_CACHE)
    *namespace, name = source.id.split("/")
    folder = root / "___".join([*namespace, camelcase_to_snakecase(name)])
    infos = list(folder.glob(f"{source.name or '*'}/*/*/dataset_info.json"))
    if not infos:
        return f"not in the data sets' cache {root}"
    split = source.split.partition("[")[0]
    known = {key for info in infos for key in (json.loads(info.read_text()).get("splits") or {})}
    without = f"in the data sets' cache {root} without the split {split}"
    return without if split and split not in known else ""


class _Hub:
    """The hub, as long as it answers."""

    def __init__(self) -> None:
        self._silent = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        self._known: dict[tuple[bool, str], tuple[int | None, str]] = {}

    def look_up(self, source: Source) -> tuple[int | None, str]:
        """Bytes of a repository's files, and what speaks against downloading it."""
        if self._silent:
            return None, self._silent
        key = (source.kind is Kind.DATASET, source.id)
        if key not in self._known:
            self._known[key] = self._ask(*key)
        return self._known[key]

    def _ask(self, is_dataset: bool, repository: str) -> tuple[int | None, str]:
        try:
            ask = HfApi().dataset_info if is_dataset else HfApi().model_info
            info = ask(repository, timeout=HUB_TIMEOUT, files_metadata=True)
        except RepositoryNotFoundError:
            return None, "the hub has no such repository, or none for you (`hf auth login`)"
        except Exception as error:  # of several HTTP libraries, by the hub library's release
            self._silent = f"the hub did not answer ({type(error).__name__})"
            return None, self._silent
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if not is_dataset:
            # the same weights may be there in several formats, of which one is downloaded
            weights = [name for name in files if Path(name).suffix in (".safetensors", ".bin")]
            kept = [name for name in weights if name.endswith(".safetensors")] or weights
            files = {n: s for n, s in files.items() if n in kept or s < 10 * 2**20}
        return sum(files.values()), ""
