"""Kinds of modules that can be calibrated, one file each; to add one, add it to the list below."""

from __future__ import annotations

from torch import nn

from .base import Group, Kind, PlannedModule, Sums
from .linear import Linear
from .norm import LayerNorm, RmsNorm

__all__ = ["KINDS", "Group", "Kind", "PlannedModule", "Sums", "kind_of"]

KINDS: tuple[Kind, ...] = (Linear(), LayerNorm(), RmsNorm())


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module; None where no closed form is known."""
    return next((kind for kind in KINDS if kind.recognises(module)), None)
