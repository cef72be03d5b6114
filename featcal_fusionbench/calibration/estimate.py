"""Time and memory that a planned calibration will take: estimates, made before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from .inputs import Inputs
from .memory import measure_memory_per_input
from .plan import Plan
from .settings import CalibrationSettings

__all__ = ["Estimate", "Fit", "estimate_cost", "fit_to_memory", "measure_matmul_rate"]

# What the allocator holds beyond live tensors, on the CPU; from the speed benchmark.
_ALLOCATOR_SLACK = 1.35
# Share of the free memory that activations may be held in: estimates err, others come and go.
_HEADROOM = 0.8
# Share of the measured peak that forwards and statistics reach together, from the speed benchmark.
_EFFICIENCY = 0.7


@dataclass(frozen=True)
class Estimate:
    """What a calibration is expected to take.

    Attributes:
        flops: Floating-point operations of forwards, statistics and solves.
        seconds: Wall-clock seconds of the loop, data loading excluded.
        activation_bytes: What the paused forwards of all tasks hold; grows with tasks and inputs.
        working_bytes: The batch that is running, or the system that is solved; whichever is more.
        sums_bytes: Running sums of the widest stage; independent of tasks and inputs.
        model_bytes: The merged model and the largest piece of one expert, on the device.
    """

    flops: float
    seconds: float
    activation_bytes: int
    working_bytes: int
    sums_bytes: int
    model_bytes: int

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.activation_bytes + self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        return self.working_bytes + self.sums_bytes + self.model_bytes

    def share_that_fits(self, available_bytes: float) -> float:
        """How many times the inputs that were planned with fit into some memory."""
        return max(available_bytes - self._fixed_bytes, 0) / self.activation_bytes


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
    example: Inputs,
    settings: CalibrationSettings,
    *,
    tasks: int,
    flops_per_second: float,
) -> Estimate:
    """Estimate a calibration.

    Args:
        plan: The plan.
        model: The merged model, or another one of its structure.
        example: One calibration input as the model takes it, rather a large one.
        settings: The settings of the plan.
        tasks: Number of tasks.
        flops_per_second: Speed of the device, e.g. from :func:`measure_matmul_rate`.
    """
    inputs = tasks * settings.n_samples
    groups = [group for stage in plan.stages for group in stage.groups]
    forwards = inputs * sum(stage.flops for stage in plan.stages)
    work = forwards + sum(group.cost.solve_flops for group in groups)
    memory = measure_memory_per_input(plan, model, example, settings)
    size = torch.finfo(settings.torch_statistics_dtype).bits // 8
    features = max(group.leader.rows * group.leader.in_features for group in groups)
    batch = min(settings.batch_size, settings.n_samples) * (memory.running + 2 * size * features)
    sums = max(sum(group.cost.sums_size for group in stage.groups) for stage in plan.stages)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    piece = weights // max(len(plan.blocks), 1)
    return Estimate(
        flops=work,
        seconds=work / (_EFFICIENCY * flops_per_second),
        activation_bytes=round(_ALLOCATOR_SLACK * inputs * memory.paused),
        working_bytes=max(batch, max(group.cost.solve_size for group in groups) * size),
        sums_bytes=sums * size,
        model_bytes=weights + piece,
    )


@dataclass(frozen=True)
class Fit:
    """A plan that suits the memory, and what it will take.

    Attributes:
        plan: The plan, holding activations or not.
        estimate: What it will take.
        available_bytes: The memory that is free.
        holding: Whether it holds activations, and why; one sentence for the user.
        warning: What to change if it will not fit; empty if it will.
    """

    plan: Plan
    estimate: Estimate
    available_bytes: int
    holding: str
    warning: str


def fit_to_memory(
    plan: Plan,
    model: nn.Module,
    example: Inputs,
    settings: CalibrationSettings,
    *,
    tasks: int,
    flops_per_second: float,
    available_bytes: int,
) -> Fit:
    """Choose whether waiting forwards hold their activations, as ``hold_activations`` says.

    Args:
        plan: The plan, from :func:`.build_plan` with these settings.
        model: The merged model, or another one of its structure.
        example: One calibration input as the model takes it, rather a large one.
        settings: The settings of the plan.
        tasks: Number of tasks.
        flops_per_second: Speed of the device.
        available_bytes: Free memory of the device.
    """

    def estimate_of(plan: Plan) -> Estimate:
        return estimate_cost(
            plan, model, example, settings, tasks=tasks, flops_per_second=flops_per_second
        )

    estimate = estimate_of(plan)
    free = f"{_gib(available_bytes)} are free"
    why = f"hold_activations={settings.hold_activations}"
    if settings.granularity == "block":
        why = "granularity=block"
    elif settings.hold_activations == "auto":
        fits = estimate.memory_bytes <= _HEADROOM * available_bytes
        why += f": {_gib(estimate.memory_bytes)} would be needed to hold all, {free}"
        if not fits:
            plan = plan.without_holding()
            estimate = estimate_of(plan)
    what = "all that is alive in a block" if plan.holds else "the inputs of blocks alone"
    warning = ""
    if estimate.memory_bytes > available_bytes:
        samples = int(settings.n_samples * estimate.share_that_fits(available_bytes))
        lower = f"n_samples to {samples}, which would fit" if samples else "n_samples"
        instead = ", or set hold_activations=never, which holds less" if plan.holds else ""
        warning = (
            f"about {_gib(estimate.memory_bytes)} will be needed and {free}: lower "
            f"{lower}{instead}."
        )
    return Fit(plan, estimate, available_bytes, f"waiting forwards hold {what} ({why})", warning)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
