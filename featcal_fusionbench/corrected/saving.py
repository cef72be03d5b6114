"""Saving and loading: the merged model as it saves itself, and one file with the corrections.

``corrections.safetensors`` holds the modules, what else the wrapper needs (CLIP's visual
projection), and in its metadata a JSON text: method and settings, tasks, architecture, and the
hash of the merged model's weights, by which the two parts are known to belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..baselines.modules import make_module
from ..baselines.settings import (
    ProbSurgerySettings,
    RepresentationSurgerySettings,
    SurgerySettings,
)
from ..experts import floating_tensors
from ..report import write_bytes
from .base import CorrectedModel, CorrectionsFileError
from .kinds import KINDS

__all__ = [
    "CORRECTIONS_FILE",
    "is_corrected_checkpoint",
    "load_corrected_model",
    "save_corrected_model",
]

CORRECTIONS_FILE = "corrections.safetensors"
_FORMAT = "featcal-corrections"
_VERSION = 1
_SETTINGS: dict[str, type[SurgerySettings]] = {
    "representation_surgery": RepresentationSurgerySettings,
    "prob_surgery": ProbSurgerySettings,
}


def is_corrected_checkpoint(path: str | Path) -> bool:
    """Whether a directory holds a merged model with corrections."""
    return (Path(path) / CORRECTIONS_FILE).is_file()


def save_corrected_model(model: CorrectedModel, path: str | Path, **kwargs: Any) -> None:
    """Save a model with corrections so that no reader ever meets a part of it unnoticed.

    The files are written beside the directory and then moved into it, each whole, the corrections
    last. Until then those of an earlier save do not fit the merged model, which loading finds.

    Args:
        model: The model.
        path: The directory; made if it is missing.
        **kwargs: For the merged model's ``save_pretrained``.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:  # FusionBench's program saves in every process
        return
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        model.model.save_pretrained(temporary, **kwargs)  # pyright: ignore
        write_bytes(temporary / CORRECTIONS_FILE, _corrections(model))
        files = sorted(temporary.iterdir(), key=lambda file: file.name == CORRECTIONS_FILE)
        for file in files:
            os.replace(file, path / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _corrections(model: CorrectedModel) -> bytes:
    settings = model.settings
    method = next(name for name, kind in _SETTINGS.items() if type(settings) is kind)
    assert settings is not None
    tensors = {f"extra.{name}": value for name, value in model.extra_tensors().items()}
    for index, module in enumerate(model.corrections):
        for name, value in module.state_dict().items():
            tensors[f"tasks.{index}.{name}"] = value
    described = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "method": method,
        "settings": settings.as_dict(),
        "architecture": model.architecture,
        "tasks": list(model.tasks),
        "merged_sha256": _digest(model.model),
    }
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return save(stored, metadata={"corrections": json.dumps(described)})


def load_corrected_model(path: str | Path) -> CorrectedModel:
    """Load a model that was saved with its corrections.

    Args:
        path: The directory, ``merged_model_save_path`` of the run that made it.

    Raises:
        CorrectionsFileError: It is none, or damaged, or its parts do not belong together.
    """
    file = Path(path) / CORRECTIONS_FILE
    described, tensors = _read(file)
    kind = next((kind for kind in KINDS if kind.architecture == described["architecture"]), None)
    settings_type = _SETTINGS.get(described["method"])
    if kind is None or settings_type is None:
        raise CorrectionsFileError(
            f"{file} is of method {described['method']!r} on {described['architecture']!r}, which "
            "this featcal-fusionbench does not know: load it with the release that wrote it."
        )
    extra = {
        key.removeprefix("extra."): value
        for key, value in tensors.items()
        if key.startswith("extra.")
    }
    model = kind.from_saved(str(path), extra)
    if _digest(model.model) != described["merged_sha256"]:
        raise CorrectionsFileError(
            f"the model in {path} is not the one that {CORRECTIONS_FILE} was trained for: it was "
            "replaced, or saving was interrupted. Save both again."
        )
    settings = settings_type(**described["settings"])
    corrections = {}
    for index, task in enumerate(described["tasks"]):
        prefix = f"tasks.{index}."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        module = make_module(settings, state["down.weight"].shape[1])
        module.load_state_dict(state)
        corrections[task] = module
    model.set_corrections(corrections, settings)
    return model


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not file.is_file():
        raise CorrectionsFileError(
            f"{file} is not there: give the directory of a model saved with its corrections."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            described = json.loads((opened.metadata() or {}).get("corrections", "null"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise CorrectionsFileError(f"{file} is damaged ({error}): save the model again.") from error
    if not isinstance(described, dict) or described.get("format") != _FORMAT:
        raise CorrectionsFileError(f"{file} holds no corrections of this package.")
    if described.get("format_version") != _VERSION:
        raise CorrectionsFileError(
            f"{file} has format version {described.get('format_version')!r}, and this "
            f"featcal-fusionbench reads version {_VERSION}."
        )
    return described, tensors


def _digest(model: nn.Module) -> str:
    """Hash of a model's values, whatever precision it was loaded in."""
    digest = hashlib.sha256()
    for value in floating_tensors(model).values():
        plain = value.detach().to("cpu", torch.float32).contiguous()
        digest.update(plain.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
