"""The report of a merger alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..report import RunReport
from ..settings import MethodSettings

__all__ = ["MergeReport"]


@dataclass(frozen=True, kw_only=True)
class MergeReport(RunReport):
    """A run of an upstream merger alone, whose own settings stand under ``merger``."""

    method: ClassVar[str] = "merge_only"

    settings: MethodSettings = MethodSettings()
