"""The calibration itself: for each stage in forward order, gather, solve, write back, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from . import closed_form
from .clock import PhaseClock
from .errors import NonFiniteError, SingularSystemError
from .expert_path import ExpertPath, Weights
from .host_memory import give_back_freed_memory
from .inputs import Inputs, place_inputs
from .observer import Observer, SilentObserver
from .plan import Group, Plan, PlannedModule, Stage
from .results import CalibrationResult, ModuleResult
from .settings import CalibrationSettings
from .statistics import ExpertParameters, LinearSums, NormSums
from .stops import expert_stops, forward_of, merged_stops
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
            stack.enter_context(merged_stops(self._merged, self._plan))
            stack.enter_context(expert_stops(self._expert_path.model, self._plan))
            stack.callback(self._close)
            for stage in self._plan.stages:
                sums = {group.leader.name: self._new_sums(group) for group in stage.groups}
                for task in self._experts:
                    self._gather(stage, task, sums)
                for group in stage.groups:
                    self._solve(group, sums.pop(group.leader.name), stage)
                if stage.expert_stop is not None:
                    self._expert_event = stage.expert_stop.resumed
            if self._on_output is not None:
                self._finish(self._on_output)
        return CalibrationResult(tuple(self._results), self._plan.skipped, self._clock.costs())

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
        spent = self._plan.spent.inputs
        inputs = place_inputs(batch, self._merged)
        merged = forward_of(self._merged, inputs, f"the merged model's forward of {label}", spent)
        expert = None
        if any(stage.expert_stop is not None for stage in self._plan.stages):
            expert = forward_of(
                self._expert_path.model, inputs, f"the expert's forward of {label}", spent
            )
        kept = {name: value for name, value in inputs.items() if name not in spent}
        return _Pair(kept, merged, expert)

    def _new_sums(self, group: Group) -> LinearSums | NormSums:
        if group.is_norm:
            return NormSums(group, dtype=self._dtype, device=self._device)
        settings = self._settings
        return LinearSums(
            group,
            alpha=settings.target_alpha,
            epsilon=settings.epsilon,
            dtype=self._dtype,
            device=self._device,
        )

    def _gather(self, stage: Stage, task: str, sums: Mapping[str, LinearSums | NormSums]) -> None:
        """Bring all forwards of one task to the stage and add up what they hand over."""
        weights = self._experts[task]
        parameters = {m.name: self._expert_parameters(weights, m) for m in stage.modules}
        with self._expert_resident(weights, stage):
            for pair in self._pairs_of(task):
                self._gather_batch(stage, pair, sums, parameters)
        if self._device.type == "cpu":  # elsewhere the forwards' tensors are not on this heap
            give_back_freed_memory()
        with self._clock.phase("statistics"), self._statistics_precision():
            for group in stage.groups:
                total = sums[group.leader.name]
                if isinstance(total, NormSums):
                    total.fold(parameters[group.leader.name], task)
                else:
                    total.fold(parameters, task)
        block = "" if stage.block is None else stage.block.name
        flops = stage.flops * self._settings.n_samples
        self._observer.on_step(block, stage.name, task, flops)

    def _gather_batch(
        self,
        stage: Stage,
        pair: _Pair,
        sums: Mapping[str, LinearSums | NormSums],
        parameters: Mapping[str, ExpertParameters],
    ) -> None:
        with self._clock.phase("forwards"):
            expert = None
            if stage.expert_stop is not None and pair.expert is not None:
                expert = pair.expert.resume(stage.name)
            cal = pair.merged.resume(stage.name)
        with self._clock.phase("statistics"), self._statistics_precision():
            for group in stage.groups:
                self._update(sums[group.leader.name], group, pair, cal, expert, parameters)

    def _expert_resident(self, weights: Weights, stage: Stage) -> AbstractContextManager[Any]:
        if stage.expert_stop is None:
            return nullcontext()
        return self._expert_path.resident(weights, self._expert_event, stage.expert_stop.reached)

    def _expert_parameters(self, weights: Weights, module: PlannedModule) -> ExpertParameters:
        def read(leaf: str) -> Tensor:
            return weights[f"{module.name}.{leaf}"].detach().to(self._device, self._dtype)

        return ExpertParameters(read("weight"), read("bias") if module.has_bias else None)

    def _update(
        self,
        total: LinearSums | NormSums,
        group: Group,
        pair: _Pair,
        cal: Pause,
        expert: Pause | None,
        parameters: Mapping[str, ExpertParameters],
    ) -> None:
        name = group.leader.name
        features = cal.capture_of(name).input
        rows = None if group.rule is None else group.rule(features, pair.inputs)
        if isinstance(total, NormSums):
            total.update(self._merged.get_submodule(name), features, rows)
            return
        exp = exp_output = None
        if expert is not None:
            capture = expert.capture_of(name)
            exp, exp_output = capture.input, capture.output
            bias = parameters[name].bias
            if exp_output is not None and bias is not None:
                exp_output = exp_output.to(self._dtype) - bias
        total.update(features, exp, exp_output, rows)

    def _solve(self, group: Group, total: LinearSums | NormSums, stage: Stage) -> None:
        """Solve one group, write the result into the merged model and record it."""
        block = None if stage.block is None else stage.block.index
        with self._clock.phase("solves"), self._statistics_precision():
            if total.rows == 0:
                outcomes = [_Outcome(note="no row of weight above zero reached it")] * len(
                    group.modules
                )
            elif isinstance(total, NormSums):
                outcomes = [self._solve_norm(group.leader, total)]
            else:
                outcomes = self._solve_linears(group, total)
        for module, outcome in zip(group.modules, outcomes, strict=True):
            result = ModuleResult(
                name=module.name,
                kind=module.kind,
                block=block,
                shape=module.shape,
                rows=total.rows,
                **asdict(outcome),
            )
            self._results.append(result)
            self._observer.on_module(result)

    def _solve_linears(self, group: Group, total: LinearSums) -> list[_Outcome]:
        settings, lam = self._settings, self._settings.ridge_lambda
        started = time.perf_counter()
        try:
            factor = closed_form.factorise(
                total.gram, lam, settings.epsilon, name=group.leader.name
            )
        except (NonFiniteError, SingularSystemError) as error:
            if settings.on_failure == "raise":
                raise
            return [_Outcome(note=str(error))] * len(group.modules)
        outcomes = []
        for module in group.modules:
            weight_anchor = self._anchor(module, "weight")
            rhs = total.rhs.pop(module.name).add_(weight_anchor.T, alpha=lam)
            try:
                solution = closed_form.solve_weight(factor, rhs, name=module.name)
                values = {"weight": solution.value}
                if module.has_bias and settings.calibrate_bias:
                    values["bias"] = closed_form.solve_bias(
                        total.expert_bias[module.name],
                        total.mean_cal,
                        total.task_weight,
                        solution.value,
                        lam,
                        self._anchor(module, "bias"),
                    )
                change = self._write(module, values)
            except NonFiniteError as error:
                if settings.on_failure == "raise":
                    raise
                outcomes.append(_Outcome(note=str(error)))
                continue
            note = "" if factor.damping == 0 else "damped: raise ridge_lambda or n_samples"
            now = time.perf_counter()
            outcomes.append(
                _Outcome(
                    factor.condition,
                    solution.residual,
                    factor.damping,
                    change,
                    now - started,
                    True,
                    note,
                )
            )
            started = now
        return outcomes

    def _solve_norm(self, module: PlannedModule, total: NormSums) -> _Outcome:
        lam, epsilon, started = (
            self._settings.ridge_lambda,
            self._settings.epsilon,
            time.perf_counter(),
        )
        gain_anchor = self._anchor(module, "weight")
        values = {}
        if module.has_bias:
            values["weight"], values["bias"] = closed_form.solve_layer_norm(
                total.moments,
                total.expert_gain,
                total.expert_shift,
                total.tasks,
                lam,
                gain_anchor,
                self._anchor(module, "bias"),
                epsilon,
            )
        else:
            values["weight"] = closed_form.solve_rms_norm(
                total.moments[0], total.expert_gain, lam, gain_anchor, epsilon
            )
        try:
            change = self._write(module, values)
        except NonFiniteError as error:
            if self._settings.on_failure == "raise":
                raise
            return _Outcome(note=str(error))
        seconds = time.perf_counter() - started
        return _Outcome(relative_change=change, seconds=seconds, calibrated=True)

    def _anchor(self, module: PlannedModule, leaf: str) -> Tensor:
        name = f"{module.name}.{leaf}"
        merged = self._merged.get_parameter(name).to(self._dtype)
        base = self._base[name].detach().to(self._device, self._dtype)
        return closed_form.anchor(merged, base, self._settings.anchor_rho)

    def _write(self, module: PlannedModule, values: Mapping[str, Tensor]) -> float:
        """Overwrite all parameters or none; return the weight's relative change in norm."""
        for leaf, value in values.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError(
                    f"{module.name}.{leaf}: the solution holds NaN or Inf; check the experts' "
                    "weights."
                )
        before = self._merged.get_parameter(f"{module.name}.weight").to(self._dtype)
        change = (values["weight"] - before).norm()
        relative = float(change / before.norm().clamp_min(self._settings.epsilon))
        for leaf, value in values.items():
            self._merged.get_parameter(f"{module.name}.{leaf}").copy_(value)
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


@dataclass(frozen=True)
class _Outcome:
    """The part of a :class:`ModuleResult` that a solve decides."""

    condition: float | None = None
    residual: float | None = None
    damping: float = 0.0
    relative_change: float = 0.0
    seconds: float = 0.0
    calibrated: bool = False
    note: str = ""
