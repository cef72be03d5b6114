"""Tasks and experts as FusionBench's composed pools name them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from .command_line import evaluate_only
from .compose import plain
from .errors import ExperimentError

__all__ = ["Pools"]


@dataclass(frozen=True)
class Pools:
    """The pools of a table.

    Attributes:
        tasks: All tasks of the task pool in order, as its report names them.
        experts: Name of each task's expert in the model pool.
        modelpool: The model pool's configuration.
        taskpool: The task pool's configuration.
    """

    tasks: tuple[str, ...]
    experts: Mapping[str, str]
    modelpool: Mapping[str, Any]
    taskpool: Mapping[str, Any]

    @classmethod
    def of(cls, config: DictConfig, expert: str) -> Pools:
        """The pools of a composed configuration.

        Args:
            config: The configuration.
            expert: Name of a task's expert in the model pool, with ``{task}`` for the task.

        Raises:
            ExperimentError: The pools name no tasks, or a task has no expert.
        """
        # Not resolved: what the pools name may depend on the machine, the tasks do not.
        modelpool, taskpool = (
            plain(config[key], resolve=False) for key in ("modelpool", "taskpool")
        )
        if "test_datasets" in taskpool:
            tasks = tuple(taskpool["test_datasets"])
        elif "tasks" in taskpool:
            tasks = tuple(entry["name"] for entry in taskpool["tasks"])
        else:
            raise ExperimentError(
                "the task pool has neither test_datasets nor tasks: a table needs one that has."
            )
        experts = {task: expert.format(task=task) for task in tasks}
        models = modelpool.get("models") or {}
        if lacking := [task for task, name in experts.items() if name not in models]:
            raise ExperimentError(
                f"the model pool has no expert for {', '.join(lacking)}; it has "
                f"{', '.join(map(str, models))}. `expert` in the table's file says how they are "
                "called."
            )
        return cls(tasks, experts, modelpool, taskpool)

    def restricted_to(self, tasks: Collection[str]) -> list[str]:
        """Overrides that leave some of the tasks: their experts, their data, their evaluation."""
        if set(tasks) >= set(self.tasks):
            return []
        gone = [name for task, name in self.experts.items() if task not in tasks]
        return [*self._without(gone), *evaluate_only(tasks, self.taskpool)]

    def _without(self, experts: Collection[str]) -> Iterator[str]:
        for group in ("models", "train_datasets", "val_datasets", "test_datasets"):
            for name in experts:
                if name in (self.modelpool.get(group) or {}):
                    yield f"~modelpool.{group}.{name}"
