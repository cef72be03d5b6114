"""Merged models with one correction of the final representation per task.

A wrapper per architecture says where the final representation is, and corrects it there while the
model is evaluated. To add one, write it and list it in ``kinds.KINDS``.
"""

from .base import CorrectedModel, UnknownTaskError
from .clip_vision import CorrectedClipVision
from .kinds import KINDS, wrap
from .loading import load_corrected_model
from .saving import CorrectionsFileError, is_corrected_checkpoint
from .t5 import CorrectedT5

__all__ = [
    "KINDS",
    "CorrectedClipVision",
    "CorrectedModel",
    "CorrectedT5",
    "CorrectionsFileError",
    "UnknownTaskError",
    "is_corrected_checkpoint",
    "load_corrected_model",
    "wrap",
]
