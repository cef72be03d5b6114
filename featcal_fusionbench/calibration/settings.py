"""The settings of a calibration: one frozen dataclass, validated when it is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..errors import SettingsError
from ..settings import SampleSettings

__all__ = [
    "CalibrationSettings",
    "FailurePolicy",
    "Granularity",
    "HoldActivations",
    "StatisticsDtype",
]

Granularity = Literal["module", "block"]
HoldActivations = Literal["auto", "always", "never"]
StatisticsDtype = Literal["float32", "float64"]
FailurePolicy = Literal["raise", "keep"]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(SampleSettings):
    """Everything that determines a calibration, given models and data.

    The names are those of ``config/method/featcal.yaml``; the symbols those of arXiv 2605.13030.

    Attributes:
        granularity: ``module`` solves each module before the next one of its block is reached;
            ``block`` takes all statistics of a block before any of its modules changes (the
            semantics of the authors' released demo).
        ridge_lambda: Ridge λ, pulls each weight towards its anchor. Used as it is, ≥ 0.
        anchor_rho: Anchor ρ: the anchor is ρ·merged + (1−ρ)·base.
        target_alpha: Target interpolation α in [0, 1]: the target features are
            α·expert + (1−α)·merged.
        epsilon: ε > 0 that keeps divisions and factorisations away from zero.
        calibrate_bias: Whether biases are calibrated after their weights.
        calibrate_norm: Whether the affine parameters of norms are calibrated.
        include: Regular expressions searched in module names; empty means every supported module
            inside a block.
        exclude: Regular expressions searched in module names; what matches keeps merged values.
        statistics_dtype: Precision of sums and solves.
        hold_activations: Whether forwards that wait inside a block hold what is alive there.
            ``never``: they wait at the entries of blocks and run a block again for each of its
            modules, which takes less memory, more time and gives the same result. ``auto``: as
            long as the estimate fits into the free memory. Granularity ``block`` never holds.
        on_failure: ``raise`` stops at a module that cannot be solved; ``keep`` leaves it its merged
            values and counts it in the report.

    Raises:
        SettingsError: A value is outside its range; the message names the setting and the remedy.
    """

    granularity: Granularity = "module"
    ridge_lambda: float = 0.05
    anchor_rho: float = 2.0
    target_alpha: float = 0.3
    epsilon: float = 1e-8
    calibrate_bias: bool = True
    calibrate_norm: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    statistics_dtype: StatisticsDtype = "float32"
    hold_activations: HoldActivations = "auto"
    on_failure: FailurePolicy = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("granularity", get_args(Granularity))
        self._require_choice("statistics_dtype", get_args(StatisticsDtype))
        self._require_choice("hold_activations", get_args(HoldActivations))
        self._require_choice("on_failure", get_args(FailurePolicy))
        self._require_number("ridge_lambda", low=0.0)
        self._require_number("anchor_rho")
        self._require_number("target_alpha", low=0.0, high=1.0)
        self._require_number("epsilon", low=0.0)
        if self.epsilon == 0:
            raise SettingsError(
                "epsilon=0 would divide by zero: set a small positive value, e.g. 1e-8."
            )
        for name in ("calibrate_bias", "calibrate_norm"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name}={getattr(self, name)!r} must be true or false.")
        for name in ("include", "exclude"):
            object.__setattr__(self, name, self._patterns(name, getattr(self, name)))

    @staticmethod
    def _patterns(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
        if value is None:
            return ()
        patterns = (value,) if isinstance(value, str) else tuple(value)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise SettingsError(
                    f"{name}: {pattern!r} is not a regular expression ({error})."
                ) from error
        return patterns

    @property
    def torch_statistics_dtype(self) -> torch.dtype:
        """The precision of sums and solves as a torch dtype."""
        return getattr(torch, self.statistics_dtype)

    def forward_precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Entered around forwards of a model in its working precision."""
        if self.forward_dtype != "bfloat16":
            return nullcontext()
        # no cache: it would keep a weight's old value after the weight is solved
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
