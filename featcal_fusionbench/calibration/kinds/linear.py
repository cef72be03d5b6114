"""Linears: a ridge regression for each, from sums that Linears with one input share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .. import closed_form
from ..errors import NonFiniteError
from ..rows import Rows
from ..settings import CalibrationSettings
from .base import (
    Anchor,
    BatchFeatures,
    Cost,
    ExpertNeeds,
    Group,
    Kind,
    PlannedModule,
    Solved,
    Sums,
    System,
    Tensors,
    leaves_of,
)

__all__ = ["Linear", "LinearSums", "LinearSystem"]

# Width of the column blocks in which a symmetric product is formed: small enough to leave out
# nearly half of it, large enough for a fast matrix product.
_TRIANGLE_BLOCK = 512


class Linear(Kind):
    """``torch.nn.Linear`` itself; a subclass may compute something else.

    Σ C_i W_iᵀ is formed from X_calᵀ X_exp (in × in), which all Linears of the group share, or from
    X_calᵀ (W_i X_exp) (in × out), the expert's own output. The second is cheaper where a single
    Linear narrows its input, and lets the expert run past the module, where its forward holds less.
    """

    name = "linear"
    shares_inputs = True

    def recognises(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear

    def describe(self, name: str, module: nn.Module, rows: int) -> PlannedModule:
        out, width = shape = tuple(module.get_parameter("weight").shape)
        return PlannedModule(name, self, shape, leaves_of(module), rows, width, out)

    def expert_needs(
        self, modules: Sequence[PlannedModule], settings: CalibrationSettings
    ) -> ExpertNeeds:
        if settings.target_alpha == 0:
            return "nothing"
        narrows = len(modules) == 1 and modules[0].out_features <= modules[0].in_features
        return "output" if narrows else "input"

    def cost(self, group: Group) -> Cost:
        rows, width = group.leader.rows, group.leader.in_features
        outs = [module.out_features for module in group.modules]
        cross = _cross_width(group)
        return Cost(
            forward_flops=2 * rows * width * sum(outs),
            statistics_flops=2 * rows * width * (0.6 * width + cross),
            solve_flops=width**3 / 3 + sum(4 * width**2 * out for out in outs),
            # the Gram matrix of a task and of all, the right-hand sides, the cross term of a task
            sums_size=2 * width**2 + width * sum(outs) + width * cross,
            # the system and its factor; of one module the right-hand side, the solution as it is
            # found and as it is written, its residual
            solve_size=2 * width**2 + 4 * width * max(outs),
        )

    def new_sums(
        self, group: Group, settings: CalibrationSettings, device: torch.device
    ) -> LinearSums:
        return LinearSums(group, settings, device)


class LinearSums(Sums):
    """The sums of Linears that share one input (arXiv 2605.13030, the closed form of a weight).

    Per task: G_i = X_calᵀ diag(r) X_cal / N_i, the cross term with the expert's features, and the
    means μ. Over tasks: those of :class:`LinearSystem`. Memory is 2·in² + in·Σout, plus in² or
    in·out where the expert's input or its output is needed.
    """

    def __init__(self, group: Group, settings: CalibrationSettings, device: torch.device) -> None:
        self._group = group
        self._alpha, self._epsilon = settings.target_alpha, settings.epsilon
        self._dtype = settings.torch_statistics_dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=device)

        width = group.leader.in_features
        self._gram = zeros(width, width)
        self._cross = zeros(width, _cross_width(group)) if group.needs_expert else None
        self._sum_cal, self._sum_exp = zeros(width), zeros(width)
        self._row_weight = zeros()
        self._rows = 0
        self._system = LinearSystem(
            leader=group.leader.name,
            epsilon=settings.epsilon,
            with_bias=settings.calibrate_bias,
            gram=zeros(width, width),
            rhs={m.name: zeros(width, m.out_features) for m in group.modules},
            expert_bias={m.name: zeros(m.out_features) for m in group.modules if m.has_bias},
            mean_cal=zeros(width),
        )

    def update(self, batch: BatchFeatures) -> None:
        rows = Rows(batch.row_weights, self._dtype)
        x, r = rows(batch.merged.input), rows.weights
        weighted = x if r is None else x * r[:, None]
        _add_gram(self._gram, x, weighted)
        self._sum_cal += weighted.sum(0)
        self._row_weight += len(x) if r is None else r.sum()
        self._rows += len(x)
        if self._cross is not None:
            assert batch.expert is not None, "the expert's features are needed where alpha > 0"
            exp, output = rows(batch.expert.input), batch.expert.output
            if self._group.expert_needs == "output" and output is not None:
                bias = batch.parameters[self._group.leader.name].get("bias")
                if bias is not None:
                    output = output.to(self._dtype) - bias
                self._cross.addmm_(weighted.T, rows(output))
            else:
                self._cross.addmm_(weighted.T, exp)
            self._sum_exp += exp.sum(0) if r is None else r @ exp

    def end_task(self, task: str, parameters: Mapping[str, Tensors]) -> None:
        count = float(self._row_weight)
        if count > 0:
            self._check_finite(task)
            self._add_task(parameters, count)
        self._system.rows += self._rows
        self._rows = 0
        for of_task in (self._gram, self._cross, self._sum_cal, self._sum_exp, self._row_weight):
            if of_task is not None:
                of_task.zero_()

    def system(self) -> LinearSystem:
        return self._system

    def _add_task(self, parameters: Mapping[str, Tensors], count: float) -> None:
        """Weigh the task's sums by ω_i and add them to the totals; they are worked on in place."""
        total, alpha, gram, cross = self._system, self._alpha, self._gram, self._cross
        _mirror(gram)
        gram /= count
        omega = 1 / max(float(gram.norm()), self._epsilon)
        mean_cal = self._sum_cal / count
        mean_tgt = mean_cal if cross is None else torch.lerp(mean_cal, self._sum_exp / count, alpha)
        total.gram.add_(gram, alpha=omega)
        total.mean_cal.add_(mean_cal, alpha=omega)
        total.task_weight += omega

        of_target = gram  # C_i, which is G_i where the target is X_cal
        if cross is not None and self._group.expert_needs == "input":
            cross /= count
            of_target = torch.lerp(gram, cross, alpha, out=cross)
        for module in self._group.modules:
            expert, rhs = parameters[module.name], total.rhs[module.name]
            share = omega
            if cross is not None and self._group.expert_needs == "output":
                # C_i W_iᵀ = α X_calᵀ (W_i X_exp) + (1−α) G_i W_iᵀ
                rhs.add_(cross, alpha=omega * alpha / count)
                share = omega * (1 - alpha)
            rhs.addmm_(of_target, expert["weight"].T, alpha=share)
            if module.has_bias:
                mean_output = torch.mv(expert["weight"], mean_tgt)
                total.expert_bias[module.name].add_(expert["bias"] + mean_output, alpha=omega)

    def _check_finite(self, task: str) -> None:
        merged = bool(torch.isfinite(self._sum_cal).all())
        expert = bool(torch.isfinite(self._sum_exp).all())
        if merged and expert:
            expert = self._cross is None or bool(torch.isfinite(self._cross).all())
            merged = expert or bool(torch.isfinite(self._gram.diagonal()).all())
        if not (merged and expert):
            path = "expert" if merged else "merged model"
            raise NonFiniteError(
                f"task {task}: the {path}'s features hold NaN or Inf at {self._group.leader.name}. "
                "Check the inputs of this task and the weights of the "
                f"{path}; forward_dtype=float32 avoids overflow."
            )


@dataclass
class LinearSystem(System):
    """Sums over tasks from which weights and biases follow at any λ.

    Attributes:
        leader: Name of the first of the Linears, for messages.
        epsilon: ε on the diagonal.
        with_bias: Whether biases are solved for, too.
        gram: Σ ω_i G_i, shape (in, in).
        rhs: Σ ω_i C_i W_iᵀ by module, shape (in, out).
        expert_bias: Σ ω_i (b_i + W_i μ_tgt,i) by module, shape (out,).
        mean_cal: Σ ω_i μ_cal,i, shape (in,).
        task_weight: Σ ω_i.
    """

    leader: str
    epsilon: float
    with_bias: bool
    gram: Tensor
    rhs: dict[str, Tensor]
    expert_bias: dict[str, Tensor]
    mean_cal: Tensor
    task_weight: float = 0.0
    rows: int = 0
    _factor: closed_form.Factor | None = field(default=None, init=False, repr=False)

    def solve(self, module: PlannedModule, ridge_lambda: float, anchor: Anchor) -> Solved:
        factor = self._factor_at(ridge_lambda)
        rhs = torch.add(self.rhs[module.name], anchor("weight").T, alpha=ridge_lambda)
        solution = closed_form.solve_weight(factor, rhs, name=module.name)
        values = {"weight": solution.value}
        if module.has_bias and self.with_bias:
            values["bias"] = closed_form.solve_bias(
                self.expert_bias[module.name],
                self.mean_cal,
                self.task_weight,
                solution.value,
                ridge_lambda,
                anchor("bias"),
            )
        return Solved(values, factor.condition, solution.residual, factor.damping)

    def _factor_at(self, ridge_lambda: float) -> closed_form.Factor:
        """The factor that the group's modules share; the last one is kept."""
        if self._factor is None or self._factor.ridge_lambda != ridge_lambda:
            self._factor = None  # its memory is free for the next one
            self._factor = closed_form.factorise(
                self.gram, ridge_lambda, self.epsilon, name=self.leader
            )
        return self._factor


def _cross_width(group: Group) -> int:
    """Width of the cross term that is summed: of X_exp, or of W_i X_exp."""
    leader = group.leader
    return {"nothing": 0, "input": leader.in_features, "output": leader.out_features}[
        group.expert_needs
    ]


def _add_gram(total: Tensor, x: Tensor, weighted: Tensor) -> None:
    """Add the upper block triangle of Xᵀ diag(r) X, shape (in, in), to ``total``."""
    width = x.shape[1]
    for start in range(0, width, _TRIANGLE_BLOCK):
        stop = min(start + _TRIANGLE_BLOCK, width)
        total[start:stop, start:].addmm_(x[:, start:stop].T, weighted[:, start:])


def _mirror(gram: Tensor) -> None:
    """Copy the upper block triangle onto the lower one."""
    width = gram.shape[0]
    for start in range(_TRIANGLE_BLOCK, width, _TRIANGLE_BLOCK):
        stop = min(start + _TRIANGLE_BLOCK, width)
        gram[start:stop, :start] = gram[:start, start:stop].T
