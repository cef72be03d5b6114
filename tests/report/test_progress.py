"""The display of progress."""

from __future__ import annotations

import errno
import io
import os
from types import SimpleNamespace
from typing import Any

import pytest
from reports import LAYERS, module
from rich.console import Console
from rich.progress import TimeRemainingColumn

from featcal_fusionbench.report import RichProgress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class BrokenFile(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def log_file(file: io.StringIO | None = None) -> Console:
    return Console(file=file or io.StringIO(), width=80, _environ={"TERM": "xterm"})


def terminal(term: str = "xterm-256color") -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": term})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def step(progress: RichProgress, block: int, name: str = "mlp.fc1", task: str = "svhn") -> None:
    progress.on_step(f"{LAYERS}.{block}", f"{LAYERS}.{block}.{name}", task, 10.0)


def test_log_file_gets_a_line_per_block_and_per_interval() -> None:
    console, clock = log_file(), Clock()
    with RichProgress(console, interval=15, clock=clock) as progress:
        clock.now = 100.0  # loading is not part of the estimate
        progress.on_start(100.0)
        for seconds, block in ((10, 0), (11, 0), (12, 0), (26, 0), (27, 0), (30, 1)):
            clock.now = 100.0 + seconds
            step(progress, block)
        progress.on_module(module("a"))
    text = written(console)
    assert text.splitlines() == [
        "featcal: 10%, 10.0 s elapsed, 0:01:30 left, svhn: layers.0 mlp.fc1",
        "featcal: 40%, 26.0 s elapsed, 39.0 s left, svhn: layers.0 mlp.fc1",
        "featcal: 60%, 30.0 s elapsed, 20.0 s left, svhn: layers.1 mlp.fc1",
        "featcal: done, 1 modules in 30.0 s",
    ]


@pytest.mark.parametrize(("done", "said"), [(0, False), (0.9, False), (1.0, True), (50, True)])
def test_time_left_is_told_only_once_there_is_something_to_judge_by(
    done: float, said: bool
) -> None:
    """The first of a thousand steps would tell of days."""
    console, clock = log_file(), Clock()
    with RichProgress(console, clock=clock) as progress:
        progress.on_start(100.0)
        clock.now = 1000.0
        progress.on_step(f"{LAYERS}.0", f"{LAYERS}.0.mlp.fc1", "svhn", done)
    assert (" left," in written(console)) is said
    bar = RichProgress(terminal())._bar
    assert bar is not None
    task: Any = SimpleNamespace(percentage=done, time_remaining=59 * 3600, total=100.0)
    column = bar.columns[-1]
    assert isinstance(column, TimeRemainingColumn)
    assert column.render(task).plain == ("59:00:00" if said else "")


def test_log_lines_are_not_wrapped() -> None:
    console = log_file()
    with RichProgress(console) as progress:
        progress.on_start(100.0)
        step(progress, 0, name="x" * 100)
    assert len(written(console).splitlines()) == 2


def test_step_outside_all_blocks_is_shown() -> None:
    console = log_file()
    with RichProgress(console) as progress:
        progress.on_step("", "visual_projection", "svhn", 0.0)
    assert written(console).startswith("featcal: 0.0 s elapsed, svhn: visual_projection\n")


def test_terminal_gets_a_bar_and_its_cursor_back_after_an_exception() -> None:
    console = terminal()
    with pytest.raises(RuntimeError, match="boom"), RichProgress(console) as progress:
        progress.on_start(20.0)
        step(progress, 3)
        progress.on_module(module("a"))
        raise RuntimeError("boom")
    text = written(console)
    assert "svhn: layers.3 mlp.fc1" in text and " 50%" in text
    assert text.endswith("featcal: stopped by RuntimeError, 1 modules in 0.0 s\n")
    with console.status("free"):  # a second live display is an error while the first one holds on
        pass


def test_dumb_terminal_gets_lines() -> None:
    console = terminal("dumb")
    with RichProgress(console) as progress:
        progress.on_start(20.0)
        step(progress, 3)
    assert written(console).startswith("featcal: 50%")


@pytest.mark.parametrize("make", [log_file, terminal])
def test_other_ranks_are_silent(make: Any) -> None:
    console = make()
    with RichProgress(console, enabled=False) as progress:
        progress.on_start(10.0)
        step(progress, 0)
        progress.on_module(module("a"))
    assert written(console) == ""


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), ValueError("closed"), BrokenPipeError(), KeyError("style")],
    ids=lambda error: type(error).__name__,
)
def test_display_that_fails_does_not_stop_the_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a broken pipe rich points the real standard output at the null device.
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with RichProgress(log_file(BrokenFile(error))) as progress:
        progress.on_start(10.0)
        step(progress, 0)
        progress.on_module(module("a"))
