"""The base of all errors, and those of the FusionBench side.

Each message names the thing at fault and the remedy.
"""

__all__ = [
    "CalibrationDataError",
    "CalibrationError",
    "MergerError",
    "ModelPoolError",
    "OutputError",
    "SettingsError",
    "TaskPoolError",
    "UnsavedModelError",
]


class CalibrationError(Exception):
    """Base class of everything that is raised on purpose."""


class SettingsError(CalibrationError, ValueError):
    """A setting has a value outside its range; the message names it and the remedy."""


class ModelPoolError(CalibrationError):
    """The model pool lacks a model, or its models do not fit together."""


class CalibrationDataError(CalibrationError):
    """Calibration inputs are missing or cannot be read."""


class MergerError(CalibrationError):
    """The upstream merger does not exist, or returned something that is not one model."""


class OutputError(CalibrationError):
    """The output directory cannot be written to."""


class UnsavedModelError(OutputError, OSError):
    """The result could not be saved where it was asked for; the message says where it is."""


class TaskPoolError(CalibrationError):
    """The task pool would evaluate with parts of another model."""
