"""Entries of a pool that mean a base plus an adapter, or a plain checkpoint, by their loaders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..errors import ModelPoolError
from .checkpoints import read_config

__all__ = [
    "ADAPTER_CONFIG",
    "NO_PLAIN_WEIGHTS",
    "AdapterEntry",
    "adapter_entry",
    "plain_entry",
]

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which PEFT, and transformers, know an adapter."""

NO_PLAIN_WEIGHTS = (
    "whose output is no output of a plain model with other weights. Give the task another expert, "
    "or remove it from the pool."
)

_LINEARIZED = "fusion_bench.models.linearized.vision_model"
_PATH = "pretrained_model_name_or_path"


@dataclass(frozen=True)
class AdapterEntry:
    """A pool entry that means a base plus an adapter.

    Attributes:
        base: Path or hub id of the base.
        adapter: Path or hub id of the adapter.
        model_kwargs: Arguments for the base's ``from_pretrained``.
    """

    base: str
    adapter: str
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


def adapter_entry(config: Any, platform: str = "hf") -> AdapterEntry | None:
    """Recognise a pool entry that means a base plus an adapter, by any of the usual loaders.

    A path or hub id with an ``adapter_config.json`` is one, whatever else lies there: so
    ``from_pretrained`` takes it.

    Args:
        config: The entry.
        platform: Hub that ids refer to.

    Returns:
        Base and adapter, which are to be merged whatever the entry says; None for any other entry,
        and for one with a key that the loader's meaning here does not cover.

    Raises:
        ModelPoolError: The entry is a linearised LoRA, or the adapter does not name its base.
    """
    source = str(config) if isinstance(config, str | Path) else plain_entry(config)
    if source is not None:
        own = read_config(source, platform, ADAPTER_CONFIG)
        return None if own is None else _with_named_base(own, source, {})
    if not isinstance(config, DictConfig | dict):
        return None
    target = str(config.get("_target_", ""))
    if target == f"{_LINEARIZED}.load_l_lora_vision_model_hf":
        raise ModelPoolError(
            f"the entry with the adapter {config.get('peft_name')!r} is loaded by {target}: "
            f"linearised LoRA, {NO_PLAIN_WEIGHTS}"
        )
    for loader in _LOADERS:
        if re.fullmatch(loader.target, target):
            return loader.entry(config, platform)
    return None


def plain_entry(config: Any) -> str | None:
    """Path or hub id of a pool entry that means just that checkpoint; None for any other."""
    if not isinstance(config, DictConfig | dict):
        return None
    target, keys = str(config.get("_target_", "")), {str(key) for key in config} - {"_target_"}
    if target == f"{_LINEARIZED}.load_fft_vision_model_hf":
        known = {"model_name"} <= keys <= {"model_name", "return_vision_model"}
        return _text(config, "model_name") if known else None
    if target.endswith(".from_pretrained") and not target.startswith("peft."):
        return _text(config, _PATH) if keys == {_PATH} else None
    return None


@dataclass(frozen=True)
class _Loader:
    """A function that pools name as `_target_`, and which arguments say what.

    Attributes:
        target: Its names, as a regular expression.
        base: The argument with the base; None where the adapter names it.
        adapter: The argument with the adapter.
        ignored: Arguments that make no difference to merged weights.
        passed_on: Which other arguments are for the base's ``from_pretrained``.
    """

    target: str
    base: str | None
    adapter: str
    ignored: frozenset[str]
    passed_on: Callable[[str], bool] = frozenset().__contains__

    def entry(self, config: Mapping[str, Any], platform: str) -> AdapterEntry | None:
        known = {"_target_", self.base, self.adapter} | self.ignored
        rest = {str(key): value for key, value in config.items() if key not in known}
        adapter = _text(config, self.adapter)
        if adapter is None or not all(self.passed_on(key) for key in rest):
            return None
        if self.base is None:
            own = read_config(adapter, platform, ADAPTER_CONFIG)
            return None if own is None else _with_named_base(own, adapter, rest)
        inner = config.get(self.base)
        base = inner if isinstance(inner, str) and self.base != "model" else plain_entry(inner)
        return None if base is None else AdapterEntry(base, adapter, rest)


_TRAINING = frozenset({"is_trainable", "merge_and_unload"})
_LOADERS = (
    _Loader(
        re.escape(f"{_LINEARIZED}.load_lora_vision_model_hf"),
        "base_model_name",
        "peft_name",
        frozenset({"merge_and_unload", "return_vision_model"}),
    ),
    _Loader(
        r"fusion_bench\.(\w+\.)*load_lora_model", "base_model_path", "peft_model_path", _TRAINING
    ),
    _Loader(
        r"featcal_fusionbench\.(\w+\.)*load_lora_model",
        "base_model_path",
        "peft_model_path",
        _TRAINING,
        lambda key: True,
    ),
    _Loader(
        r"peft\.(\w+\.)*AutoPeftModel\w*\.from_pretrained",
        None,
        _PATH,
        frozenset({"is_trainable"}),
        frozenset({"torch_dtype", "dtype"}).__contains__,
    ),
    _Loader(
        r"peft\.(\w+\.)*PeftModel\w*\.from_pretrained",
        "model",
        "model_id",
        frozenset({"is_trainable"}),
    ),
)


def _text(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def _with_named_base(
    own: Mapping[str, Any], adapter: str, model_kwargs: dict[str, Any]
) -> AdapterEntry:
    """An entry by the base, and its revision, that the adapter's configuration names."""
    if not own.get("base_model_name_or_path"):
        raise ModelPoolError(
            f"the adapter {adapter!r} names no base (base_model_name_or_path in its "
            f"{ADAPTER_CONFIG}): add it there, or give base and adapter by "
            "featcal_fusionbench.pools.seq2seq_modelpool.load_lora_model."
        )
    revision = {"revision": own["revision"]} if own.get("revision") else {}
    return AdapterEntry(str(own["base_model_name_or_path"]), adapter, revision | model_kwargs)
