"""Weights of the base and the experts, read tensor by tensor: knows files, not statistics."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import BaseModelPool
from fusion_bench.utils.modelscope import resolve_file_path
from omegaconf import DictConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .calibration import Weights
from .calibration.errors import WeightsError
from .errors import ModelPoolError
from .report import ModelIdentity

__all__ = [
    "CheckedWeights",
    "SafetensorsWeights",
    "check_weights",
    "checkpoint_weights",
    "floating_tensors",
    "identities",
    "open_weights",
    "require_base_and_experts",
    "warn_of_equal_experts",
    "warn_of_other_bases",
]

# CLIP's vision tower is stored with this prefix by most transformers releases, without by some.
_PREFIXES = ("", "vision_model.")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsWeights(Mapping[str, Tensor]):
    """Tensors of safetensors files under other names; each read when it is asked for.

    Args:
        places: File and stored key of each tensor, by the name it is known as here.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = dict(places)
        self._files = {
            path: safe_open(path, framework="pt") for path in {p for p, _ in places.values()}
        }

    def __getitem__(self, name: str) -> Tensor:
        path, key = self._places[name]
        return self._files[path].get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def floating_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model that calibration reads, by reference."""
    return {k: v for k, v in model.state_dict().items() if v.is_floating_point()}


def open_weights(
    pool: BaseModelPool, name: str, reference: Mapping[str, Tensor], scratch: Path
) -> tuple[Weights, str]:
    """Open the weights of one model of the pool without keeping a loaded model around.

    A model instance is read where it is. A checkpoint of safetensors files is read in place. What
    the pool has to assemble (adapters, other formats) is loaded once by the pool and laid down in
    the scratch directory.

    Args:
        pool: The model pool; it is not changed.
        name: Name of the model in the pool.
        reference: Names that the weights must have, from the base.
        scratch: Directory for weights laid down; the caller removes it.

    Returns:
        The weights, and where they came from.
    """
    config = pool._models[name]
    if isinstance(config, nn.Module):
        return floating_tensors(config), f"instance of {type(config).__name__}"
    source = _plain_source(config)
    if source is not None:
        weights = checkpoint_weights(source, reference, platform=getattr(pool, "_platform", "hf"))
        if weights is not None:
            return weights, source
    described = source or f"made by the model pool from {_describe(config)}"
    try:
        tensors = floating_tensors(pool.load_model(name))
    except ModelPoolError:
        raise
    except Exception as error:
        raise ModelPoolError(
            f"model {name!r} ({described}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return _lay_down(tensors, scratch / f"{name}.safetensors"), described


def _lay_down(tensors: Mapping[str, Tensor], path: Path) -> SafetensorsWeights:
    """Write tensors into a file, tied ones once."""
    first = {key: names[0] for key, names in _tied(tensors).items()}
    stored = {key: tensors[key].detach().cpu().contiguous() for key in set(first.values())}
    needed = sum(tensor.nbytes for tensor in stored.values())
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ModelPoolError(
            f"{needed / 2**30:.1f} GiB are needed in {path.parent} to lay down the weights of "
            f"{path.stem!r} and {free / 2**30:.1f} GiB are free: set TMPDIR to another disk, or "
            "save the expert with save_pretrained and put its path into the model pool."
        )
    save_file(stored, path)
    return SafetensorsWeights({key: (path, name) for key, name in first.items()})


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each tensor the names of all that are the same memory, itself among them, in order."""
    same: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        has_memory = tensor.numel() > 0 and not tensor.is_meta
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if has_memory else name
        same.setdefault(where, []).append(name)
    return {name: names for names in same.values() for name in names}


def _plain_source(config: Any) -> str | None:
    """Path or hub id of a pool entry that is nothing but ``from_pretrained(source)``."""
    if isinstance(config, str):
        return config
    if isinstance(config, DictConfig | dict):
        known = {"_target_", "pretrained_model_name_or_path"}
        target = str(config.get("_target_", ""))
        if set(map(str, config)) == known and target.endswith(".from_pretrained"):
            return str(config["pretrained_model_name_or_path"])
    return None


def _describe(config: Any) -> str:
    return (
        str(config.get("_target_", config))
        if isinstance(config, DictConfig | dict)
        else str(config)
    )


def checkpoint_weights(
    source: str, reference: Mapping[str, Tensor], *, platform: str = "hf"
) -> SafetensorsWeights | None:
    """Open a checkpoint's safetensors files under the names of a reference model.

    Names are matched by structure: a checkpoint may hold the ``vision_model.`` prefix or not, and
    may hold more than the model (a whole CLIP with its text tower). Of tensors that are tied in the
    reference (T5's embeddings) it may hold one.

    Args:
        source: Directory, safetensors file, or hub id.
        reference: The names wanted.
        platform: Hub that ids refer to, as FusionBench names it.

    Returns:
        The weights, or None where the checkpoint has no safetensors files or lacks a name.
    """
    stored = _stored_tensors(source, platform)
    if stored is None:
        return None
    tied = _tied(reference)
    for add in _PREFIXES:
        for drop in _PREFIXES:
            places = {
                name: next(
                    (
                        stored[key]
                        for other in (name, *tied[name])
                        if (key := add + other.removeprefix(drop)) in stored
                    ),
                    None,
                )
                for name in reference
            }
            if all(place is not None for place in places.values()):
                return SafetensorsWeights({k: v for k, v in places.items() if v is not None})
    return None


def _stored_tensors(source: str, platform: str) -> dict[str, tuple[Path, str]] | None:
    if Path(source).is_file():
        return _keys_of(Path(source)) if source.endswith(".safetensors") else None
    if (index := _file_of(source, _INDEX, platform)) is not None:
        shards = json.loads(index.read_text())["weight_map"]
        files = {shard: _file_of(source, shard, platform) for shard in set(shards.values())}
        return {key: (path, key) for key, shard in shards.items() if (path := files[shard])}
    single = _file_of(source, _SINGLE, platform)
    return None if single is None else _keys_of(single)


def _keys_of(path: Path) -> dict[str, tuple[Path, str]]:
    with safe_open(path, framework="pt") as file:
        return {key: (path, key) for key in file.keys()}  # noqa: SIM118 (not a mapping)


def _file_of(source: str, filename: str, platform: str) -> Path | None:
    """A file of a checkpoint, from disk or the hub; None where the checkpoint does not have it."""
    try:
        path = Path(resolve_file_path(source, filename, platform=platform))  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError):  # hub errors are OSErrors: not found, offline, not cached
        return None
    return path if path.is_file() else None


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that fit the base and are finite, and what identifies them."""

    weights: Weights
    identity: ModelIdentity


def check_weights(
    role: Literal["base", "expert", "merged"],
    name: str,
    weights: Weights,
    source: str,
    reference: Mapping[str, Tensor],
) -> CheckedWeights:
    """Check a model's weights against the base's names and shapes and read them through once.

    Args:
        role: What the model is in this run.
        name: Its name.
        weights: Its weights.
        source: Where they came from.
        reference: Tensors of the base.

    Raises:
        WeightsError: Names are missing, shapes differ, tensors hold no data (meta) or NaN or Inf;
            all that is wrong is named in one message.
    """
    missing = [key for key in reference if key not in weights]
    if missing:
        raise WeightsError(
            f"model {name!r} ({source}) lacks {len(missing)} of the base's {len(reference)} "
            f"tensors, e.g. {_some(missing)}: it is of another architecture. Every expert must be "
            "fine-tuned from the base."
        )
    digest = hashlib.sha256()
    shapes, empty, broken, count = [], [], [], 0
    tied = _tied(reference)
    for key, expected in reference.items():
        if key != tied[key][0]:
            continue
        tensor = weights[key].detach()
        if tensor.shape != expected.shape:
            shapes.append(f"{key} {tuple(tensor.shape)} for {tuple(expected.shape)}")
        elif tensor.is_meta:
            empty.append(key)
        else:
            if not bool(torch.isfinite(tensor).all()):
                broken.append(key)
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            count += tensor.numel()
    problems = [
        f"{what}: {_some(found)}"
        for what, found in (
            ("shapes differ from the base's", shapes),
            ("tensors without data (meta device)", empty),
            ("NaN or Inf", broken),
        )
        if found
    ]
    if problems:
        raise WeightsError(
            f"model {name!r} ({source}) cannot be used: {'; '.join(problems)}. "
            "Check the checkpoint, or remove the task from the model pool."
        )
    identity = ModelIdentity(
        role=role, name=name, source=source, sha256=digest.hexdigest(), parameters=count
    )
    return CheckedWeights(weights, identity)


def identities(pool: BaseModelPool) -> tuple[ModelIdentity, ...]:
    """What the pool's base and experts are, without reading them: not hashed."""
    found = []
    for name in (*(["_pretrained_"] if pool.has_pretrained else []), *pool.model_names):
        config = pool._models[name]
        source = (
            f"instance of {type(config).__name__}"
            if isinstance(config, nn.Module)
            else _plain_source(config) or f"made by the model pool from {_describe(config)}"
        )
        role = "base" if name == "_pretrained_" else "expert"
        found.append(ModelIdentity(role=role, name=name, source=source))
    return tuple(found)


def _some(items: Iterable[str], limit: int = 3) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def warn_of_equal_experts(experts: Mapping[str, CheckedWeights]) -> list[str]:
    """One warning per set of tasks whose experts are the same checkpoint."""
    by_digest: dict[str, list[str]] = {}
    for task, checked in experts.items():
        by_digest.setdefault(checked.identity.sha256 or "", []).append(task)
    return [
        f"the experts of {' and '.join(tasks)} are the same checkpoint (sha256 {digest[:12]}…): "
        "check the model pool."
        for digest, tasks in by_digest.items()
        if len(tasks) > 1
    ]


def warn_of_other_bases(pool: BaseModelPool) -> list[str]:
    """Warnings about LoRA adapters that name another base than they are merged into.

    They may be the same model under two names, a path and a hub id: it is no error.
    """
    found = []
    for task in pool.model_names:
        config = pool._models[task]
        if not isinstance(config, DictConfig | dict) or "peft_model_path" not in config:
            continue
        adapter, base = str(config["peft_model_path"]), str(config.get("base_model_path"))
        file = _file_of(adapter, "adapter_config.json", getattr(pool, "_platform", "hf"))
        named = file and json.loads(file.read_text()).get("base_model_name_or_path")
        if named and Path(named).name != Path(base).name:
            found.append(
                f"the LoRA adapter {adapter!r} of {task} was trained on {named!r}, and is merged "
                f"into {base!r}: check that they are the same model."
            )
    return found


def require_base_and_experts(pool: BaseModelPool) -> list[str]:
    """The tasks of a pool that has a base and at least one expert.

    Raises:
        ModelPoolError: It lacks one of them.
    """
    if not pool.has_pretrained:
        raise ModelPoolError(
            "the model pool has no base: add `_pretrained_: <path or hub id>` to modelpool.models."
        )
    if not pool.model_names:
        raise ModelPoolError(
            "the model pool has no experts: add `<task>: <path or hub id>` to modelpool.models."
        )
    return list(pool.model_names)
