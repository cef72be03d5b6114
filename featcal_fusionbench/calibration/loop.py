"""The calibration itself: for each stage in forward order, gather, solve, write back, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from . import closed_form
from .clock import PhaseClock
from .errors import NonFiniteError, SingularSystemError
from .expert_path import ExpertPath, Weights, tensor_of
from .host_memory import give_back_freed_memory
from .inputs import Inputs, place_inputs
from .kinds import Group, PlannedModule, Sums
from .kinds.base import BatchFeatures, Solved, System, Tensors
from .observer import Observer, SilentObserver
from .pauses import Stage, expert_pauses, forward_of, merged_pauses
from .plan import Plan
from .results import CalibrationResult, ModuleResult
from .settings import CalibrationSettings
from .suspended import Pause, SuspendedForward

__all__ = ["calibrate"]

OnOutput = Callable[[str, int, Any], None]
"""Receives task, batch index and the calibrated model's output on that batch."""


def calibrate(
    merged: nn.Module,
    base: Weights,
    experts: Mapping[str, Weights],
    data: Mapping[str, Iterable[Inputs]],
    plan: Plan,
    settings: CalibrationSettings,
    *,
    observer: Observer | None = None,
    clock: PhaseClock | None = None,
    on_output: OnOutput | None = None,
) -> CalibrationResult:
    """Calibrate the merged model in place (arXiv 2605.13030).

    On the merged model's device live the merged model, one piece of one expert, the running sums of
    one stage, and for every task and batch the activations that its two paused forwards hold.

    Args:
        merged: The merged model, in evaluation mode; its planned modules are overwritten.
        base: Weights of the base, for the anchor.
        experts: Weights by task.
        data: Batches by task, in the order of ``experts``; each is read once, when it is needed.
        plan: What to calibrate; made from this model with these settings.
        settings: How.
        observer: Is told of progress.
        clock: Adds up the cost of forwards, statistics and solves.
        on_output: If given, all forwards of the merged model are run to their end after the last
            module, and their outputs, which are the calibrated model's, are handed over.

    Returns:
        What was done to each module.

    Raises:
        CalibrationError: With the task, block and module at fault. Modules solved before keep
            their new values.
    """
    if missing := [task for task in experts if task not in data]:
        raise CalibrationError(f"no calibration inputs for {', '.join(missing)}.")
    run = _Run(merged, base, experts, data, plan, settings, observer, clock, on_output)
    return run.calibrate()


class _Run:
    """The state of one calibration: paused forwards, sums of the present stage, results so far."""

    def __init__(
        self,
        merged: nn.Module,
        base: Weights,
        experts: Mapping[str, Weights],
        data: Mapping[str, Iterable[Inputs]],
        plan: Plan,
        settings: CalibrationSettings,
        observer: Observer | None,
        clock: PhaseClock | None,
        on_output: OnOutput | None,
    ) -> None:
        self._merged, self._base, self._experts, self._data = merged, base, experts, data
        self._plan, self._settings = plan, settings
        self._device = next(merged.parameters()).device
        self._dtype = settings.torch_statistics_dtype
        self._observer = observer or SilentObserver()
        self._clock = clock or PhaseClock(self._device)
        self._on_output = on_output
        self._expert_path = ExpertPath(merged, plan.trace)
        self._expert_event = -1
        self._pairs: dict[str, list[_Pair]] = {}
        self._results: list[ModuleResult] = []

    def calibrate(self) -> CalibrationResult:
        """Walk the stages; whatever happens, no hook and no paused forward is left behind."""
        per_task = sum(stage.flops for stage in self._plan.stages) * self._settings.n_samples
        self._observer.on_start(per_task * len(self._experts))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._settings.forward_precision(self._device))
            hooked = self._plan.stages, self._plan.blocks, self._plan.releasable
            stack.enter_context(merged_pauses(self._merged, *hooked))
            stack.enter_context(expert_pauses(self._expert_path.model, *hooked))
            stack.callback(self._close)
            for stage in self._plan.stages:
                self._calibrate_stage(stage)
            if self._on_output is not None:
                self._finish(self._on_output)
        return CalibrationResult(tuple(self._results), self._plan.skipped, self._clock.costs())

    def _calibrate_stage(self, stage: Stage) -> None:
        sums = {
            group.leader.name: group.kind.new_sums(group, self._settings, self._device)
            for group in stage.groups
        }
        for task in self._experts:
            self._gather(stage, task, sums)
        for group in stage.groups:
            self._solve(stage, group, sums.pop(group.leader.name).system())
        if stage.expert_pause is not None:
            self._expert_event = stage.expert_pause.resumed
        self._observer.on_stage_end(stage.name)

    def _statistics_precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, enabled=False)

    def _pairs_of(self, task: str) -> Iterator[_Pair]:
        """The paused forwards of a task; each batch is read when it is first reached."""
        if task in self._pairs:
            yield from self._pairs[task]
            return
        pairs = self._pairs[task] = []
        with self._clock.phase("data"):
            batches = iter(self._data[task])
        while True:
            with self._clock.phase("data"):
                batch = next(batches, None)
            if batch is None:
                break
            pairs.append(self._pair(batch, f"task {task}, batch {len(pairs)}"))
            del batch  # its forwards let it go
            yield pairs[-1]
        if not pairs:
            raise CalibrationError(f"task {task} has no calibration inputs.")

    def _pair(self, batch: Inputs, label: str) -> _Pair:
        released = self._plan.releasable.inputs
        inputs = place_inputs(batch, self._merged)
        of = "the merged model's forward of"
        merged = forward_of(self._merged, inputs, f"{of} {label}", released)
        expert = None
        if any(stage.expert_pause is not None for stage in self._plan.stages):
            expert = forward_of(
                self._expert_path.model, inputs, f"the expert's forward of {label}", released
            )
        kept = {name: value for name, value in inputs.items() if name not in released}
        return _Pair(kept, merged, expert)

    def _gather(self, stage: Stage, task: str, sums: Mapping[str, Sums]) -> None:
        """Bring all forwards of one task to the stage and add up what they hand over."""
        weights = self._experts[task]
        parameters = {m.name: self._expert_parameters(weights, m) for m in stage.modules}
        with self._expert_resident(weights, stage):
            for pair in self._pairs_of(task):
                self._gather_batch(stage, pair, sums, parameters)
        if self._device.type == "cpu":  # elsewhere the forwards' tensors are not on this heap
            give_back_freed_memory()
        with self._clock.phase("statistics"), self._statistics_precision():
            for total in sums.values():
                total.end_task(task, parameters)
        block = "" if stage.block is None else stage.block.name
        flops = stage.flops * self._settings.n_samples
        self._observer.on_step(block, stage.name, task, flops)

    def _gather_batch(
        self,
        stage: Stage,
        pair: _Pair,
        sums: Mapping[str, Sums],
        parameters: Mapping[str, Tensors],
    ) -> None:
        with self._clock.phase("forwards"):
            expert = None
            if stage.expert_pause is not None and pair.expert is not None:
                expert = pair.expert.resume(stage.name)
            merged = pair.merged.resume(stage.name)
        with self._clock.phase("statistics"), self._statistics_precision():
            for group in stage.groups:
                features = self._features(group, pair, merged, expert, parameters)
                sums[group.leader.name].update(features)

    def _features(
        self,
        group: Group,
        pair: _Pair,
        merged: Pause,
        expert: Pause | None,
        parameters: Mapping[str, Tensors],
    ) -> BatchFeatures:
        name = group.leader.name
        module, seen = self._merged.get_submodule(name), merged.capture_of(name)
        rows = None
        if group.rule is not None:
            rows = group.rule(group.kind.row_view(module, seen.input), pair.inputs)
        needed = expert.capture_of(name) if expert is not None and group.needs_expert else None
        return BatchFeatures(module, seen, needed, parameters, rows)

    def _expert_resident(self, weights: Weights, stage: Stage) -> AbstractContextManager[Any]:
        if stage.expert_pause is None:
            return nullcontext()
        return self._expert_path.resident(weights, self._expert_event, stage.expert_pause.reached)

    def _expert_parameters(self, weights: Weights, module: PlannedModule) -> Tensors:
        return {
            leaf: weights[f"{module.name}.{leaf}"].detach().to(self._device, self._dtype)
            for leaf in module.leaves
        }

    def _solve(self, stage: Stage, group: Group, system: System) -> None:
        """Solve one group, write the results into the merged model and record them."""
        with self._clock.phase("solves"), self._statistics_precision():
            results = [self._solve_module(stage, module, system) for module in group.modules]
        for result in results:
            self._results.append(result)
            self._observer.on_module(result)

    def _solve_module(self, stage: Stage, module: PlannedModule, system: System) -> ModuleResult:
        kept = ModuleResult(
            name=module.name,
            kind=module.kind.name,
            block=None if stage.block is None else stage.block.index,
            shape=module.shape,
            rows=system.rows,
            condition=None,
            residual=None,
            damping=0.0,
            relative_change=0.0,
            seconds=0.0,
            calibrated=False,
            note="no row of weight above zero reached it",
        )
        if system.rows == 0:
            return kept
        started, ridge_lambda = time.perf_counter(), self._settings.ridge_lambda
        try:
            solved = system.solve(module, ridge_lambda, partial(self._anchor, module))
            change = self._write(module, solved)
        except (NonFiniteError, SingularSystemError) as error:
            if self._settings.on_failure == "raise":
                raise
            return replace(kept, note=str(error))
        return replace(
            kept,
            condition=solved.condition,
            residual=solved.residual,
            damping=solved.damping,
            relative_change=change,
            seconds=time.perf_counter() - started,
            calibrated=True,
            note="" if solved.damping == 0 else "damped: raise ridge_lambda or n_samples",
            ridge_lambda=ridge_lambda,
        )

    def _anchor(self, module: PlannedModule, leaf: str) -> Tensor:
        name = f"{module.name}.{leaf}"
        merged = tensor_of(self._merged, name).to(self._dtype)
        base = self._base[name].detach().to(self._device, self._dtype)
        return closed_form.anchor(merged, base, self._settings.anchor_rho)

    def _write(self, module: PlannedModule, solved: Solved) -> float:
        """Overwrite all parameters and buffers or none; return the first one's relative change."""
        values = {f"{module.name}.{leaf}": value for leaf, value in solved.values.items()}
        for name, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError(
                    f"{name}: the solution holds NaN or Inf; check the experts' weights."
                )
        name, value = next(iter(values.items()))
        before = tensor_of(self._merged, name).to(self._dtype)
        change = (value - before).norm() / before.norm().clamp_min(self._settings.epsilon)
        relative = float(change)
        for name, value in values.items():
            tensor_of(self._merged, name).copy_(value)
        return relative

    def _finish(self, on_output: OnOutput) -> None:
        for task, pairs in self._pairs.items():
            for index, pair in enumerate(pairs):
                with self._clock.phase("forwards"):
                    output = pair.merged.finish()
                on_output(task, index, output)

    def _close(self) -> None:
        for pair in chain.from_iterable(self._pairs.values()):
            pair.merged.close()
            if pair.expert is not None:
                pair.expert.close()


@dataclass(frozen=True)
class _Pair:
    """The paused forwards of one batch, and what the row rules may read of it."""

    inputs: Inputs
    merged: SuspendedForward
    expert: SuspendedForward | None
