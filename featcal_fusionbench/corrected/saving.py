"""The files of a merged model with corrections: the model as it saves itself, and one file more.

``corrections.safetensors`` holds the modules, what else the wrapper needs (CLIP's visual
projection), and in its metadata a JSON text: method and settings, tasks, architecture, and the
hash of the merged model's weights, by which the two parts are known to belong together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..baselines.modules import Correction, make_module
from ..baselines.settings import (
    ProbSurgerySettings,
    RepresentationSurgerySettings,
    SurgerySettings,
)
from ..errors import CalibrationError
from ..pools.finishing import save_whole
from ..pools.opening import floating_tensors

__all__ = [
    "CORRECTIONS_FILE",
    "Corrections",
    "CorrectionsFileError",
    "is_corrected_checkpoint",
    "read_corrections",
    "require_same_model",
    "save_with_corrections",
]

CORRECTIONS_FILE = "corrections.safetensors"
_FORMAT = "featcal-corrections"
_VERSION = 1
_SETTINGS: dict[str, type[SurgerySettings]] = {
    "representation_surgery": RepresentationSurgerySettings,
    "prob_surgery": ProbSurgerySettings,
}


class CorrectionsFileError(CalibrationError):
    """A saved model with corrections is damaged, or its parts do not belong together."""


@dataclass(frozen=True)
class Corrections:
    """What the file beside a merged model holds.

    Attributes:
        architecture: Name of the wrapper's architecture.
        settings: What the modules were trained with.
        modules: The corrections by task.
        extra: Weights besides the model's and the corrections' that the wrapper needs.
        merged_sha256: Hash of the merged model's weights; None before it is saved.
    """

    architecture: str
    settings: SurgerySettings
    modules: Mapping[str, Correction]
    extra: Mapping[str, Tensor]
    merged_sha256: str | None = None


def is_corrected_checkpoint(path: str | Path) -> bool:
    """Whether a directory holds a merged model with corrections."""
    return (Path(path) / CORRECTIONS_FILE).is_file()


def save_with_corrections(
    model: nn.Module, corrections: Corrections, path: str | Path, **kwargs: Any
) -> None:
    """Save a model and its corrections so that no reader ever meets a part of it unnoticed.

    The corrections come last: until then those of an earlier save do not fit the merged model,
    which loading finds.

    Args:
        model: The merged model, with a ``save_pretrained``.
        corrections: What belongs to it.
        path: The directory; made if it is missing.
        **kwargs: For the merged model's ``save_pretrained``.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:  # FusionBench's program saves in every process
        return
    encoded = _encoded(corrections, _digest(model))
    save_whole(model, path, last={CORRECTIONS_FILE: encoded}, **kwargs)


def _encoded(corrections: Corrections, merged_sha256: str) -> bytes:
    settings = corrections.settings
    tensors = {f"extra.{name}": value for name, value in corrections.extra.items()}
    for index, module in enumerate(corrections.modules.values()):
        for name, value in module.state_dict().items():
            tensors[f"tasks.{index}.{name}"] = value
    described = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "method": next(name for name, kind in _SETTINGS.items() if type(settings) is kind),
        "settings": settings.as_dict(),
        "architecture": corrections.architecture,
        "tasks": list(corrections.modules),
        "merged_sha256": merged_sha256,
    }
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return save(stored, metadata={"corrections": json.dumps(described)})


def read_corrections(path: str | Path, architectures: Sequence[str]) -> Corrections:
    """Read the corrections of a saved model.

    Args:
        path: The directory.
        architectures: Names of the architectures that there are wrappers for.

    Raises:
        CorrectionsFileError: There are none, or they are damaged or of an unknown kind.
    """
    file = Path(path) / CORRECTIONS_FILE
    described, tensors = _read(file)
    settings_type = _SETTINGS.get(described["method"])
    if described["architecture"] not in architectures or settings_type is None:
        raise CorrectionsFileError(
            f"{file} is of method {described['method']!r} on {described['architecture']!r}, which "
            "this featcal-fusionbench does not know: load it with the release that wrote it."
        )
    settings = settings_type(**described["settings"])
    modules = {}
    for index, task in enumerate(described["tasks"]):
        state = _below(f"tasks.{index}.", tensors)
        module = make_module(settings, state["down.weight"].shape[1])
        module.load_state_dict(state)
        modules[task] = module
    return Corrections(
        described["architecture"],
        settings,
        modules,
        _below("extra.", tensors),
        described["merged_sha256"],
    )


def require_same_model(model: nn.Module, corrections: Corrections, path: str | Path) -> None:
    """Compare a merged model with the one that its corrections were trained for.

    Raises:
        CorrectionsFileError: It is another one.
    """
    if _digest(model) != corrections.merged_sha256:
        raise CorrectionsFileError(
            f"the model in {path} is not the one that {CORRECTIONS_FILE} was trained for: it was "
            "replaced, or saving was interrupted. Save both again."
        )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


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
