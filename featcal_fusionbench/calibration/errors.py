"""The errors of the engine. Each message names the thing at fault and the remedy."""

from __future__ import annotations

from ..errors import CalibrationError

__all__ = [
    "ForwardError",
    "NonFiniteError",
    "PlanError",
    "SingularSystemError",
    "WeightsError",
]


class PlanError(CalibrationError):
    """Nothing matches what was asked for, or the model's forward cannot be traced."""


class WeightsError(CalibrationError):
    """The weights of the base or of an expert are missing, of another shape, or not finite."""


class ForwardError(CalibrationError):
    """A forward of the merged model or of an expert failed while it was being calibrated."""


class NonFiniteError(CalibrationError):
    """NaN or Inf appeared in features, statistics or a solution."""


class SingularSystemError(CalibrationError):
    """A linear system has no unique solution at the given ridge."""
