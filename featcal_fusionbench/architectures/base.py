"""What an architecture has to say."""

from __future__ import annotations

from typing import Protocol

from fusion_bench import BaseModelPool
from torch import nn

from ..calibration import CalibrationSettings, RowRules
from ..data import PrepareInputs

__all__ = ["Architecture"]


class Architecture(Protocol):
    """The part of a calibration that depends on the architecture."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is of this architecture."""
        ...

    def row_rules(self, settings: CalibrationSettings) -> RowRules:
        """Row weights by module."""
        ...

    def load_processor(self, pool: BaseModelPool) -> object:
        """What turns raw inputs into tensors; saved beside the calibrated model if it can be."""
        ...

    def prepare_inputs(self, processor: object) -> PrepareInputs:
        """How items of a calibration data set become inputs of a forward, on the host."""
        ...
