"""A plan's stops put in place in a model, and forwards that come to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from .inputs import Inputs
from .plan import Group, Plan, Stage, Stop
from .suspended import StopPoints, SuspendedForward

__all__ = ["expert_stops", "forward_of", "merged_stops"]


@contextmanager
def merged_stops(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Hook the merged model: it hands over the inputs of all groups."""
    with StopPoints(model) as points:
        _let_go(points, plan)
        for stage in plan.stages:
            for group in stage.groups:
                points.capture(group.leader.name, stage.name, output=False)
            _place(points, stage, stage.stop, stage.groups)
        yield


@contextmanager
def expert_stops(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Hook the model that experts run through: it hands over what their Linears see."""
    with StopPoints(model) as points:
        _let_go(points, plan)
        for stage in plan.stages:
            if stage.expert_stop is None:
                continue
            linears = [group for group in stage.groups if not group.is_norm]
            for group in linears:
                points.capture(group.leader.name, stage.name, output=group.route == "output")
            _place(points, stage, stage.expert_stop, linears)
        yield


def forward_of(
    model: nn.Module, inputs: Inputs, label: str, spent: Collection[str] = ()
) -> SuspendedForward:
    """A forward of a hooked model.

    Args:
        model: The model.
        inputs: Its inputs.
        label: Names path, task and batch in error messages.
        spent: Names of inputs that are let go on the way. The forward gets tensors of its own that
            share the data, so that the data are freed once nobody else names them either.
    """
    own = {
        name: value.detach() if name in spent and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    given_up = [own[name] for name in spent if isinstance(own.get(name), Tensor)]
    return SuspendedForward(partial(model, **own), label, spent=given_up)


def _place(points: StopPoints, stage: Stage, stop: Stop, groups: Collection[Group]) -> None:
    if stop.side == "inside":
        points.inside(stop.module, stage.name, [group.leader.name for group in groups])
    elif stop.side == "entry":
        points.at_entry(stop.module, stage.name)
    else:
        points.at_exit(stop.module, stage.name)


def _let_go(points: StopPoints, plan: Plan) -> None:
    if plan.blocks and plan.spent.inputs:
        points.let_go_inputs(plan.blocks[0].name)
    if plan.spent.block_inputs:
        for block in plan.blocks:
            points.let_go_input_of(block.name)
