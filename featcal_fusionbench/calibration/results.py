"""What a calibration leaves behind, as plain typed values that reports are made of."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BlockDrift",
    "CalibrationResult",
    "ModuleResult",
    "PhaseCost",
    "SkippedModule",
    "TaskDrift",
]


@dataclass(frozen=True)
class ModuleResult:
    """One module that the plan named.

    Attributes:
        name: Name of the module in the merged model.
        kind: What was solved: ``linear``, ``layer_norm``, ``rms_norm``.
        block: Index of its block in forward order, or None outside all blocks.
        shape: Shape of its weight.
        rows: Tokens that entered the statistics with a weight above zero, over all tasks.
        condition: Estimated 2-norm condition of the solved system; None where none was solved.
        residual: ‖A·X − B‖_F / ‖B‖_F of the solution; None where none was solved.
        damping: What had to be added to the diagonal beyond λ + ε; 0 in a healthy run.
        relative_change: ‖W − W_merged‖_F / ‖W_merged‖_F.
        seconds: Wall-clock seconds of the solve.
        calibrated: False where the module kept its merged values.
        note: Why it kept them, or a remark; empty in a healthy run.
        ridge_lambda: λ of its new values; None where it has none.
    """

    name: str
    kind: str
    block: int | None
    shape: tuple[int, ...]
    rows: int
    condition: float | None
    residual: float | None
    damping: float
    relative_change: float
    seconds: float
    calibrated: bool = True
    note: str = ""
    ridge_lambda: float | None = None


@dataclass(frozen=True)
class SkippedModule:
    """A module with parameters that the plan leaves at its merged values, and why."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class PhaseCost:
    """What one phase of a run cost.

    Attributes:
        name: Name of the phase.
        wall_seconds: Elapsed seconds.
        cpu_seconds: Seconds of processor time over all threads of this process.
        peak_memory_bytes: Highest resident memory of the process up to the end of the phase.
        peak_device_bytes: Highest memory allocated on the accelerator in the phase; None on a CPU.
    """

    name: str
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    peak_device_bytes: int | None = None


@dataclass(frozen=True)
class BlockDrift:
    """Drift of one task at the output of one block, relative to the norm of the expert's output.

    Attributes:
        block: Index of the block in forward order.
        name: Name of the block.
        total: ‖h_cal − h_exp‖ / ‖h_exp‖, each model on its own path.
        local: The same with the merged block fed the expert's input: the block's own mismatch.
        propagated: Size of the rest, total minus local as vectors: what earlier blocks passed on.
    """

    block: int
    name: str
    total: float
    local: float
    propagated: float


@dataclass(frozen=True)
class TaskDrift:
    """Feature drift of one task on held-out inputs.

    Attributes:
        task: Name of the task.
        inputs: Number of held-out inputs.
        final: Relative drift ‖f_cal − f_exp‖ / ‖f_exp‖ of the model's final features.
        blocks: Drift at each block's output, in forward order.
    """

    task: str
    inputs: int
    final: float
    blocks: tuple[BlockDrift, ...] = ()


@dataclass(frozen=True)
class CalibrationResult:
    """What the loop did to the merged model.

    Attributes:
        modules: One entry per planned module, in the order of calibration.
        skipped: Modules with parameters that kept their merged values by plan.
        phases: Costs of the loop's phases: forwards, statistics, solves.
    """

    modules: tuple[ModuleResult, ...]
    skipped: tuple[SkippedModule, ...] = ()
    phases: tuple[PhaseCost, ...] = ()
