"""How the loop tells the outside what it is doing, without knowing who listens."""

from __future__ import annotations

from typing import Protocol

from .results import ModuleResult

__all__ = ["Observer", "SilentObserver"]


class Observer(Protocol):
    """Receives the loop's progress; every call returns quickly and raises nothing."""

    def on_start(self, total_flops: float) -> None:
        """The loop begins; ``total_flops`` is the planned arithmetic over all tasks."""
        ...

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        """One task's statistics of one stage are in: a share of ``flops`` of the total."""
        ...

    def on_module(self, result: ModuleResult) -> None:
        """One module has its final values."""
        ...

    def on_stage_end(self, stage: str) -> None:
        """All modules of one stage, named after its first or its block, have their final values."""
        ...


class SilentObserver:
    """An observer that ignores everything; also a base for those that want some of it."""

    def on_start(self, total_flops: float) -> None:
        return None

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        return None

    def on_module(self, result: ModuleResult) -> None:
        return None

    def on_stage_end(self, stage: str) -> None:
        return None
