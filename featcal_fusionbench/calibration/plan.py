"""What will be calibrated, in which order and why the rest is not: made from a traced forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from .errors import PlanError
from .inputs import Inputs
from .kinds import Group, Kind, PlannedModule, kind_of
from .pauses import Stage, plan_stages
from .releasable import NOTHING_RELEASABLE, Releasable
from .results import SkippedModule
from .rows import RowRule, RowRules, uniform_rows
from .settings import CalibrationSettings, Granularity
from .trace import Block, Call, Trace, block_of, blocks_in_order, trace_forward

__all__ = ["Plan", "build_plan"]


@dataclass(frozen=True)
class Plan:
    """The stages in forward order, what is left out, and the trace they were made from.

    Attributes:
        granularity: How fine the stages are.
        holds: Whether forwards pause inside blocks and hold what is alive there. Otherwise they
            pause at the entries of blocks, hold a block's input alone, and run the block in advance
            for each of its stages: slower, the same result. Granularity ``block`` never holds.
        stages: What is solved, in forward order.
        skipped: What keeps its merged values.
        blocks: All blocks in forward order.
        trace: The traced forward.
        releasable: What paused forwards may release.
    """

    granularity: Granularity
    holds: bool
    stages: tuple[Stage, ...]
    skipped: tuple[SkippedModule, ...]
    blocks: tuple[Block, ...]
    trace: Trace
    releasable: Releasable = NOTHING_RELEASABLE

    @property
    def modules(self) -> tuple[PlannedModule, ...]:
        """All modules to calibrate, in order."""
        return tuple(module for stage in self.stages for module in stage.modules)

    def without_holding(self) -> Plan:
        """The same calibration by forwards that pause at the entries of blocks."""
        groups = [group for stage in self.stages for group in stage.groups]
        stages = plan_stages(groups, self.trace, self.blocks, self.granularity, holds=False)
        return replace(self, holds=False, stages=stages)


def build_plan(
    model: nn.Module,
    example: Inputs,
    settings: CalibrationSettings,
    row_rules: RowRules = uniform_rows,
    releasable: Releasable = NOTHING_RELEASABLE,
) -> Plan:
    """Trace one forward of the merged model and plan its calibration.

    With ``hold_activations=auto`` the plan holds them; :func:`.estimate.fit_to_memory` decides.

    Args:
        model: The merged model, in evaluation mode.
        example: Inputs of one forward, of one calibration input if possible.
        settings: Which modules, and how fine.
        row_rules: Row weights by module, from the architecture.
        releasable: What paused forwards may release, from the architecture.

    Raises:
        PlanError: Nothing is left to calibrate, a pattern matches no supported module, or the
            forward fails.
    """
    trace = trace_forward(model, example)
    blocks = blocks_in_order(model, trace)
    selection = _Selection(model, trace, blocks, settings)
    if not selection.chosen:
        first = {skipped.reason: skipped.name for skipped in reversed(selection.skipped)}
        raise PlanError(
            "no module is left to calibrate. Check include and exclude; reasons: "
            + "; ".join(f"{reason}, e.g. {name}" for reason, name in reversed(first.items()))
        )
    batch = next((call.input_shape[0] for call in trace.calls if call.input_shape), 1)
    groups = [
        group
        for run in _runs_of_one_input(selection.chosen)
        for group in _split_by_rule(model, run, blocks, row_rules, settings, batch)
    ]
    holds = settings.granularity == "module" and settings.hold_activations != "never"
    stages = plan_stages(groups, trace, blocks, settings.granularity, holds=holds)
    skipped = tuple(selection.skipped)
    return Plan(settings.granularity, holds, stages, skipped, blocks, trace, releasable)


class _Selection:
    """Sorts the modules that hold parameters into chosen and skipped."""

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        blocks: tuple[Block, ...],
        settings: CalibrationSettings,
    ) -> None:
        self._settings = settings
        self._blocks = blocks
        self._used: set[str] = set()
        self.chosen: list[tuple[Call, Kind]] = []
        self.skipped: list[SkippedModule] = []
        owners = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        )
        kinds: dict[str, Kind] = {}
        for name, module in model.named_modules():
            parameters = list(module.parameters(recurse=False))
            if not parameters:
                continue
            kind = kind_of(module)
            calls = trace.calls_of(name)
            reason = self._reason(name, kind, len(calls))
            if reason is None and any(owners[id(p)] > 1 for p in parameters):
                reason = "shares its weight with another module"
            if reason is None and kind is not None:
                kinds[name] = kind
            else:
                self.skipped.append(SkippedModule(name, type(module).__name__, reason or ""))
        self.chosen = [(call, kinds[call.module]) for call in trace.calls if call.module in kinds]
        for which in ("include", "exclude"):
            for pattern in getattr(settings, which):
                if f"{which}:{pattern}" not in self._used:
                    raise PlanError(
                        f"{which}: the pattern {pattern!r} matches no module that can be "
                        "calibrated. Names look like "
                        + ", ".join(call.module for call, _ in self.chosen[:3] or ())
                        + "; patterns are regular expressions searched in them."
                    )

    def _matches(self, which: Literal["include", "exclude"], name: str) -> bool:
        hit = [p for p in getattr(self._settings, which) if re.search(p, name)]
        self._used.update(f"{which}:{pattern}" for pattern in hit)
        return bool(hit)

    def _reason(self, name: str, kind: Kind | None, calls: int) -> str | None:
        """Why a module is skipped, or None."""
        if kind is None:
            return "no closed form for this kind of module"
        excluded = self._matches("exclude", name)
        included = self._matches("include", name)
        if excluded:
            return "excluded by a pattern"
        if self._settings.include and not included:
            return "not included by a pattern"
        if not self._settings.include and block_of(name, self._blocks) is None:
            return "outside all blocks"
        if self._settings.granularity == "block" and block_of(name, self._blocks) is None:
            return "outside all blocks (granularity=module can calibrate it)"
        if reason := kind.why_left_out(self._settings):
            return reason
        if calls == 0:
            return "not reached by the forward"
        if calls > 1:
            return f"called {calls} times in one forward"
        return None


def _runs_of_one_input(
    chosen: list[tuple[Call, Kind]],
) -> Iterator[list[tuple[Call, Kind]]]:
    """Consecutive modules of one kind with the very same input tensor, where the kind shares it."""
    run: list[tuple[Call, Kind]] = []
    for call, kind in chosen:
        shares = (
            run
            and kind.shares_inputs
            and kind is run[-1][1]
            and call.input_id is not None
            and call.input_id == run[-1][0].input_id
        )
        if run and not shares:
            yield run
            run = []
        run.append((call, kind))
    if run:
        yield run


def _split_by_rule(
    model: nn.Module,
    run: list[tuple[Call, Kind]],
    blocks: tuple[Block, ...],
    row_rules: RowRules,
    settings: CalibrationSettings,
    batch: int,
) -> Iterator[Group]:
    """Groups of a run: modules that weigh the rows alike stay together, in forward order."""
    rules: list[tuple[RowRule | None, list[PlannedModule]]] = []
    for call, kind in run:
        block = block_of(call.module, blocks)
        rule = row_rules(call.module, None if block is None else block.index, len(blocks))
        module = model.get_submodule(call.module)
        rows = kind.count_rows(module, call.input_shape) // batch
        planned = kind.describe(call.module, module, rows)
        for known, members in rules:
            if known == rule:
                members.append(planned)
                break
        else:
            rules.append((rule, [planned]))
    for rule, members in rules:
        expert_needs = members[0].kind.expert_needs(members, settings)
        yield Group(tuple(members), expert_needs, rule)
