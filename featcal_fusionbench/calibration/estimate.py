"""Time and memory that a planned calibration will take: estimates, made before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from .plan import Group, Plan
from .settings import CalibrationSettings

__all__ = ["Estimate", "estimate_cost", "measure_matmul_rate"]

# Tensors of the residual stream's width that the two paused forwards of one input hold per token,
# counted in running calibrations: in granularity `module` besides the widest input of a Linear
# (residuals, norm outputs, query, key and value), in granularity `block` between two blocks.
_HELD_WIDTHS = {"module": 7.0, "block": 7.0}
# What the allocator holds beyond live tensors, on the CPU; from the speed benchmark.
_ALLOCATOR_SLACK = 1.35
# Share of the measured peak that forwards and statistics reach together, from the speed benchmark.
_EFFICIENCY = 0.7


@dataclass(frozen=True)
class Estimate:
    """What a calibration is expected to take.

    Attributes:
        flops: Floating-point operations of forwards, statistics and solves.
        seconds: Wall-clock seconds of the loop, data loading excluded.
        activation_bytes: What the paused forwards of all tasks hold; grows with tasks and inputs.
        sums_bytes: Running sums of the widest stage; independent of tasks and inputs.
        model_bytes: The merged model and the largest piece of one expert, on the device.
    """

    flops: float
    seconds: float
    activation_bytes: int
    sums_bytes: int
    model_bytes: int

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.activation_bytes + self.sums_bytes + self.model_bytes


def measure_matmul_rate(device: torch.device | str, size: int = 1536, repeats: int = 4) -> float:
    """FLOP/s of float32 matrix products on a device, the best of a few."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(repeats + 1):
        started = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def estimate_cost(
    plan: Plan,
    model: nn.Module,
    settings: CalibrationSettings,
    *,
    tasks: int,
    input_bytes: int,
    flops_per_second: float,
) -> Estimate:
    """Estimate a calibration.

    Args:
        plan: The plan.
        model: The merged model.
        settings: The settings of the plan.
        tasks: Number of tasks.
        input_bytes: Size of one calibration input as the model takes it.
        flops_per_second: Speed of the device, e.g. from :func:`measure_matmul_rate`.
    """
    inputs = tasks * settings.n_samples
    element = 2 if settings.forward_dtype == "bfloat16" else 4
    groups = [group for stage in plan.stages for group in stage.groups]
    rows = max(group.leader.rows for group in groups)  # of the encoder, where there are two stacks
    narrow = rows * min(g.leader.in_features for g in groups if g.leader.rows == rows)
    wide = max(group.leader.rows * group.leader.in_features for group in groups)
    work = inputs * sum(map(plan.flops, plan.stages)) + sum(map(_solve_flops, groups))
    held = _HELD_WIDTHS[plan.granularity] * narrow + (wide if plan.granularity == "module" else 0)
    sums = max(sum(map(_sums_elements, stage.groups)) for stage in plan.stages)
    size = torch.finfo(settings.torch_statistics_dtype).bits // 8
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    piece = weights // max(len(plan.blocks), 1)
    return Estimate(
        flops=work,
        seconds=work / (_EFFICIENCY * flops_per_second),
        activation_bytes=round(_ALLOCATOR_SLACK * inputs * (held * element + input_bytes)),
        sums_bytes=sums * size,
        model_bytes=weights + piece,
    )


def _solve_flops(group: Group) -> float:
    if group.is_norm:
        return 0.0
    width = group.leader.in_features
    return width**3 / 3 + sum(4 * width**2 * module.out_features for module in group.modules)


def _sums_elements(group: Group) -> int:
    if group.is_norm:
        return 4 * group.leader.in_features
    width = group.leader.in_features
    out = sum(module.out_features for module in group.modules)
    return 2 * width * width + width * out + width * (width if group.route == "input" else out)
