"""The settings of the baselines: one frozen dataclass each, validated when it is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from .errors import SurgerySettingsError

__all__ = [
    "ProbSurgerySettings",
    "RepresentationSurgerySettings",
    "SurgerySettings",
    "TrainOn",
]

TrainOn = Literal["train", "test"]
ForwardDtype = Literal["float32", "float64", "bfloat16"]
DecoderInputs = Literal["expert", "labels"]


@dataclass(frozen=True, kw_only=True)
class SurgerySettings:
    """What both methods share. The names are those of their files in ``config/method``.

    Attributes:
        hidden_width: Width of the module between its two layers, ≥ 1.
        learning_rate: Of Adam (betas 0.9 and 0.999, no weight decay), > 0.
        train_batch_size: Inputs per step, ≥ 1.
        train_on: ``train``: the inputs that FeatCal would calibrate on; ``test``: inputs of the
            test split, without labels, as in the papers.
        n_samples: Training inputs per task, n ≥ 1.
        n_heldout: Further inputs per task on which the loss is measured, never trained on.
        batch_size: Inputs per forward of the models. Does not change what is computed.
        seed: Of the samplers, the initialisation, the order of batches and the noise, each with a
            generator of its own per task.
        forward_dtype: Precision of the models' forwards; modules are trained in float32.
        decoder_inputs: What the decoder of an encoder-decoder reads: ``expert``, the answer that
            the task's expert gives greedily, or ``labels``, the data set's.
        decoder_tokens: Tokens that an expert generates at most, ≥ 1.

    Raises:
        SurgerySettingsError: A value is outside its range.
    """

    hidden_width: int
    learning_rate: float = 1e-3
    train_batch_size: int = 16
    train_on: TrainOn = "train"
    n_samples: int = 256
    n_heldout: int = 16
    batch_size: int = 32
    seed: int = 0
    forward_dtype: ForwardDtype = "float32"
    decoder_inputs: DecoderInputs = "expert"
    decoder_tokens: int = 10

    def __post_init__(self) -> None:
        for name, choices in (
            ("train_on", get_args(TrainOn)),
            ("forward_dtype", get_args(ForwardDtype)),
            ("decoder_inputs", get_args(DecoderInputs)),
        ):
            if getattr(self, name) not in choices:
                raise SurgerySettingsError(
                    f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(choices)}."
                )
        for name, low in (
            ("hidden_width", 1),
            ("train_batch_size", 1),
            ("n_samples", 1),
            ("n_heldout", 0),
            ("batch_size", 1),
            ("seed", 0),
            ("decoder_tokens", 1),
        ):
            self._require_count(name, low)
        self._require_number("learning_rate")
        if self.learning_rate == 0:
            raise SurgerySettingsError("learning_rate=0 would train nothing: set it above zero.")

    @property
    def steps_per_task(self) -> int:
        """Steps of the optimiser that every task's module takes."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values, in order of declaration."""
        return asdict(self)

    def _require_count(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SurgerySettingsError(
                f"{name}={value!r} must be a whole number of at least {low}."
            )

    def _require_number(self, name: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise SurgerySettingsError(f"{name}={value!r} must be a number of at least 0.")
        object.__setattr__(self, name, float(value))


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
        self._require_number("kl_weight")

    @property
    def steps_per_task(self) -> int:
        """Steps of the optimiser that every task's module takes."""
        return self.rounds * self.batches_per_round
