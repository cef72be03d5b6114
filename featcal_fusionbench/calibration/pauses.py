"""Where the forwards of both paths pause, and the hooks that make them.

For each stage every forward of the merged model pauses once, and so does every forward of the
expert if the stage needs its features. Where, can be told from the leader of the stage's last
group, called "the module" here:

=====================  ==========================  ============================================
the module is          the merged model pauses     the expert pauses
=====================  ==========================  ============================================
in a block, and the    before the module           before the module, or after it where its
plan holds                                         output is needed
outside all blocks     before the module           the same
in a block, and the    before the block, having    the same, up to or through the module; but
plan does not hold     run it in advance up to     for the last stage of the block that needs
                       the module                  the expert: after the block
=====================  ==========================  ============================================

A run in advance hands over what its modules see and is then given up: the forward waits with the
input of the block alone. It goes through the block in earnest once all its modules are solved. An
expert's weights do not change, so that its last run through a block can be the real one.

After a module means before the next one that runs: by then its frames, and what they held, are
gone. It is the module's own exit where none follows, or the next is called more than once.

A stage of norms alone, or any stage at α = 0, needs nothing of the expert, whose forward stays
where it is. With one exception: if that is the first stage of all and a later one needs the expert,
then it runs to the entry of the block, past the embeddings, so that inputs can be released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

from torch import Tensor, nn

from .inputs import Inputs
from .kinds import Group, PlannedModule
from .releasable import Releasable
from .settings import Granularity
from .suspended import PauseHooks, SuspendedForward
from .trace import Block, Call, Trace, block_of

__all__ = ["PausePoint", "Stage", "expert_pauses", "forward_of", "merged_pauses", "plan_stages"]


@dataclass(frozen=True)
class PausePoint:
    """Where a forward pauses to hand over the features of a stage.

    Attributes:
        module: The module at which it pauses.
        side: ``entry`` before that module runs, ``exit`` after; ``in advance`` before it runs, too,
            but after a run in advance as far as the features reach.
        reached: Position in the traced forward at which the features are known.
        resumed: Position from which the forward goes on; earlier than ``reached`` after a run in
            advance.
    """

    module: str
    side: Literal["entry", "exit", "in advance"]
    reached: int
    resumed: int


@dataclass(frozen=True)
class Stage:
    """What is solved at one pause: one group (granularity ``module``), or all of a block's groups.

    Attributes:
        name: Name of the leader, or of the block.
        groups: In forward order.
        block: The block it belongs to; None for a module outside all blocks.
        merged_pause: Where the merged model's forward pauses.
        expert_pause: Where the expert's does; None where it stays where it is.
        flops: Floating-point operations for one calibration input, an estimate: the forwards of
            both paths through the stage's modules, the runs in advance, and the statistics; not
            attention, nor the solves.
    """

    name: str
    groups: tuple[Group, ...]
    block: Block | None
    merged_pause: PausePoint
    expert_pause: PausePoint | None
    flops: float

    @property
    def modules(self) -> Iterator[PlannedModule]:
        """All modules of the stage."""
        return (module for group in self.groups for module in group.modules)


def plan_stages(
    groups: Sequence[Group],
    trace: Trace,
    blocks: tuple[Block, ...],
    granularity: Granularity,
    *,
    holds: bool,
) -> tuple[Stage, ...]:
    """One stage per group, or one per block, with the pauses of both paths.

    Args:
        groups: All groups in forward order.
        trace: The traced forward.
        blocks: Its blocks.
        granularity: How fine the stages are.
        holds: Whether forwards may pause inside blocks.
    """
    planner = _PausePlanner(trace, holds)
    with_expert = any(group.needs_expert for group in groups)
    stages: list[Stage] = []
    for block, members in groupby(groups, lambda group: block_of(group.leader.name, blocks)):
        inside = tuple(members)
        whole = block is not None and granularity == "block"
        parts = [inside] if whole else [(group,) for group in inside]
        needing = [part for part in parts if any(group.needs_expert for group in part)]
        for part in parts:
            last = part[-1]
            merged_pause, expert_pause = planner.merged_pause(last, block), None
            if part in needing:
                expert_pause = planner.expert_pause(last, block, is_last=part == needing[-1])
            elif with_expert and not stages:
                expert_pause = planner.before(last.leader.name if block is None else block.name)
            run = inside[: inside.index(last) + 1]
            flops = sum(map(_flops, part)) + _flops_in_advance(run[:-1], merged_pause)
            if expert_pause is not None:
                through = run if last.expert_needs == "output" else run[:-1]
                flops += _flops_in_advance(through, expert_pause)
            name = block.name if block is not None and whole else last.leader.name
            stages.append(Stage(name, part, block, merged_pause, expert_pause, flops))
    return tuple(stages)


@dataclass(frozen=True)
class _PausePlanner:
    """The rules of this module's docstring."""

    trace: Trace
    holds: bool

    def merged_pause(self, last: Group, block: Block | None) -> PausePoint:
        if block is not None and not self.holds:
            return self._in_advance(block, self._call(last.leader.name).enter)
        return self.before(last.leader.name)

    def expert_pause(self, last: Group, block: Block | None, *, is_last: bool) -> PausePoint:
        """Of a stage that needs the expert, the last one of its block or not."""
        call = self._call(last.leader.name)
        after = last.expert_needs == "output"
        if block is not None and not self.holds:
            if is_last:
                return self._after(self._call(block.name))
            return self._in_advance(block, call.exit if after else call.enter)
        return self._after(call) if after else self.before(call.module)

    def before(self, module: str) -> PausePoint:
        call = self._call(module)
        return PausePoint(module, "entry", call.enter, call.enter)

    def _after(self, call: Call) -> PausePoint:
        following = next((other for other in self.trace.calls if other.enter > call.exit), None)
        if following is None or len(self.trace.calls_of(following.module)) > 1:
            return PausePoint(call.module, "exit", call.exit, call.exit)
        return self.before(following.module)

    def _in_advance(self, block: Block, reached: int) -> PausePoint:
        return PausePoint(block.name, "in advance", reached, self._call(block.name).enter)

    def _call(self, module: str) -> Call:
        (call,) = self.trace.calls_of(module)
        return call


def _flops(group: Group) -> float:
    """Of a group's statistics, and of one forward of each path through it."""
    paths = 2 if group.needs_expert else 1
    return paths * group.cost.forward_flops + group.cost.statistics_flops


def _flops_in_advance(groups: Iterable[Group], pause: PausePoint) -> float:
    """Of the run in advance through these groups, if there is one at this pause."""
    if pause.side != "in advance":
        return 0.0
    return sum(group.cost.forward_flops for group in groups)


@contextmanager
def merged_pauses(
    model: nn.Module, stages: Iterable[Stage], blocks: Sequence[Block], releasable: Releasable
) -> Iterator[None]:
    """Hook the merged model: it hands over the inputs of all groups."""
    with PauseHooks(model) as hooks:
        _release(hooks, blocks, releasable)
        for stage in stages:
            for group in stage.groups:
                hooks.capture(group.leader.name, stage.name, output=False)
            _place(hooks, stage, stage.merged_pause, stage.groups)
        yield


@contextmanager
def expert_pauses(
    model: nn.Module, stages: Iterable[Stage], blocks: Sequence[Block], releasable: Releasable
) -> Iterator[None]:
    """Hook the model that experts run through: it hands over what groups need of them."""
    with PauseHooks(model) as hooks:
        _release(hooks, blocks, releasable)
        for stage in stages:
            if stage.expert_pause is None:
                continue
            needing = [group for group in stage.groups if group.needs_expert]
            for group in needing:
                output = group.expert_needs == "output"
                hooks.capture(group.leader.name, stage.name, output=output)
            _place(hooks, stage, stage.expert_pause, needing)
        yield


def forward_of(
    model: nn.Module, inputs: Inputs, label: str, releasable: Collection[str] = ()
) -> SuspendedForward:
    """A forward of a hooked model.

    Args:
        model: The model.
        inputs: Its inputs.
        label: Names path, task and batch in error messages.
        releasable: Names of inputs that are released on the way. The forward gets tensors of its
            own that share their memory, which is freed once the caller's tensors are gone, too.
    """
    own = {
        name: value.detach() if name in releasable and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    released = [own[name] for name in releasable if isinstance(own.get(name), Tensor)]
    return SuspendedForward(partial(model, **own), label, releasable=released)


def _place(hooks: PauseHooks, stage: Stage, pause: PausePoint, groups: Iterable[Group]) -> None:
    if pause.side == "in advance":
        hooks.in_advance(pause.module, stage.name, [group.leader.name for group in groups])
    elif pause.side == "entry":
        hooks.at_entry(pause.module, stage.name)
    else:
        hooks.at_exit(pause.module, stage.name)


def _release(hooks: PauseHooks, blocks: Sequence[Block], releasable: Releasable) -> None:
    if blocks and releasable.inputs:
        hooks.release_inputs(blocks[0].name)
    if releasable.block_inputs:
        for block in blocks:
            hooks.release_input_of(block.name)
