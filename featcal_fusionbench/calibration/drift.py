"""Feature drift: how far a model's features are from each expert's, and where that arises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ForwardError
from .expert_path import ExpertPath, Weights
from .inputs import Inputs, place_inputs
from .results import BlockDrift, TaskDrift
from .rows import RowRule
from .suspended import PauseHooks, SuspendedForward
from .trace import Block, Trace

__all__ = ["all_rows", "final_features", "measure_drift"]


def all_rows(block: str) -> RowRule | None:
    """Every row of every block counts."""
    return None


def final_features(output: Any) -> Tensor:
    """The features that a model's output ends in: pooled ones, else logits, else hidden states."""
    for name in ("pooler_output", "logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    return _hidden(output)


def measure_drift(
    model: nn.Module,
    experts: Mapping[str, Weights],
    data: Mapping[str, Iterable[Inputs]],
    blocks: tuple[Block, ...],
    trace: Trace,
    features: Callable[[Any], Tensor] = final_features,
    rows: Callable[[str], RowRule | None] = all_rows,
) -> tuple[TaskDrift, ...]:
    """Measure the drift of a model from its experts, block by block.

    The final drift of a task is a sum of local mismatches carried forward (arXiv 2605.13030):
    e_{i,L}(x) = Σ_ℓ P_{i,ℓ→L}(x) m_{i,ℓ}(x). Per block this measures its total drift, the local
    mismatch m (the model's block against the expert's on the expert's input), and the rest. All are
    relative to the norm of the expert's features, over all inputs and rows.

    Args:
        model: The merged or calibrated model, in evaluation mode.
        experts: Weights by task.
        data: Held-out batches by task.
        blocks: The blocks in forward order.
        trace: A traced forward of the model.
        features: Picks the final features out of a model's output.
        rows: Row weights by the block's name, ``""`` for the final features; rows of weight 0
            (padding) are left out, all others count alike.

    Returns:
        One entry per task that has inputs.
    """
    path = ExpertPath(model, trace)
    ends = [(block, trace.calls_of(block.name)[0].exit) for block in blocks]
    drifts = []
    with torch.no_grad(), PauseHooks(path.model) as hooks:
        for block in blocks:
            hooks.at_exit(block.name)
        for task, weights in experts.items():
            squares = _Squares(len(blocks))
            for batch in data.get(task, ()):
                inputs = place_inputs(batch, model)
                _measure_batch(
                    model, path, weights, inputs, ends, trace, features, rows, squares, task
                )
            if squares.inputs:
                drifts.append(squares.drift(task, blocks))
    return tuple(drifts)


class _Squares:
    """Sums of squares from which the relative drifts of one task are formed."""

    def __init__(self, blocks: int) -> None:
        self.inputs = 0
        self.final = torch.zeros(2, dtype=torch.float64)
        self.blocks = torch.zeros(blocks, 4, dtype=torch.float64)

    def drift(self, task: str, blocks: tuple[Block, ...]) -> TaskDrift:
        def ratio(part: Tensor, whole: Tensor) -> float:
            return float((part / whole).sqrt()) if whole > 0 else 0.0

        measured = tuple(
            BlockDrift(block.index, block.name, *(ratio(row[k], row[3]) for k in range(3)))
            for block, row in zip(blocks, self.blocks, strict=True)
        )
        return TaskDrift(task, self.inputs, ratio(self.final[0], self.final[1]), measured)


def _measure_batch(
    model: nn.Module,
    path: ExpertPath,
    weights: Weights,
    inputs: Inputs,
    ends: list[tuple[Block, int]],
    trace: Trace,
    features: Callable[[Any], Tensor],
    rows: Callable[[str], RowRule | None],
    squares: _Squares,
    task: str,
) -> None:
    hidden: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(block.name).register_forward_hook(
            lambda _, __, output, name=block.name: hidden.__setitem__(name, _hidden(output))
        )
        for block, _ in ends
    ]
    try:
        final = features(model(**inputs))
    finally:
        for handle in handles:
            handle.remove()

    expert = SuspendedForward(lambda: path.model(**inputs), f"the expert's forward of task {task}")
    try:
        event = -1
        for index, (block, end) in enumerate(ends):
            with path.resident(weights, event, end):
                pause = expert.resume(block.name)
            event = end
            assert pause.last is not None
            args, kwargs = pause.last.args, pause.last.kwargs
            target = _hidden(pause.last.output)
            total = hidden.pop(block.name) - target
            local = _hidden(model.get_submodule(block.name).forward(*args, **kwargs)) - target
            for column, part in enumerate((total, local, total - local, target)):
                squares.blocks[index, column] += _sum_of_squares(part, rows(block.name), inputs)
        with path.resident(weights, event, trace.events + 1):
            reference = features(expert.finish())
    finally:
        expert.close()
    for column, part in enumerate((final - reference, reference)):
        squares.final[column] += _sum_of_squares(part, rows(""), inputs)
    squares.inputs += len(final)


def _hidden(output: Any) -> Tensor:
    """A block's hidden states: transformers 4 returns them in a tuple, 5 mostly as they are."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    hidden = next((value for value in values if isinstance(value, Tensor)), None)
    if hidden is None:
        raise ForwardError(f"an output of type {type(output).__name__} holds no tensor to compare.")
    return hidden


def _sum_of_squares(tensor: Tensor, rule: RowRule | None, inputs: Inputs) -> Tensor:
    if rule is not None:
        tensor = tensor[rule(tensor, inputs) > 0]
    return tensor.to(torch.float64).square().sum().cpu()
