"""What will be calibrated, in which order and why the rest is not: made from a traced forward."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from .errors import PlanError
from .inputs import Inputs
from .results import ModuleKind, SkippedModule
from .settings import CalibrationSettings, Granularity
from .spent import NOTHING_SPENT, Spent
from .trace import Call, Trace, find_blocks, trace_forward

__all__ = [
    "Block",
    "Group",
    "Plan",
    "PlannedModule",
    "RowRule",
    "RowRules",
    "Stage",
    "Stop",
    "build_plan",
    "uniform_rows",
]


class RowRule(Protocol):
    """Gives the weight r of each row (token) of a module's input; compared by ``==``."""

    def __call__(self, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Weights of shape ``features.shape[:-1]`` for the features of one batch."""
        ...


class RowRules(Protocol):
    """Chooses the row rule of a module; None weighs every row 1."""

    def __call__(self, module: str, block: int | None, blocks: int) -> RowRule | None:
        """The rule of a module of block number ``block`` of ``blocks``."""
        ...


def uniform_rows(module: str, block: int | None, blocks: int) -> RowRule | None:
    """Every row of every module has weight 1."""
    return None


@dataclass(frozen=True)
class PlannedModule:
    """One module to calibrate.

    Attributes:
        name: Its name in the merged model.
        kind: What is solved.
        shape: Shape of its weight: (out, in) of a Linear, (channels,) of a norm.
        has_bias: Whether it has a bias (a Linear's, or a LayerNorm's shift).
        rows: Rows of its input for one calibration input.
    """

    name: str
    kind: ModuleKind
    shape: tuple[int, ...]
    has_bias: bool
    rows: int

    @property
    def in_features(self) -> int:
        """Width of its input."""
        return self.shape[-1]

    @property
    def out_features(self) -> int:
        """Width of its output."""
        return self.shape[0]


@dataclass(frozen=True)
class Group:
    """Modules that read one input tensor and weigh its rows alike: they share one Gram matrix.

    Attributes:
        modules: Linears, or a single norm; the first is the leader, whose input is watched.
        route: For Linears, how Σ C_i W_iᵀ is formed: ``input`` from X_calᵀ X_exp (in × in), or
            ``output`` from X_calᵀ (W_i X_exp) (in × out), the expert's own output. The second is
            cheaper where one Linear narrows its input, and lets the expert run past the module,
            where its forward holds less.
        rule: Row weights; None weighs every row 1.
    """

    modules: tuple[PlannedModule, ...]
    route: Literal["input", "output"]
    rule: RowRule | None = None

    @property
    def leader(self) -> PlannedModule:
        """The module that runs first."""
        return self.modules[0]

    @property
    def is_norm(self) -> bool:
        """Whether the group is a single norm, which needs no expert features."""
        return self.leader.kind != "linear"

    @property
    def out_features(self) -> int:
        """Width of all outputs together."""
        return sum(module.out_features for module in self.modules)

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of one forward through its Linears, for one input."""
        leader = self.leader
        return 0.0 if self.is_norm else 2 * leader.rows * leader.in_features * self.out_features


@dataclass(frozen=True)
class Block:
    """One block of the model: its name and its index in forward order."""

    name: str
    index: int


@dataclass(frozen=True)
class Stop:
    """Where a forward pauses to hand over the features of a stage.

    Attributes:
        module: The module at which it pauses.
        side: ``entry`` before that module runs, ``exit`` after; ``inside`` before it runs, too, but
            after it has been run in advance as far as the features reach, and that run given up.
        reached: Position in the traced forward at which the features are known.
        resumed: Position from which the forward goes on; earlier than ``reached`` for ``inside``.
    """

    module: str
    side: Literal["entry", "exit", "inside"]
    reached: int
    resumed: int


@dataclass(frozen=True)
class Stage:
    """What is solved at one stop: one group (granularity ``module``), or all of a block's groups.

    Attributes:
        name: Name of the leader, or of the block.
        groups: In forward order.
        block: The block it belongs to; None for a module outside all blocks.
        stop: Where the merged model's forward pauses.
        expert_stop: Where the expert's does; None where it stays where it is, since the stage needs
            no expert features.
        flops: Floating-point operations for one calibration input, an estimate: the forwards of
            both paths through the stage's Linears, the runs in advance, and the statistics; not
            attention, nor the solves.
    """

    name: str
    groups: tuple[Group, ...]
    block: Block | None
    stop: Stop
    expert_stop: Stop | None
    flops: float

    @property
    def modules(self) -> Iterator[PlannedModule]:
        """All modules of the stage."""
        return (module for group in self.groups for module in group.modules)


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
        spent: What paused forwards may let go.
    """

    granularity: Granularity
    holds: bool
    stages: tuple[Stage, ...]
    skipped: tuple[SkippedModule, ...]
    blocks: tuple[Block, ...]
    trace: Trace
    spent: Spent = NOTHING_SPENT

    @property
    def modules(self) -> tuple[PlannedModule, ...]:
        """All modules to calibrate, in order."""
        return tuple(module for stage in self.stages for module in stage.modules)

    def without_holding(self) -> Plan:
        """The same calibration by forwards that pause at the entries of blocks."""
        groups = [group for stage in self.stages for group in stage.groups]
        with_expert = any(stage.expert_stop is not None for stage in self.stages)
        planner = _Planner(self.trace, self.blocks, holds=False, with_expert=with_expert)
        return replace(self, holds=False, stages=planner.stages(groups, self.granularity))


def build_plan(
    model: nn.Module,
    example: Inputs,
    settings: CalibrationSettings,
    row_rules: RowRules = uniform_rows,
    spent: Spent = NOTHING_SPENT,
) -> Plan:
    """Trace one forward of the merged model and plan its calibration.

    With ``hold_activations=auto`` the plan holds them; :func:`.estimate.fit_to_memory` decides.

    Args:
        model: The merged model, in evaluation mode.
        example: Inputs of one forward, of one calibration input if possible.
        settings: Which modules, and how fine.
        row_rules: Row weights by module, from the architecture.
        spent: What paused forwards may let go, from the architecture.

    Raises:
        PlanError: Nothing is left to calibrate, a pattern matches no supported module, or the
            forward fails.
    """
    trace = trace_forward(model, example)
    blocks = _blocks_in_order(model, trace)
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
        for group in _split_by_rule(model, run, blocks, row_rules, batch)
    ]
    holds = settings.granularity == "module" and settings.hold_activations != "never"
    with_expert = settings.target_alpha > 0 and not all(group.is_norm for group in groups)
    planner = _Planner(trace, blocks, holds=holds, with_expert=with_expert)
    stages = planner.stages(groups, settings.granularity)
    skipped = tuple(selection.skipped)
    return Plan(settings.granularity, holds, stages, skipped, blocks, trace, spent)


def _blocks_in_order(model: nn.Module, trace: Trace) -> tuple[Block, ...]:
    """The blocks that run exactly once, in the order in which they run."""
    names = set(find_blocks(model))
    calls = Counter(call.module for call in trace.calls if call.module in names)
    ordered = [c.module for c in trace.calls if c.module in names and calls[c.module] == 1]
    return tuple(Block(name, index) for index, name in enumerate(ordered))


def _block_of(name: str, blocks: Iterable[Block]) -> Block | None:
    return next((b for b in blocks if name == b.name or name.startswith(f"{b.name}.")), None)


def _kind(module: nn.Module) -> ModuleKind | None:
    """What a module is to the engine, by structure; None where no closed form is known."""
    if type(module) is nn.Linear:
        return "linear"
    if isinstance(module, nn.LayerNorm):
        return (
            "layer_norm" if module.bias is not None and len(module.normalized_shape) == 1 else None
        )
    weight = getattr(module, "weight", None)
    # transformers' RMSNorms (Llama, Qwen, T5, …) share no base class, but this attribute
    is_rms = isinstance(module, nn.RMSNorm) or hasattr(module, "variance_epsilon")
    is_leaf = isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())
    # a second argument is a gate (Mamba's norms), which the closed form does not know
    is_plain = len(inspect.signature(module.forward).parameters) == 1
    has_gain_only = is_leaf and is_plain and getattr(module, "bias", None) is None
    return "rms_norm" if is_rms and has_gain_only else None


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
        self.chosen: list[tuple[Call, ModuleKind]] = []
        self.skipped: list[SkippedModule] = []
        owners = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        )
        kinds: dict[str, ModuleKind] = {}
        for name, module in model.named_modules():
            parameters = list(module.parameters(recurse=False))
            if not parameters:
                continue
            kind = _kind(module)
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

    def _reason(self, name: str, kind: ModuleKind | None, calls: int) -> str | None:
        """Why a module is skipped, or None."""
        if kind is None:
            return "no closed form for this kind of module"
        excluded = self._matches("exclude", name)
        included = self._matches("include", name)
        if excluded:
            return "excluded by a pattern"
        if self._settings.include and not included:
            return "not included by a pattern"
        if not self._settings.include and _block_of(name, self._blocks) is None:
            return "outside all blocks"
        if self._settings.granularity == "block" and _block_of(name, self._blocks) is None:
            return "outside all blocks (granularity=module can calibrate it)"
        if kind != "linear" and not self._settings.calibrate_norm:
            return "calibrate_norm is off"
        if calls == 0:
            return "not reached by the forward"
        if calls > 1:
            return f"called {calls} times in one forward"
        return None


def _runs_of_one_input(
    chosen: list[tuple[Call, ModuleKind]],
) -> Iterator[list[tuple[Call, ModuleKind]]]:
    """Consecutive Linears with the very same input tensor; each norm on its own."""
    run: list[tuple[Call, ModuleKind]] = []
    for call, kind in chosen:
        shares = (
            run
            and kind == run[-1][1] == "linear"
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
    run: list[tuple[Call, ModuleKind]],
    blocks: tuple[Block, ...],
    row_rules: RowRules,
    batch: int,
) -> Iterator[Group]:
    """Groups of a run: modules that weigh the rows alike stay together, in forward order."""
    rules: list[tuple[RowRule | None, list[PlannedModule]]] = []
    for call, kind in run:
        block = _block_of(call.module, blocks)
        rule = row_rules(call.module, None if block is None else block.index, len(blocks))
        module = model.get_submodule(call.module)
        planned = PlannedModule(
            name=call.module,
            kind=kind,
            shape=tuple(module.get_parameter("weight").shape),
            has_bias=getattr(module, "bias", None) is not None,
            rows=math.prod(call.input_shape[:-1]) // batch,
        )
        for known, members in rules:
            if known == rule:
                members.append(planned)
                break
        else:
            rules.append((rule, [planned]))
    for rule, members in rules:
        narrows = len(members) == 1 and members[0].out_features <= members[0].in_features
        yield Group(tuple(members), "output" if narrows else "input", rule)


class _Planner:
    """Makes stages of groups: who pauses where.

    Args:
        trace: The traced forward.
        blocks: Its blocks.
        holds: Whether forwards may pause inside blocks.
        with_expert: Whether the experts' features are needed.
    """

    def __init__(
        self, trace: Trace, blocks: tuple[Block, ...], *, holds: bool, with_expert: bool
    ) -> None:
        self._trace, self._blocks = trace, blocks
        self._holds, self._with_expert = holds, with_expert

    def stages(self, groups: Iterable[Group], granularity: Granularity) -> tuple[Stage, ...]:
        """One stage per group, or one per block."""
        stages: list[Stage] = []
        for block, members in groupby(groups, lambda g: _block_of(g.leader.name, self._blocks)):
            inside = tuple(members)
            whole = block.name if granularity == "block" and block is not None else None
            parts = [inside] if whole else [(group,) for group in inside]
            needing = [part for part in parts if not all(group.is_norm for group in part)]
            for part in parts:
                last = part[-1]
                stop, expert_stop = self._stop(last, block, "input"), None
                if self._with_expert and part in needing:
                    is_last = part is needing[-1]
                    expert_stop = self._expert_stop(last, block, is_last_of_block=is_last)
                elif self._with_expert and not stages:
                    # past the embeddings, so that the inputs can be let go
                    expert_stop = self._before(last.leader.name if block is None else block.name)
                run = inside[: inside.index(last) + 1]
                flops = sum(map(self._flops, part)) + _flops_in_advance(run, stop, "input")
                if expert_stop is not None:
                    flops += _flops_in_advance(run, expert_stop, last.route)
                stages.append(
                    Stage(whole or last.leader.name, part, block, stop, expert_stop, flops)
                )
        return tuple(stages)

    def _before(self, module: str) -> Stop:
        (call,) = self._trace.calls_of(module)
        return Stop(module, "entry", call.enter, call.enter)

    def _stop(self, last: Group, block: Block | None, needed: Literal["input", "output"]) -> Stop:
        """Where the last group's input, or its output, is known and the forward may pause."""
        (call,) = self._trace.calls_of(last.leader.name)
        if block is not None and not self._holds:
            (entry,) = (call.enter for call in self._trace.calls_of(block.name))
            reached = call.enter if needed == "input" else call.exit
            return Stop(block.name, "inside", reached, entry)
        return self._before(call.module) if needed == "input" else self._after(call)

    def _expert_stop(self, last: Group, block: Block | None, *, is_last_of_block: bool) -> Stop:
        """The expert's stop. Its weights stay, so that its last run of a block is the real one."""
        if block is not None and not self._holds and is_last_of_block:
            (call,) = self._trace.calls_of(block.name)
            return self._after(call)
        return self._stop(last, block, last.route)

    def _after(self, call: Call) -> Stop:
        """Where the next module is about to run: what the call's frames held is gone by then."""
        following = next((other for other in self._trace.calls if other.enter > call.exit), None)
        if following is None or len(self._trace.calls_of(following.module)) > 1:
            return Stop(call.module, "exit", call.exit, call.exit)
        return Stop(following.module, "entry", following.enter, following.enter)

    def _flops(self, group: Group) -> float:
        """Of a group's statistics, and of one forward of each path through it."""
        rows, width = group.leader.rows, group.leader.in_features
        if group.is_norm:
            return 4 * rows * width
        cross = width if group.route == "input" else group.out_features
        paths = 2 if self._with_expert else 1
        return paths * group.forward_flops + 2 * rows * width * (0.6 * width + cross)


def _flops_in_advance(
    groups: tuple[Group, ...], stop: Stop, needed: Literal["input", "output"]
) -> float:
    """Of the run in advance through some groups of a block, as far as ``needed`` of the last."""
    if stop.side != "inside":
        return 0.0
    run = groups if needed == "output" else groups[:-1]
    return sum(group.forward_flops for group in run)
