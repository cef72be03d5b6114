"""The report of a merger alone, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SettingsError
from ..report import RunReport

__all__ = ["MergeReport", "MergeSettings"]


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """The merger alone has few settings besides its own, which stand under ``merger``.

    Attributes:
        seed: Seed of a merger that draws random numbers, ≥ 0.

    Raises:
        SettingsError: A value is outside its range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise SettingsError(f"seed={self.seed!r} must be a whole number of at least 0.")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        return {"seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class MergeReport(RunReport):
    """A run of an upstream merger alone."""

    method: ClassVar[str] = "merge_only"

    settings: MergeSettings = MergeSettings()
