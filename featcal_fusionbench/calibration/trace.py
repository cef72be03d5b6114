"""One forward, watched: which modules run, in which order, and on which input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PlanError
from .inputs import Inputs, place_inputs

__all__ = [
    "Block",
    "Call",
    "Trace",
    "block_of",
    "blocks_in_order",
    "find_blocks",
    "first_tensor",
    "trace_forward",
]


@dataclass(frozen=True)
class Block:
    """One block of the model: its name and its index in forward order."""

    name: str
    index: int


@dataclass(frozen=True)
class Call:
    """One call of one module.

    Attributes:
        module: Name of the module.
        enter: Position of its start in the sequence of all starts and ends.
        exit: Position of its end.
        input_id: Number that equal input tensors share, or None where no tensor was given.
        input_shape: Shape of that tensor, ``()`` where there was none.
    """

    module: str
    enter: int
    exit: int
    input_id: int | None
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """The calls of one forward in order of their start, and the number of events in all."""

    calls: tuple[Call, ...]
    events: int

    def calls_of(self, module: str) -> tuple[Call, ...]:
        """All calls of one module."""
        return tuple(call for call in self.calls if call.module == module)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among a module's arguments: the input of a Linear or norm."""
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the model's blocks: the items of its outermost ``ModuleList`` s that hold a Linear.

    CLIP's ``encoder.layers.N``, T5's ``encoder.block.N`` and ``decoder.block.N``, a causal model's
    ``layers.N`` are found by this structure alone.
    """

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList):
                holds = [any(isinstance(m, nn.Linear) for m in item.modules()) for item in child]
                yield from (f"{path}.{i}" for i, held in enumerate(holds) if held)
            else:
                yield from walk(child, f"{path}.")

    return tuple(walk(model, ""))


def blocks_in_order(model: nn.Module, trace: Trace) -> tuple[Block, ...]:
    """The blocks that run exactly once, in the order in which they run."""
    names = set(find_blocks(model))
    calls = Counter(call.module for call in trace.calls if call.module in names)
    ordered = [c.module for c in trace.calls if c.module in names and calls[c.module] == 1]
    return tuple(Block(name, index) for index, name in enumerate(ordered))


def block_of(name: str, blocks: Iterable[Block]) -> Block | None:
    """The block that a module belongs to."""
    return next((b for b in blocks if name == b.name or name.startswith(f"{b.name}.")), None)


def trace_forward(model: nn.Module, inputs: Inputs) -> Trace:
    """Run one forward and record every module call.

    Args:
        model: The model, in evaluation mode.
        inputs: Keyword arguments of the forward; one input suffices.

    Raises:
        PlanError: The forward does not run with these inputs.
    """
    starts: list[tuple[str, int, int | None, tuple[int, ...]]] = []
    open_calls: list[int] = []
    ends: dict[int, int] = {}
    seen: list[Tensor] = []  # keeps inputs alive, so that no identity is reused during the forward
    ids: dict[tuple[int, int], int] = {}
    counter = 0

    def on_enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal counter
        tensor = first_tensor(args, kwargs)
        number, shape = None, ()
        if tensor is not None:
            seen.append(tensor)
            # the version tells an input changed in place between two readers from a shared one
            number = ids.setdefault((id(tensor), tensor._version), len(ids))
            shape = tuple(tensor.shape)
        open_calls.append(len(starts))
        starts.append((name, counter, number, shape))
        counter += 1

    def on_exit() -> None:
        nonlocal counter
        ends[open_calls.pop()] = counter
        counter += 1

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if not name:
                continue
            enter = module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: on_enter(name, args, kwargs), with_kwargs=True
            )
            leave = module.register_forward_hook(lambda *_: on_exit())
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        try:
            model(**place_inputs(inputs, model))
        except Exception as error:
            raise PlanError(
                f"a forward of {type(model).__name__} with the inputs {sorted(inputs)} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
    calls = tuple(
        Call(name, enter, ends[i], number, shape)
        for i, (name, enter, number, shape) in enumerate(starts)
    )
    return Trace(calls, counter)
