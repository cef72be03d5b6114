"""What all settings share: how values are checked, seeds, and the inputs that are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from .errors import SettingsError

__all__ = ["ForwardDtype", "MethodSettings", "SampleSettings", "Settings"]

ForwardDtype = Literal["float32", "float64", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values by name that are checked when they are made; subclasses name them.

    Raises:
        SettingsError: A value is outside its range; the message names the setting and the remedy.
    """

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values, in order of declaration."""
        values = asdict(self)
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    def _require_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise SettingsError(f"{name}={value!r} is unknown: use one of {', '.join(choices)}.")

    def _require_count(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SettingsError(f"{name}={value!r} must be a whole number of at least {low}.")

    def _require_number(self, name: str, low: float = -math.inf, high: float = math.inf) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            if high < math.inf:
                bounds = f"in [{low:g}, {high:g}]"
            elif low > -math.inf:
                bounds = f"of at least {low:g}"
            else:
                bounds = "that is finite"
            raise SettingsError(f"{name}={value!r} must be a number {bounds}.")
        object.__setattr__(self, name, float(value))


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """What every method has.

    Attributes:
        seed: Seed of what the method draws, and of a merger that draws where the program has no
            seed; ≥ 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("seed", 0)


@dataclass(frozen=True, kw_only=True)
class SampleSettings(MethodSettings):
    """Which inputs a method draws and how models read them.

    Methods that are compared with each other draw the same inputs by the same settings.

    Attributes:
        n_samples: Calibration or training inputs per task, n ≥ 1.
        n_heldout: Further inputs per task to measure on, never calibrated or trained on; 0 measures
            nothing.
        batch_size: Inputs per forward of the models. Does not change what is computed.
        forward_dtype: Precision of the models' forwards; ``bfloat16`` is faster and less exact.
        input_column: The column of the data sets that holds the images or texts: one name for all
            tasks, or names by task. None, and tasks that are not named: found among the known ones.
    """

    n_samples: int = 256
    n_heldout: int = 16
    batch_size: int = 32
    forward_dtype: ForwardDtype = "float32"
    # not part of the hash, which a dict has none of
    input_column: str | dict[str, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_choice("forward_dtype", get_args(ForwardDtype))
        self._require_count("n_samples", 1)
        self._require_count("n_heldout", 0)
        self._require_count("batch_size", 1)
        columns = self.input_column
        if isinstance(columns, Mapping):  # also one of OmegaConf's, which is not JSON-ready
            columns = dict(columns)
            object.__setattr__(self, "input_column", columns)
        names = [*columns, *columns.values()] if isinstance(columns, dict) else [columns]
        if columns is not None and not all(isinstance(name, str) and name for name in names):
            raise SettingsError(
                f"input_column={columns!r} must be the name of a column, or names of columns by "
                "task, e.g. {mnist: img}."
            )

    def column_of(self, task: str) -> str | None:
        """The column that holds a task's inputs; None: it is to be found."""
        columns = self.input_column
        return columns.get(task) if isinstance(columns, dict) else columns
