"""Pieces of FusionBench's command line, for the embedded benchmarks and for tables.

Nothing heavy is imported: neither torch nor FusionBench.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "BASE_METHOD",
    "environment_variables",
    "evaluate_only",
    "override",
    "settings_overrides",
    "shell_command",
    "take_expert",
]

BASE_METHOD = ("method=merge_only", "method@method.merger=dummy")
"""Overrides by which the base is evaluated: FusionBench's dummy returns it as it is."""

_PLAIN = re.compile(r"[\w./:@+\-]+")


def take_expert(expert: str) -> tuple[str, ...]:
    """Overrides by which ``merge_only`` returns an expert of the pool, however it is loaded."""
    return "method=merge_only", f"+modelpool.models._merged_=${{modelpool.models.{expert}}}"


def evaluate_only(tasks: Collection[str], taskpool: Mapping[str, Any]) -> list[str]:
    """Overrides that let a task pool evaluate some of its tasks.

    Args:
        tasks: The tasks to keep.
        taskpool: The task pool's configuration: with ``test_datasets`` by task, or, as
            FusionBench's older ones have it, with a list of ``tasks``.
    """
    if "test_datasets" in taskpool:
        return [
            f"~taskpool.test_datasets.{task}"
            for task in taskpool["test_datasets"]
            if task not in tasks
        ]
    kept = [entry for entry in taskpool["tasks"] if entry["name"] in tasks]
    return [] if len(kept) == len(taskpool["tasks"]) else [override("taskpool.tasks", kept)]


def override(key: str, value: Any) -> str:
    """One Hydra override, quoted as Hydra's grammar needs it.

    Args:
        key: Its key, with ``+`` or ``~`` before it where that is meant.
        value: A scalar, a list or a mapping of such.
    """
    return f"{key}={_quoted(value)}"


def settings_overrides(prefix: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Overrides that set what lies below a key."""
    for name, value in settings.items():
        yield override(f"{prefix}.{name}", value)


def shell_command(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """FusionBench's command as a shell takes it.

    Args:
        arguments: Its arguments.
        variables: Environment variables that it needs.
    """
    before = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*before, shlex.join(["fusion_bench", *arguments])])


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, such as those by which pools find a build."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _quoted(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(_quoted, value)) + "]"
    text = str(value)
    if text.startswith("${") or (
        _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false")
    ):
        return text
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
