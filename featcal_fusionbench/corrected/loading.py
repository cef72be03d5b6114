"""Loading a saved model with its corrections, whatever its architecture."""

from __future__ import annotations

from pathlib import Path

from .base import CorrectedModel
from .kinds import KINDS
from .saving import read_corrections, require_same_model

__all__ = ["load_corrected_model"]


def load_corrected_model(path: str | Path) -> CorrectedModel:
    """Load a model that was saved with its corrections.

    Args:
        path: The directory, ``merged_model_save_path`` of the run that made it.

    Raises:
        CorrectionsFileError: It is none, or damaged, or its parts do not belong together.
    """
    kinds = {kind.architecture: kind for kind in KINDS}
    corrections = read_corrections(path, list(kinds))
    model = kinds[corrections.architecture].from_saved(str(path), corrections.extra)
    require_same_model(model.model, corrections, path)
    model.set_corrections(corrections.modules, corrections.settings)
    return model
