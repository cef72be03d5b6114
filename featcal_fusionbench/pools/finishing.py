"""The end of a run: the model in the base's precision, its configuration true, and saved whole.

What is saved is what was calibrated, wherever it is loaded: under every supported release of
transformers, and also where the directory that was asked for turns out not to take it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPVisionModel

from ..errors import UnsavedModelError
from ..report import read_json, write_bytes, write_json

__all__ = [
    "Extras",
    "finish",
    "keep_when_saving_fails",
    "restore_extras",
    "save_whole",
    "silence_extras",
]

Extras = tuple[tuple[str, str], ...]
"""Modules, and the flags of their configurations, that make forwards return more than features."""

# As the releases of transformers store them; set past their setters, which refuse some kernels.
_EXTRAS = ("output_attentions", "_output_attentions", "output_hidden_states")
_TOWER = "vision_model."
_INDEX = "model.safetensors.index.json"


def silence_extras(model: nn.Module) -> Extras:
    """Let forwards return no attentions and no hidden states: nothing here reads them.

    Attention kernels that cannot give them refuse to run, or others run in their place.

    Returns:
        What was on, for :func:`restore_extras`.
    """
    found = []
    for module, config in _configs(model):
        for flag in _EXTRAS:
            if vars(config).get(flag):
                vars(config)[flag] = False
                found.append((module, flag))
    return tuple(found)


def restore_extras(model: nn.Module, extras: Extras) -> None:
    """Switch on again what :func:`silence_extras` switched off in a model of this structure."""
    for module, flag in extras:
        vars(model.get_submodule(module).config)[flag] = True


def finish(model: nn.Module, dtypes: Mapping[str, torch.dtype], extras: Extras) -> tuple[str, ...]:
    """Make a result what the base was in all but its values.

    Args:
        model: The result, on the host; changed in place.
        dtypes: The base's precision of each tensor.
        extras: What the base's forwards return besides features.

    Returns:
        Warnings about values that the base's precision cannot hold.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    lost = []
    for name, tensor in tensors.items():
        dtype = dtypes.get(name, tensor.dtype)
        if tensor.dtype == dtype:
            continue
        value = tensor.detach().to(dtype)
        if bool(torch.isfinite(value).all()):
            tensor.data = value
        else:
            lost.append(name)
    restore_extras(model, extras)
    _tell_the_truth_of_ties(model)
    if not lost:
        return ()
    return (
        f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' * (len(lost) > 3)} hold values beyond "
        "the range of the base's precision and stay in the working precision.",
    )


def _tell_the_truth_of_ties(model: nn.Module) -> None:
    """Say in the configuration whether the head is tied.

    transformers 5 says so of every T5 and decides by other means; transformers 4 and other readers
    of a saved model go by this flag, and would put the embeddings in the head's place.
    """
    get = getattr(model, "get_output_embeddings", lambda: None)
    head, embeddings = get(), getattr(model, "get_input_embeddings", lambda: None)()
    if head is not None and embeddings is not None:
        model.config.tie_word_embeddings = head.weight is embeddings.weight  # pyright: ignore


def save_whole(
    model: nn.Module,
    path: str | Path,
    *args: Any,
    last: Mapping[str, bytes] | None = None,
    **kwargs: Any,
) -> None:
    """Save a model so that no reader ever meets a part of it, under any release of transformers.

    The files are written beside the directory and then moved into it, each whole. Weights of an
    earlier save that the new one does not replace are removed, since readers might take them.

    Args:
        model: A model with ``save_pretrained``.
        path: The directory; made if it is missing.
        *args: For the model's ``save_pretrained``.
        last: Further files by name, moved after all others.
        **kwargs: For the model's ``save_pretrained``.

    Raises:
        OSError: It cannot be written.
    """
    path, last = Path(path), last or {}
    path.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        type(model).save_pretrained(model, staged, *args, **kwargs)  # pyright: ignore
        if isinstance(model, CLIPVisionModel):
            _name_as_all_releases_read(staged)
        for name, content in last.items():
            write_bytes(staged / name, content)
        files = sorted(staged.iterdir(), key=lambda file: file.name in last)
        if not any(file.suffix == ".safetensors" for file in files):
            raise OSError(f"{type(model).__name__}.save_pretrained wrote no weights")
        stale = {*path.glob("model.safetensors*"), *path.glob("model-*-of-*.safetensors")}
        for file in files:
            os.replace(file, path / file.name)
        for file in stale - {path / file.name for file in files}:
            file.unlink()
    except SafetensorError as error:  # its word for a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _name_as_all_releases_read(directory: Path) -> None:
    """Give a CLIP vision tower's tensors the names that transformers 4 and 5 both read.

    Releases from 5.6 on may leave the prefix out, and earlier ones then load random weights.
    """
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if all(key.startswith(_TOWER) for key in tensors):
            continue
        renamed = {_TOWER + key.removeprefix(_TOWER): value for key, value in tensors.items()}
        temporary = file.with_suffix(".tmp")
        save_file(renamed, temporary, metadata={"format": "pt"})
        os.replace(temporary, file)
    index = directory / _INDEX
    if index.is_file():
        content = read_json(index)
        content["weight_map"] = {
            _TOWER + key.removeprefix(_TOWER): shard for key, shard in content["weight_map"].items()
        }
        write_json(index, content)


def keep_when_saving_fails(model: nn.Module, save: Callable[..., None], fallback: Path) -> None:
    """Let a model's ``save_pretrained`` keep it elsewhere where it cannot be saved as asked.

    Args:
        model: The model; ``save_pretrained`` becomes an attribute of its own, which copies of it
            have too.
        save: Saves the model, given the path and what else ``save_pretrained`` was given; raises
            OSError where it cannot be written.
        fallback: Directory to try first when saving fails.
    """
    model.save_pretrained = _Keeping(save, fallback)  # pyright: ignore


@dataclass(frozen=True)
class _Keeping:
    save: Callable[..., None]
    fallback: Path

    def __call__(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        try:
            self.save(path, *args, **kwargs)
        except OSError as error:
            kept = self._keep(*args, **kwargs)
            where = (
                f"It was saved to {kept} instead: move it to where it shall be."
                if kept is not None
                else f"Neither {self.fallback} nor the temporary directory took it."
            )
            raise UnsavedModelError(
                f"the model could not be saved to {path} ({error}). {where}"
            ) from error

    def _keep(self, *args: Any, **kwargs: Any) -> Path | None:
        for directory in (
            self.fallback,
            Path(tempfile.gettempdir()) / f"kept-{secrets.token_hex(6)}",
        ):
            try:
                self.save(directory, *args, **kwargs)
            except OSError:
                continue
            return directory
        return None


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each configuration in a model once, with the first module that has it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield name, config
