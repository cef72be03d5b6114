"""The settings of the baselines: one frozen dataclass each, validated when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import SettingsError
from ..settings import SampleSettings

__all__ = [
    "ProbSurgerySettings",
    "RepresentationSurgerySettings",
    "SurgerySettings",
    "TrainOn",
]

TrainOn = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class SurgerySettings(SampleSettings):
    """What both methods share. The names are those of their files in ``config/method``.

    The seed is also that of the initialisation, of the order of batches and of the noise, each with
    a generator of its own per task. Modules are trained in float32, whatever ``forward_dtype`` is.

    Attributes:
        hidden_width: Width of the module between its two layers, ≥ 1.
        learning_rate: Of Adam (betas 0.9 and 0.999, no weight decay), > 0.
        train_batch_size: Inputs per step, ≥ 1.
        train_on: ``train``: the inputs that FeatCal would calibrate on; ``test``: inputs of the
            test split, without labels, as in the papers.

    Raises:
        SettingsError: A value is outside its range.
    """

    hidden_width: int
    learning_rate: float = 1e-3
    train_batch_size: int = 16
    train_on: TrainOn = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("train_on", get_args(TrainOn))
        self._require_count("hidden_width", 1)
        self._require_count("train_batch_size", 1)
        self._require_number("learning_rate", low=0.0)
        if self.learning_rate == 0:
            raise SettingsError("learning_rate=0 would train nothing: set it above zero.")

    @property
    def steps_per_task(self) -> int:
        """Steps of the optimiser that every task's module takes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RepresentationSurgerySettings(SurgerySettings):
    """Settings of Representation Surgery; the defaults are its authors'.

    Attributes:
        hidden_width: Rank of the correction.
        steps: Steps of the optimiser per task.
    """

    hidden_width: int = 16
    steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_count("steps", 1)

    @property
    def steps_per_task(self) -> int:
        """Steps of the optimiser that every task's module takes."""
        return self.steps


@dataclass(frozen=True, kw_only=True)
class ProbSurgerySettings(SurgerySettings):
    """Settings of ProbSurgery; the defaults are its authors'.

    Attributes:
        hidden_width: Width between the first layer and the two heads.
        rounds: Times that all tasks are gone through.
        batches_per_round: Steps per task and round.
        kl_weight: Weight of the divergence from N(0, I) in the loss, ≥ 0.
    """

    hidden_width: int = 128
    rounds: int = 5
    batches_per_round: int = 100
    kl_weight: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_count("rounds", 1)
        self._require_count("batches_per_round", 1)
        self._require_number("kl_weight", low=0.0)

    @property
    def steps_per_task(self) -> int:
        """Steps of the optimiser that every task's module takes."""
        return self.rounds * self.batches_per_round
