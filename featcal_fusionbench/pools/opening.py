"""Opens what an entry of a pool may be: path, hub id, adapter, configuration or model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from fusion_bench import BaseModelPool
from fusion_bench.modelpool import Seq2SeqLMPool as UpstreamSeq2SeqLMPool
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from ..calibration import Weights
from ..compat import watched_loading
from ..errors import CalibrationError, ModelPoolError
from .adapter_entries import ADAPTER_CONFIG, AdapterEntry, adapter_entry, plain_entry
from .adapters import merge_adapter
from .checkpoints import (
    Checkpoint,
    SafetensorsWeights,
    check_files,
    open_checkpoint,
    read_config,
    read_header,
    some,
    stored_weights,
    tied_names,
)
from .plain import plain_copy, plain_model

__all__ = [
    "BASE",
    "OpenedModel",
    "Opener",
    "assign",
    "describe_entry",
    "floating_tensors",
    "source_of_entry",
]

BASE = "_pretrained_"
"""The base's name in a pool."""

# Loaders of FusionBench that know configurations and instances, but no paths.
_TAKE_NO_PATHS = (BaseModelPool.load_model, UpstreamSeq2SeqLMPool.load_model)
# What a CLIP holds besides its vision tower: left out of a base by design.
_REST_OF_CLIP = {"text_model", "text_projection", "visual_projection", "logit_scale"}


@dataclass(frozen=True)
class OpenedModel:
    """A model's weights, not checked yet.

    Attributes:
        weights: Tensors by name.
        source: Where they came from, for messages and the report.
        ties: Whether its configuration ties embeddings and head; None where there is none.
        warnings: What the user should know.
    """

    weights: Weights
    source: str
    ties: bool | None
    warnings: tuple[str, ...] = ()


def floating_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model that calibration reads, by reference."""
    return {k: v for k, v in model.state_dict().items() if v.is_floating_point()}


def assign(model: nn.Module, weights: Weights, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give a model other weights, tensor by tensor, in stated precisions."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    for name, dtype in dtypes.items():
        own[name].data = weights[name].detach().to(own[name].device, dtype, copy=True)


def source_of_entry(entry: Any) -> str | None:
    """Path or hub id of an entry that is nothing but that, or ``from_pretrained`` of it."""
    return str(entry) if isinstance(entry, str | Path) else plain_entry(entry)


class Opener:
    """Opens the models of one pool, which it does not change.

    Args:
        pool: The model pool.
        scratch: Directory for weights that have to be assembled; the caller removes it.
    """

    def __init__(self, pool: BaseModelPool, scratch: Path) -> None:
        self._pool = pool
        self._scratch = scratch
        self._platform: str = getattr(pool, "_platform", "hf")
        self._base_model: nn.Module | None = None

    def open_base(self) -> tuple[nn.Module, OpenedModel]:
        """The base as a model of its own, with the weights that its files hold.

        Raises:
            ModelPoolError: It cannot be read.
        """
        entry = self._pool._models[BASE]
        source = self._readable_in_place(entry)
        model, warnings, described, made_up = self._load(entry, BASE)
        model = model.eval().requires_grad_(False)
        found = self._find_files(source, floating_tensors(model), BASE)
        if found is not None and found.wrapper:
            # its loader knows no such prefix, and has made up what decides ties, for one
            unwrapped = self._unwrap(str(source), found.wrapper)
            model, warnings, _, made_up = self._load(unwrapped, BASE)
            _refuse_made_up(BASE, described, made_up)
            model = model.eval().requires_grad_(False)
        if found is None:
            _refuse_made_up(BASE, described, made_up)
            opened = OpenedModel(floating_tensors(model), described, _ties(model), warnings)
        else:
            assign(model, found.weights, _precisions(model, found.weights))
            warnings += _left_out(BASE, described, {*found.left_out} - _REST_OF_CLIP)
            opened = OpenedModel(found.weights, described, _ties(model), warnings)
        self._base_model = model
        return model, opened

    def holds_weights(self, source: str) -> bool:
        """Whether there are safetensors files, of a model or of an adapter, at a path or hub id."""
        is_adapter = adapter_entry(source, self._platform) is not None
        return is_adapter or len(stored_weights(source, self._platform)) > 0

    def open(self, entry: Any, name: str) -> OpenedModel:
        """The weights of an expert or of a merged model; :meth:`open_base` comes first.

        Instances are read where they are, safetensors files in place. What has to be assembled
        (adapters, other formats) is loaded once and laid down in the scratch directory.

        Args:
            entry: What stands in the pool.
            name: Its name there.

        Raises:
            ModelPoolError: It cannot be read.
        """
        assert self._base_model is not None
        if isinstance(entry, nn.Module):
            model, warnings = plain_model(entry, name)
            return OpenedModel(
                floating_tensors(model), describe_entry(entry), _ties(model), warnings
            )
        source = self._readable_in_place(entry)
        found = self._find_files(source, floating_tensors(self._base_model), name)
        if source is not None and found is not None:
            ties = _ties_of(read_config(source, self._platform))
            warnings = _left_out(name, source, found.left_out)
            return OpenedModel(found.weights, source, ties, warnings)
        model, warnings, described, made_up = self._load(entry, name)
        _refuse_made_up(name, described, made_up)
        laid_down = _lay_down(floating_tensors(model), self._scratch / f"{name}.safetensors")
        return OpenedModel(laid_down, described, _ties(model), warnings)

    def _unwrap(self, source: str, wrapper: str) -> str:
        """Lay a checkpoint down without a prefix that its loader does not know."""
        directory = self._scratch / "unwrapped"
        directory.mkdir()
        for name in ("config.json", "generation_config.json"):
            content = read_config(source, self._platform, name)
            if content is not None:
                (directory / name).write_text(json.dumps(content))
        weights = stored_weights(source, self._platform)
        inside = {k.removeprefix(wrapper): weights[k] for k in weights if k.startswith(wrapper)}
        save_file(inside, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)

    def _readable_in_place(self, entry: Any) -> str | None:
        """Path or hub id of an entry whose files hold just what the pool would load."""
        source = source_of_entry(entry)
        if source is None or getattr(self._pool, "_model_kwargs", None):
            return None  # arguments may change what is loaded, such as its precision
        return source if adapter_entry(source, self._platform) is None else None

    def _find_files(
        self, source: str | None, reference: Mapping[str, Tensor], name: str
    ) -> Checkpoint | None:
        if source is None:
            return None
        return open_checkpoint(source, reference, name=name, platform=self._platform)

    def _load(self, entry: Any, name: str) -> tuple[nn.Module, tuple[str, ...], str, list[str]]:
        """A model of its own, warnings, where it came from, and which tensors were made up."""
        if isinstance(entry, nn.Module):
            return *plain_copy(entry, name), describe_entry(entry), []
        adapter, source = adapter_entry(entry, self._platform), source_of_entry(entry)
        if adapter is not None:
            return self._load_adapter(adapter, name)
        described = source or f"made by the model pool from {describe_entry(entry)}"
        if source is not None:
            check_files(source, name=name, platform=self._platform)

        def load() -> Any:
            # of other functions that mean a checkpoint, FusionBench's fails on the flat layout
            target = "" if isinstance(entry, str | Path) else str(entry.get("_target_", ""))
            if source is None or target.endswith(".from_pretrained"):
                return self._from_pool(entry, name)
            return self._from_source(source, name)

        loaded, made_up = _watched(load, name, described)
        return *plain_model(loaded, name), described, made_up

    def _load_adapter(
        self, entry: AdapterEntry, name: str
    ) -> tuple[nn.Module, tuple[str, ...], str, list[str]]:
        source, warnings = self._base_of(entry, name)
        described = f"the adapter {entry.adapter} on {source}"
        own = source_of_entry(self._pool._models[BASE])
        if self._base_model is not None and source == own and not entry.model_kwargs:
            base = copy.deepcopy(self._base_model)
        else:
            check_files(source, name=name, platform=self._platform)
            loaded, made_up = _watched(
                lambda: self._from_source(source, name, **entry.model_kwargs), name, described
            )
            _refuse_made_up(name, described, made_up)
            base, more = plain_model(loaded, name)
            warnings += more
        merged = merge_adapter(base, entry.adapter, name=name, platform=self._platform)
        return merged, warnings, described, []

    def _from_pool(self, entry: Any, name: str) -> Any:
        """What the pool makes of an entry."""
        view = copy.copy(self._pool)
        view._models = {name: entry}
        return view.load_model(name)

    def _from_source(self, source: str, name: str, **kwargs: Any) -> Any:
        """A model by path or hub id, of the class that the pool gives it, or its configuration."""
        if Path(source).is_file():
            return _from_file(Path(source), name)
        if not kwargs and type(self._pool).load_model not in _TAKE_NO_PATHS:
            return self._from_pool(source, name)
        kwargs = {**(getattr(self._pool, "_model_kwargs", None) or {}), **kwargs}
        kind = type(self._base_model) if self._base_model is not None else None
        kind = kind or _model_class(read_config(source, self._platform), source, name)
        return kind.from_pretrained(source, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _base_of(self, entry: AdapterEntry, name: str) -> tuple[str, tuple[str, ...]]:
        """What an adapter is merged into, and a warning where it names another base.

        They may be the same model under two names, a path and a hub id: it is no error. So the
        pool's base stands in for one of its name that is not on this machine.
        """
        own = source_of_entry(self._pool._models[BASE])
        base, named = entry.base, self._named_base(entry)
        if base == named and own and not Path(base).exists() and _last(own) == _last(base):
            base = own
        if not named or named == base:
            return base, ()
        return base, (
            f"the LoRA adapter {entry.adapter!r} of {name} was trained on {named!r}, and is merged "
            f"into {base!r}: check that they are the same model.",
        )

    def _named_base(self, entry: AdapterEntry) -> str | None:
        return (read_config(entry.adapter, self._platform, ADAPTER_CONFIG) or {}).get(
            "base_model_name_or_path"
        )


def _last(source: str) -> str:
    return Path(source).name


def describe_entry(entry: Any) -> str:
    """What an entry is, in a few words."""
    if isinstance(entry, nn.Module):
        return f"instance of {type(entry).__name__}"
    is_config = isinstance(entry, DictConfig | dict)
    return str(entry.get("_target_", entry)) if is_config else str(entry)


def _watched(load: Callable[[], Any], name: str, described: str) -> tuple[nn.Module, list[str]]:
    """A loaded model and which of its tensors were made up, with the model named in all errors."""
    try:
        with watched_loading() as loaded:
            model = load()
    except CalibrationError:
        raise
    except Exception as error:
        raise ModelPoolError(
            f"model {name!r} ({described}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelPoolError(
            f"model {name!r} ({described}) is a {type(model).__name__}, not a model: give a path, "
            "a hub id, a model, or a configuration that makes one."
        )
    return model, [key for checkpoint in loaded for key in checkpoint.made_up]


def _refuse_made_up(name: str, described: str, made_up: list[str]) -> None:
    if made_up:
        raise ModelPoolError(
            f"model {name!r} ({described}): {len(made_up)} tensors are in none of its files and "
            f"would be random, e.g. {some(made_up)}. Save the model again, whole, with "
            "save_pretrained."
        )


def _from_file(path: Path, name: str) -> nn.Module:
    """A model of the configuration beside a safetensors file; its weights are read afterwards."""
    config = read_config(str(path), "hf")
    if config is None:
        raise ModelPoolError(
            f"model {name!r}: there is no config.json beside {path}, by which the model could be "
            "made. Give a directory that save_pretrained wrote."
        )
    kind = _model_class(config, str(path), name)
    return kind(kind.config_class.from_dict(config))  # pyright: ignore


def _model_class(config: Mapping[str, Any] | None, source: str, name: str) -> type[nn.Module]:
    named = ((config or {}).get("architectures") or [""])[0]
    kind = getattr(transformers, named, None) if named else None
    if kind is None:
        raise ModelPoolError(
            f"model {name!r} ({source}): its config.json names no architecture that transformers "
            f"has ({named!r}), and this pool does not say how to load a path. Use FusionBench's "
            "CLIPVisionModelPool or featcal_fusionbench.pools.seq2seq_modelpool.Seq2SeqLMPool."
        )
    return kind


def _ties(model: nn.Module) -> bool | None:
    """Whether a model with a head of words reads its embeddings there, by its configuration."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return None if head is None else _ties_of(vars(getattr(model, "config", None)))


def _ties_of(config: Mapping[str, Any] | None) -> bool | None:
    # transformers 5 sets the usual flag for every T5, and keeps what it meant under this name
    ties = (config or {}).get("scale_decoder_outputs", (config or {}).get("tie_word_embeddings"))
    return None if ties is None else bool(ties)


def _precisions(model: nn.Module, weights: SafetensorsWeights) -> dict[str, torch.dtype]:
    """The files' precisions, but for modules that the model's class keeps in float32."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {
        name: tensor.dtype if kept & set(name.split(".")) else weights.dtype_of(name)
        for name, tensor in floating_tensors(model).items()
    }


def _left_out(name: str, source: str, groups: Any) -> tuple[str, ...]:
    if not groups:
        return ()
    return (
        f"model {name!r} ({source}) holds more than the base's architecture, which is left out: "
        f"{', '.join(sorted(groups))}.",
    )


def _lay_down(tensors: Mapping[str, Tensor], path: Path) -> SafetensorsWeights:
    """Write tensors into a file, tied ones once."""
    first = {key: names[0] for key, names in tied_names(tensors).items()}
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
    header = read_header(path)
    return SafetensorsWeights({key: header[name] for key, name in first.items()})
