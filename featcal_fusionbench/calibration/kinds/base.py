"""What a kind of module is to the engine: all that plan, loop and estimate ask of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..rows import RowRule
from ..settings import CalibrationSettings
from ..suspended import Capture

__all__ = [
    "Anchor",
    "BatchFeatures",
    "Cost",
    "ExpertNeeds",
    "Group",
    "Kind",
    "PlannedModule",
    "Solved",
    "Sums",
    "System",
    "Tensors",
    "leaves_of",
]

ExpertNeeds = Literal["nothing", "input", "output"]
"""What of the expert's module enters the sums beside its weights: its features, or none."""

Tensors = Mapping[str, Tensor]
"""A module's parameters and buffers by their name in it."""

Anchor = Callable[[str], Tensor]
"""Gives the anchor ρ·merged + (1−ρ)·base of one of a module's tensors, by its name in it."""


@dataclass(frozen=True)
class PlannedModule:
    """One module to calibrate.

    Attributes:
        name: Its name in the merged model.
        kind: What it is to the engine.
        shape: Shape of its weight, for reports.
        leaves: Names of its parameters and buffers that are read from experts.
        rows: Rows (tokens) of its input for one calibration input.
        in_features: Width of a row of its input.
        out_features: Width of a row of its output.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    leaves: tuple[str, ...]
    rows: int
    in_features: int
    out_features: int

    @property
    def has_bias(self) -> bool:
        """Whether it has a bias (a Linear's, or a LayerNorm's shift)."""
        return "bias" in self.leaves


@dataclass(frozen=True)
class Group:
    """Modules of one kind that are solved together, from one system.

    Attributes:
        modules: They read one input tensor and weigh its rows alike; the first is the leader,
            whose input is watched.
        expert_needs: What of the expert's leader is watched.
        rule: Row weights; None weighs every row 1.
    """

    modules: tuple[PlannedModule, ...]
    expert_needs: ExpertNeeds
    rule: RowRule | None = None

    @property
    def leader(self) -> PlannedModule:
        """The module that runs first."""
        return self.modules[0]

    @property
    def kind(self) -> Kind:
        """What its modules are to the engine."""
        return self.leader.kind

    @property
    def needs_expert(self) -> bool:
        """Whether the expert's forward has to come here."""
        return self.expert_needs != "nothing"

    @property
    def cost(self) -> Cost:
        """What it takes to calibrate it."""
        return self.kind.cost(self)


@dataclass(frozen=True)
class Cost:
    """What a group takes, counted in floating-point operations and in numbers to hold.

    Attributes:
        forward_flops: Of one forward through its modules, for one input.
        statistics_flops: Of adding one input to the sums.
        solve_flops: Of all solves.
        sums_size: Numbers of the sums' precision that running sums hold, whatever the number of
            tasks and inputs.
        solve_size: The same of a solve, beyond what the sums held.
    """

    forward_flops: float
    statistics_flops: float
    solve_flops: float
    sums_size: int
    solve_size: int


@dataclass(frozen=True)
class BatchFeatures:
    """What the forwards of one batch show of a group.

    Attributes:
        module: The merged model's module, the group's leader.
        merged: What it was called with.
        expert: What the expert's was called with, and its output where ``expert_needs`` says so;
            None where the group needs nothing of it.
        parameters: The expert's tensors, by module of the group, in the precision of the sums.
        row_weights: r, of the shape of the row view without its last dimension; None weighs every
            row 1.
    """

    module: nn.Module
    merged: Capture
    expert: Capture | None
    parameters: Mapping[str, Tensors]
    row_weights: Tensor | None


@dataclass(frozen=True)
class Solved:
    """New values of one module.

    Attributes:
        values: Parameters or buffers by their name in the module; the relative change of the first
            is reported.
        condition: Estimated 2-norm condition of the solved system; None where none was solved.
        residual: ‖A·X − B‖_F / ‖B‖_F of the solution; None where none was solved.
        damping: What had to be added to the diagonal beyond λ + ε.
    """

    values: Tensors
    condition: float | None = None
    residual: float | None = None
    damping: float = 0.0


class System(ABC):
    """What the sums over all tasks end in: solved for any λ, as often as wanted.

    Attributes:
        rows: Rows of weight above zero that entered it, over all tasks.
    """

    rows: int

    @abstractmethod
    def solve(self, module: PlannedModule, ridge_lambda: float, anchor: Anchor) -> Solved:
        """Solve for one module of the group. The system stays as it is.

        Args:
            module: The module.
            ridge_lambda: λ ≥ 0.
            anchor: Gives what λ pulls the module's tensors towards.

        Raises:
            SingularSystemError: There is no unique solution at this λ.
            NonFiniteError: The solution holds NaN or Inf.
        """


class Sums(ABC):
    """Running sums of one group over batches and tasks; the size depends on widths alone.

    Rows can be summed apart, those held out from those fitted to, by two of these that are shown
    the same batches, each with the row weights of the other's rows set to 0.
    """

    @abstractmethod
    def update(self, batch: BatchFeatures) -> None:
        """Add one batch of the current task."""

    @abstractmethod
    def end_task(self, task: str, parameters: Mapping[str, Tensors]) -> None:
        """Add the current task to the totals. One without a row of weight above 0 adds nothing.

        Args:
            task: Its name, for messages.
            parameters: Its expert's tensors, by module of the group, in the precision of the sums.

        Raises:
            NonFiniteError: The features held NaN or Inf.
        """

    @abstractmethod
    def system(self) -> System:
        """The system of all tasks, which nothing is added to any more; smaller than the sums."""


class Kind(ABC):
    """One kind of module. It holds no state; there is one of each, in :data:`.KINDS`."""

    name: ClassVar[str]
    """What it is called in results."""

    shares_inputs: ClassVar[bool] = False
    """Whether consecutive modules that read the very same tensor form one group."""

    @abstractmethod
    def recognises(self, module: nn.Module) -> bool:
        """Whether a module is of this kind, by its structure."""

    def why_left_out(self, settings: CalibrationSettings) -> str | None:
        """Why the settings leave all modules of this kind at their merged values, or None."""
        return None

    @abstractmethod
    def describe(self, name: str, module: nn.Module, rows: int) -> PlannedModule:
        """What the engine has to know of a module.

        Args:
            name: Its name in the merged model.
            module: The merged model's module.
            rows: Rows of its input for one calibration input.
        """

    def count_rows(self, module: nn.Module, input_shape: tuple[int, ...]) -> int:
        """How many rows there are in the row view of an input of this shape."""
        return math.prod(input_shape[:-1])

    def row_view(self, module: nn.Module, features: Tensor) -> Tensor:
        """A module's input with the features of a row in the last dimension.

        It is what row rules give the weights of.
        """
        return features

    @abstractmethod
    def expert_needs(
        self, modules: Sequence[PlannedModule], settings: CalibrationSettings
    ) -> ExpertNeeds:
        """What of the expert's leader enters the sums of a group of these modules."""

    @abstractmethod
    def cost(self, group: Group) -> Cost:
        """What it takes to calibrate a group."""

    @abstractmethod
    def new_sums(self, group: Group, settings: CalibrationSettings, device: torch.device) -> Sums:
        """Sums of a group that nothing has been added to.

        Args:
            group: The group.
            settings: The settings, of which the precision of the sums is one.
            device: Where they live.
        """


def leaves_of(module: nn.Module) -> tuple[str, ...]:
    """The leaves of a module with a weight and perhaps a bias."""
    has_bias = getattr(module, "bias", None) is not None
    return ("weight", "bias") if has_bias else ("weight",)
