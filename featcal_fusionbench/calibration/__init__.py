"""The calibration engine: knows torch, and neither FusionBench nor any architecture."""

from ..errors import CalibrationError, SettingsError
from .clock import PhaseClock
from .errors import (
    ForwardError,
    NonFiniteError,
    PlanError,
    SingularSystemError,
    WeightsError,
)
from .expert_path import Weights
from .loop import calibrate
from .observer import Observer, SilentObserver
from .plan import Plan, build_plan
from .releasable import Releasable
from .results import (
    BlockDrift,
    CalibrationResult,
    ModuleResult,
    PhaseCost,
    SkippedModule,
    TaskDrift,
)
from .rows import RowRule, RowRules, uniform_rows
from .settings import CalibrationSettings

__all__ = [
    "BlockDrift",
    "CalibrationError",
    "CalibrationResult",
    "CalibrationSettings",
    "ForwardError",
    "ModuleResult",
    "NonFiniteError",
    "Observer",
    "PhaseClock",
    "PhaseCost",
    "Plan",
    "PlanError",
    "Releasable",
    "RowRule",
    "RowRules",
    "SettingsError",
    "SilentObserver",
    "SingularSystemError",
    "SkippedModule",
    "TaskDrift",
    "Weights",
    "WeightsError",
    "build_plan",
    "calibrate",
    "uniform_rows",
]
