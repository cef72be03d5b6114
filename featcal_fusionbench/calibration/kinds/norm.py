"""Norms: gain and shift of each channel, from moments of the merged model's normalised input."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

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

__all__ = ["LayerNorm", "NormSums", "NormSystem", "RmsNorm", "normalise"]


class _Norm(Kind):
    """What LayerNorms and RMSNorms have in common: all but how they are recognised."""

    def why_left_out(self, settings: CalibrationSettings) -> str | None:
        return None if settings.calibrate_norm else "calibrate_norm is off"

    def describe(self, name: str, module: nn.Module, rows: int) -> PlannedModule:
        shape = tuple(module.get_parameter("weight").shape)
        return PlannedModule(name, self, shape, leaves_of(module), rows, *shape, *shape)

    def expert_needs(
        self, modules: Sequence[PlannedModule], settings: CalibrationSettings
    ) -> ExpertNeeds:
        return "nothing"

    def cost(self, group: Group) -> Cost:
        width = group.leader.in_features
        return Cost(
            forward_flops=0.0,
            statistics_flops=4 * group.leader.rows * width,
            solve_flops=0.0,
            sums_size=4 * width,
            solve_size=0,
        )

    def new_sums(self, group: Group, settings: CalibrationSettings, device: torch.device) -> Sums:
        return NormSums(group, settings, device)


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm`` over the last dimension, with gain and shift."""

    name = "layer_norm"

    def recognises(self, module: nn.Module) -> bool:
        return (
            isinstance(module, nn.LayerNorm)
            and module.bias is not None
            and len(module.normalized_shape) == 1
        )


class RmsNorm(_Norm):
    """Norms with a gain alone: ``torch.nn.RMSNorm`` and transformers' (Llama, Qwen, T5, …)."""

    name = "rms_norm"

    def recognises(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        # transformers' share no base class, but this attribute
        is_rms = isinstance(module, nn.RMSNorm) or hasattr(module, "variance_epsilon")
        is_rms = is_rms and not isinstance(module, nn.LayerNorm)
        is_leaf = isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())
        # a second argument is a gate (Mamba's norms), which the closed form does not know
        is_plain = len(inspect.signature(module.forward).parameters) == 1
        return is_rms and is_leaf and is_plain and getattr(module, "bias", None) is None


def normalise(norm: nn.Module, features: Tensor) -> Tensor:
    """A norm's input after normalisation and before its affine part, same shape."""
    if isinstance(norm, nn.LayerNorm):
        return functional.layer_norm(features, norm.normalized_shape, None, None, norm.eps)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if epsilon is None:
        epsilon = torch.finfo(features.dtype).eps
    return features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + epsilon)


class NormSums(Sums):
    """The sums of one norm's affine parameters; per channel, without the experts' features."""

    def __init__(self, group: Group, settings: CalibrationSettings, device: torch.device) -> None:
        self._name = group.leader.name
        self._dtype = settings.torch_statistics_dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=device)

        channels = group.leader.in_features
        self._moments = zeros(2, channels)
        self._row_weight = zeros()
        self._rows = 0
        self._system = NormSystem(
            epsilon=settings.epsilon,
            moments=zeros(2, channels),
            expert_gain=zeros(channels),
            expert_shift=zeros(channels),
        )

    def update(self, batch: BatchFeatures) -> None:
        rows = Rows(batch.row_weights, self._dtype)
        z, r = normalise(batch.module, rows(batch.merged.input)), rows.weights
        sums = (z.square().sum(0), z.sum(0)) if r is None else (r @ z.square(), r @ z)
        self._moments += torch.stack(sums)
        self._row_weight += len(z) if r is None else r.sum()
        self._rows += len(z)

    def end_task(self, task: str, parameters: Mapping[str, Tensors]) -> None:
        total, count = self._system, float(self._row_weight)
        if count > 0:
            if not bool(torch.isfinite(self._moments).all()):
                raise NonFiniteError(
                    f"task {task}: the merged model's features hold NaN or Inf at {self._name}. "
                    "Check the inputs of this task."
                )
            expert = parameters[self._name]
            moments = self._moments / count
            power, mean = moments
            total.moments += moments
            total.expert_gain += power * expert["weight"]
            total.expert_shift += mean * expert["weight"]
            if "bias" in expert:
                total.expert_gain += mean * expert["bias"]
                total.expert_shift += expert["bias"]
            total.tasks += 1
        total.rows += self._rows
        self._rows = 0
        self._moments.zero_()
        self._row_weight.zero_()

    def system(self) -> NormSystem:
        return self._system


@dataclass
class NormSystem(System):
    """Sums over tasks from which gain and shift follow at any λ.

    Attributes:
        epsilon: Lower bound of determinants.
        moments: Σ e_i = Σ E[z²] and Σ m_i = Σ E[z], shape (2, channels).
        expert_gain: Σ (e_i γ_i + m_i β_i), shape (channels,).
        expert_shift: Σ (m_i γ_i + β_i), shape (channels,).
        tasks: Tasks summed over.
    """

    epsilon: float
    moments: Tensor
    expert_gain: Tensor
    expert_shift: Tensor
    tasks: int = 0
    rows: int = 0

    def solve(self, module: PlannedModule, ridge_lambda: float, anchor: Anchor) -> Solved:
        if not module.has_bias:
            gain = closed_form.solve_rms_norm(
                self.moments[0], self.expert_gain, ridge_lambda, anchor("weight"), self.epsilon
            )
            return Solved({"weight": gain})
        gain, shift = closed_form.solve_layer_norm(
            self.moments,
            self.expert_gain,
            self.expert_shift,
            self.tasks,
            ridge_lambda,
            anchor("weight"),
            anchor("bias"),
            self.epsilon,
        )
        return Solved({"weight": gain, "bias": shift})
