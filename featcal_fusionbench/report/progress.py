"""Progress of a calibration: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from ..calibration.observer import SilentObserver
from ..calibration.results import ModuleResult
from .text import format_duration, relative_name, split_index

__all__ = ["RichProgress", "survives"]

# Of less, the start of things (caches, kernels) is most of the time: it says nothing of the rest.
_SHARE_TO_JUDGE_BY = 0.01


class RichProgress(SilentObserver):
    """An observer that shows progress.

    Enter it around the loop; leaving it, also by an exception, gives the terminal back as it was.
    A display that fails (a closed pipe, a full disk) falls silent and never stops the run.

    Args:
        console: Where to show progress; standard error by default.
        enabled: False on ranks other than 0: nothing is shown.
        interval: Seconds between two lines of one block where there is no terminal. A new block
            always gets a line.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        enabled: bool = True,
        interval: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._enabled = enabled
        self._interval = interval
        self._clock = clock
        self._modules = 0
        self._total = 0.0
        self._done = 0.0
        self._block: str | None = None
        self._started = self._last_line = clock()
        # A dumb terminal cannot move its cursor; it gets lines, like a file.
        animated = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = _make_bar(self._console) if enabled and animated else None
        if self._bar is not None:
            self._bar.add_task("preparing", total=None)

    def __enter__(self) -> RichProgress:
        if self._bar is not None:
            self._show(self._bar.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            # Not by way of _show: after a display error the cursor must still be given back.
            survives(self._bar.stop)
        outcome = "done" if kind is None else f"stopped by {kind.__name__}"
        elapsed = format_duration(self._clock() - self._started)
        self._print(f"{outcome}, {self._modules} modules in {elapsed}")

    def on_start(self, total_flops: float) -> None:
        """Take the planned arithmetic as the whole of the bar."""
        self._total = total_flops
        self._started = self._last_line = self._clock()
        if bar := self._bar:
            only = bar.task_ids[0]
            self._show(lambda: bar.reset(only, total=total_flops, description="starting"))

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        """Show where the loop is; ``flops`` is this step's share of the total."""
        self._done += flops
        if bar := self._bar:
            only, label = bar.task_ids[0], _label(block, module, task)
            self._show(lambda: bar.update(only, completed=self._done, description=label))
            return
        now = self._clock()
        if block != self._block or now - self._last_line >= self._interval:
            self._last_line = now
            self._print(f"{self._state(now)}, {_label(block, module, task)}")
        self._block = block

    def on_module(self, result: ModuleResult) -> None:
        """Count the module."""
        self._modules += 1

    def _state(self, now: float) -> str:
        elapsed = now - self._started
        state = f"{format_duration(elapsed)} elapsed"
        if self._total <= 0:
            return state
        fraction = min(self._done / self._total, 1.0)
        if fraction >= _SHARE_TO_JUDGE_BY:
            state += f", {format_duration(elapsed / fraction - elapsed)} left"
        return f"{fraction:.0%}, {state}"

    def _print(self, text: str) -> None:
        # soft_wrap: one line in the log is one line of text, however long.
        plain: Any = {"soft_wrap": True, "markup": False, "highlight": False}
        self._show(lambda: self._console.print(f"featcal: {text}", **plain))

    def _show(self, action: Callable[[], object]) -> None:
        self._enabled = self._enabled and survives(action)


def survives(action: Callable[[], object]) -> bool:
    """Whether a piece of display could be shown; a run does not end because it could not."""
    try:
        action()
    except Exception:
        return False
    except SystemExit as error:
        if error.code != 1:  # rich's answer to a broken pipe; others are meant
            raise
        return False
    return True


class _TimeLeft(TimeRemainingColumn):
    """Empty until there is something to judge by."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.percentage >= 100 * _SHARE_TO_JUDGE_BY else Text()


def _make_bar(console: Console) -> Progress:
    label = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=label),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        # Steps of wide modules take long: the speed is that of the last ten minutes.
        _TimeLeft(),
        speed_estimate_period=600,
        refresh_per_second=4,
        console=console,
        expand=True,
    )


def _label(block: str, module: str, task: str) -> str:
    """Task first and names short: the end of the label is cut off on a narrow terminal."""
    prefix, index = split_index(block)
    short = block if index is None else f"{prefix.rpartition('.')[2]}.{index}"
    inside = relative_name(module, block)
    # A stage outside all blocks has no block; a block taken as a whole is its own module.
    places = (short, inside if inside != block else "")
    return f"{task}: {' '.join(filter(None, places))}"
