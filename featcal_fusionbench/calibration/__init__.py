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
from .plan import Plan, RowRule, RowRules, build_plan, uniform_rows
from .results import (
    BlockDrift,
    CalibrationResult,
    ModuleResult,
    PhaseCost,
    SkippedModule,
    TaskDrift,
)
from .settings import CalibrationSettings
from .spent import Spent

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
    "RowRule",
    "RowRules",
    "SettingsError",
    "SilentObserver",
    "SingularSystemError",
    "SkippedModule",
    "Spent",
    "TaskDrift",
    "Weights",
    "WeightsError",
    "build_plan",
    "calibrate",
    "uniform_rows",
]
