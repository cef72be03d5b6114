"""What paused forwards hold, measured on one input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .inputs import Inputs, place_inputs
from .pauses import Stage, expert_pauses, forward_of, merged_pauses
from .plan import Plan
from .settings import CalibrationSettings

__all__ = ["LiveTensors", "MemoryPerInput", "measure_memory_per_input"]

# Blocks of a stack are alike: the second is the first that has one before it.
_BLOCKS_TRIED = 2


@dataclass(frozen=True)
class MemoryPerInput:
    """Bytes that one calibration input takes.

    Attributes:
        paused: The most that the two paused forwards and the input hold together at any stage.
        running: The most that is alive while one of the forwards runs, and the input.
    """

    paused: int
    running: int


class LiveTensors(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is entered.

    Args:
        known: Tensors whose memory is not counted, though views of them are made.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0
        self.peak = 0
        """The most bytes that were alive after an operation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._known and reference not in self._sizes:
                    self._sizes[reference] = storage.nbytes()
                    self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # counting takes long
            self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        """Bytes that are alive now."""
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self._at_most = sum(self._sizes.values())
        return self._at_most


def measure_memory_per_input(
    plan: Plan, model: nn.Module, example: Inputs, settings: CalibrationSettings
) -> MemoryPerInput:
    """Run one input to the pauses of the plan and count what is alive there.

    The first blocks of each stack are tried, with the model's weights on both paths.

    Args:
        plan: The plan.
        model: A model of the plan's structure, in any precision.
        example: One input.
        settings: The precision of the calibration's forwards.
    """
    plan = replace(plan, stages=tuple(_stages_of_first_blocks(plan)))
    inputs = place_inputs(example, model)
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    held, running = [0] * len(plan.stages), 0
    with torch.no_grad(), settings.forward_precision(next(model.parameters()).device):
        for pauses, is_expert in ((merged_pauses, False), (expert_pauses, True)):
            known = [*given.values(), *model.parameters(), *model.buffers()]
            hooks = pauses(model, plan.stages, plan.blocks, plan.releasable)
            with hooks, LiveTensors(known) as live:
                released = plan.releasable.inputs
                forward = forward_of(model, inputs, "the trial forward", released)
                try:
                    for index, stage in enumerate(plan.stages):
                        if stage.expert_pause is not None or not is_expert:
                            forward.resume(stage.name)
                        held[index] += live.bytes()
                finally:
                    forward.close()
            running = max(running, live.peak)
    whole = sum(value.nbytes for value in given.values())
    kept = sum(v.nbytes for name, v in given.items() if name not in plan.releasable.inputs)
    scale = _working_size(settings) / next(model.parameters()).element_size()
    return MemoryPerInput(round(scale * (max(held) + kept)), round(scale * (running + whole)))


def _working_size(settings: CalibrationSettings) -> int:
    """Bytes of an element outside autocast, whatever precision the model is stored in."""
    return 8 if settings.forward_dtype == "float64" else 4


def _stages_of_first_blocks(plan: Plan) -> Iterator[Stage]:
    tried: dict[str, set[int]] = {}
    for stage in plan.stages:
        if stage.block is not None:
            of_stack = tried.setdefault(stage.block.name.rpartition(".")[0], set())
            if len(of_stack) == _BLOCKS_TRIED and stage.block.index not in of_stack:
                continue
            of_stack.add(stage.block.index)
        yield stage
