"""The error of the baselines."""

from __future__ import annotations

__all__ = ["SurgerySettingsError"]


class SurgerySettingsError(ValueError):
    """A setting has a value outside its range; the message names it and the remedy."""
