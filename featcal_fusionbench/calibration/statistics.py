"""Running sums over batches and tasks: their size depends on widths, not on tasks or inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import NonFiniteError
from .plan import Group

__all__ = ["ExpertParameters", "LinearSums", "NormSums", "normalise"]

# Width of the column blocks in which a symmetric product is formed: small enough to leave out
# nearly half of it, large enough for a fast matrix product.
_TRIANGLE_BLOCK = 512


@dataclass(frozen=True)
class ExpertParameters:
    """Weight and bias of one module of one expert, on the device and in the dtype of the sums."""

    weight: Tensor
    bias: Tensor | None


class _Rows:
    """Turns features into (rows, width) in the dtype of the sums, without rows of weight 0.

    Rows of weight 0 (padding) are left out rather than multiplied: whatever they hold, NaN
    included, has no influence.
    """

    def __init__(self, weights: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: Tensor | None = None
        self.weights: Tensor | None = None
        """Weights of the rows kept, shape (rows,); None where all are 1."""
        if weights is not None:
            flat = weights.reshape(-1).to(dtype)
            if bool((flat == 0).any()):
                self._kept = flat > 0
                flat = flat[self._kept]
            if not bool((flat == 1).all()):
                self.weights = flat

    def __call__(self, features: Tensor) -> Tensor:
        flat = features.reshape(-1, features.shape[-1])
        return (flat if self._kept is None else flat[self._kept]).to(self._dtype)


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


class LinearSums:
    """The sums of Linears that share one input (arXiv 2605.13030, the closed form of a weight).

    Per task: G_i = X_calᵀ diag(r) X_cal / N_i, the cross term with the expert's features, and the
    means μ. Over tasks: Σ ω_i G_i, Σ ω_i C_i W_iᵀ, and the three sums of the bias. Memory is
    2·in² + in·Σout, plus in² (route ``input``) or in·out (route ``output``).

    Args:
        group: The Linears and the route by which C_i W_iᵀ is formed.
        alpha: Target interpolation α; at 0 no expert features are needed.
        epsilon: ε of ω_i = 1 / max(‖G_i‖_F, ε).
        dtype: Precision of the sums.
        device: Where they live.
    """

    def __init__(
        self,
        group: Group,
        *,
        alpha: float,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._alpha = alpha
        self._epsilon = epsilon
        self._dtype = dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = group.leader.in_features
        cross_width = width if group.route == "input" else group.leader.out_features
        self._gram_task = zeros(width, width)
        self._cross_task = zeros(width, cross_width) if alpha > 0 else None
        self._sum_cal = zeros(width)
        self._sum_exp = zeros(width)
        self._rows_task = zeros()
        self._counted = 0
        self.gram = zeros(width, width)
        """Σ ω_i G_i, shape (in, in)."""
        self.rhs = {m.name: zeros(width, m.out_features) for m in group.modules}
        """Σ ω_i C_i W_iᵀ by module, shape (in, out)."""
        self.expert_bias = {m.name: zeros(m.out_features) for m in group.modules if m.has_bias}
        """Σ ω_i (b_i + W_i μ_tgt,i) by module, shape (out,)."""
        self.mean_cal = zeros(width)
        """Σ ω_i μ_cal,i, shape (in,)."""
        self.task_weight = 0.0
        """Σ ω_i."""
        self.rows = 0
        """Rows of weight above zero, over all tasks."""

    def update(
        self, cal: Tensor, exp: Tensor | None, exp_output: Tensor | None, weights: Tensor | None
    ) -> None:
        """Add one batch of the current task.

        Args:
            cal: X_cal, shape (..., in).
            exp: X_exp of the same rows; None where α = 0.
            exp_output: The expert's module output without its bias, W_i X_exp, shape (..., out);
                only in the route ``output``.
            weights: Row weights r, shape (...,); None weighs every row 1.
        """
        rows = _Rows(weights, self._dtype)
        x, r = rows(cal), rows.weights
        weighted = x if r is None else x * r[:, None]
        _add_gram(self._gram_task, x, weighted)
        self._sum_cal += weighted.sum(0)
        self._rows_task += len(x) if r is None else r.sum()
        self._counted += len(x)
        if self._cross_task is not None:
            assert exp is not None, "the expert's features are needed where alpha > 0"
            other = rows(exp)
            self._cross_task.addmm_(weighted.T, other if exp_output is None else rows(exp_output))
            self._sum_exp += other.sum(0) if r is None else r @ other

    def fold(self, experts: Mapping[str, ExpertParameters], task: str) -> None:
        """End the current task: weigh its sums by ω_i and add them to the totals.

        Args:
            experts: Parameters of this task's expert by module name.
            task: Its name, for messages.

        Raises:
            NonFiniteError: The features held NaN or Inf.
        """
        count = float(self._rows_task)
        if count > 0:
            self._check_finite(task)
            self._fold(experts, count)
        self.rows += self._counted
        self._counted = 0
        for total in (
            self._gram_task,
            self._cross_task,
            self._sum_cal,
            self._sum_exp,
            self._rows_task,
        ):
            if total is not None:
                total.zero_()

    def _fold(self, experts: Mapping[str, ExpertParameters], count: float) -> None:
        alpha, gram, cross = self._alpha, self._gram_task, self._cross_task
        _mirror(gram)
        gram /= count
        omega = 1 / max(float(gram.norm()), self._epsilon)
        mean_cal = self._sum_cal / count
        mean_tgt = mean_cal if cross is None else torch.lerp(mean_cal, self._sum_exp / count, alpha)
        self.gram.add_(gram, alpha=omega)
        self.mean_cal.add_(mean_cal, alpha=omega)
        self.task_weight += omega
        target = gram
        if cross is not None and self._group.route == "input":
            target = torch.lerp(gram, cross.div_(count), alpha, out=cross)
        for module in self._group.modules:
            expert, rhs = experts[module.name], self.rhs[module.name]
            if cross is not None and self._group.route == "output":
                rhs.add_(cross, alpha=omega * alpha / count)
                rhs.addmm_(target, expert.weight.T, alpha=omega * (1 - alpha))
            else:
                rhs.addmm_(target, expert.weight.T, alpha=omega)
            if module.has_bias and expert.bias is not None:
                mean_output = torch.mv(expert.weight, mean_tgt)
                self.expert_bias[module.name].add_(expert.bias + mean_output, alpha=omega)

    def _check_finite(self, task: str) -> None:
        merged = bool(torch.isfinite(self._sum_cal).all())
        expert = bool(torch.isfinite(self._sum_exp).all())
        if merged and expert:
            expert = self._cross_task is None or bool(torch.isfinite(self._cross_task).all())
            merged = expert or bool(torch.isfinite(self._gram_task.diagonal()).all())
        if not (merged and expert):
            path = "expert" if merged else "merged model"
            raise NonFiniteError(
                f"task {task}: the {path}'s features hold NaN or Inf at {self._group.leader.name}. "
                "Check the inputs of this task and the weights of the "
                f"{path}; forward_dtype=float32 avoids overflow."
            )


def normalise(norm: nn.Module, features: Tensor) -> Tensor:
    """A norm's input after normalisation and before its affine part, same shape."""
    if isinstance(norm, nn.LayerNorm):
        return functional.layer_norm(features, norm.normalized_shape, None, None, norm.eps)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if epsilon is None:
        epsilon = torch.finfo(features.dtype).eps
    return features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + epsilon)


class NormSums:
    """The sums of one norm's affine parameters; per channel, without the experts' features.

    Args:
        group: The norm.
        dtype: Precision of the sums.
        device: Where they live.
    """

    def __init__(self, group: Group, *, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        channels = group.leader.in_features
        self._moments_task = torch.zeros(2, channels, dtype=dtype, device=device)
        self._rows_task = torch.zeros((), dtype=dtype, device=device)
        self._counted = 0
        self.moments = torch.zeros(2, channels, dtype=dtype, device=device)
        """Σ E[z²] and Σ E[z], shape (2, channels)."""
        self.expert_gain = torch.zeros(channels, dtype=dtype, device=device)
        """Σ (e_i γ_i + m_i β_i), shape (channels,)."""
        self.expert_shift = torch.zeros(channels, dtype=dtype, device=device)
        """Σ (m_i γ_i + β_i), shape (channels,)."""
        self.tasks = 0
        """Tasks summed over."""
        self.rows = 0
        """Rows of weight above zero, over all tasks."""

    def update(self, norm: nn.Module, features: Tensor, weights: Tensor | None) -> None:
        """Add one batch of the current task: the merged model's input of the norm."""
        rows = _Rows(weights, self._dtype)
        z, r = normalise(norm, rows(features)), rows.weights
        sums = (z.square().sum(0), z.sum(0)) if r is None else (r @ z.square(), r @ z)
        self._moments_task += torch.stack(sums)
        self._rows_task += len(z) if r is None else r.sum()
        self._counted += len(z)

    def fold(self, expert: ExpertParameters, task: str) -> None:
        """End the current task and add its moments to the totals."""
        count = float(self._rows_task)
        if count > 0:
            if not bool(torch.isfinite(self._moments_task).all()):
                raise NonFiniteError(
                    f"task {task}: the merged model's features hold NaN or Inf at "
                    f"{self._group.leader.name}. Check the inputs of this task."
                )
            moments = self._moments_task / count
            power, mean = moments
            self.moments += moments
            self.expert_gain += power * expert.weight
            self.expert_shift += mean * expert.weight
            if expert.bias is not None:
                self.expert_gain += mean * expert.bias
                self.expert_shift += expert.bias
            self.tasks += 1
        self.rows += self._counted
        self._counted = 0
        self._moments_task.zero_()
        self._rows_task.zero_()
