"""The methods that FeatCal is compared with: small modules after the final representation.

Representation Surgery (Yang et al., ICML 2024, arXiv 2402.02705) and ProbSurgery (ICML 2025) keep
the merged model as it is and train one module per task, without labels, so that the corrected
final representation comes near the task expert's. The task must be known at inference.

Plain torch: knows neither FusionBench nor any architecture.
"""

from .modules import ProbSurgeryModule, SurgeryModule
from .results import SurgeryResult, TaskSurgery
from .settings import (
    ProbSurgerySettings,
    RepresentationSurgerySettings,
    SurgerySettings,
    TrainOn,
)
from .training import Representations, train_module

__all__ = [
    "ProbSurgeryModule",
    "ProbSurgerySettings",
    "RepresentationSurgerySettings",
    "Representations",
    "SurgeryModule",
    "SurgeryResult",
    "SurgerySettings",
    "TaskSurgery",
    "TrainOn",
    "train_module",
]
