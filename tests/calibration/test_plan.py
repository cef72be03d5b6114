"""What is calibrated, in which order and groups, and why the rest is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny import (
    MODES,
    TOY_MODULES,
    Toy,
    clip,
    clip_modules,
    family,
    gpt2,
    hooks_of,
    images,
    llama,
    mask_rows,
    t5,
    text,
    toy_inputs,
)
from torch import Tensor, nn

from featcal_fusionbench.architectures.clip_vision import ClassTokenRows, clip_vision_rows
from featcal_fusionbench.calibration import (
    CalibrationSettings,
    ForwardError,
    NonFiniteError,
    Plan,
    PlanError,
    Releasable,
    SilentObserver,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.estimate import (
    Estimate,
    Fit,
    estimate_cost,
    fit_to_memory,
    measure_matmul_rate,
)
from featcal_fusionbench.calibration.memory import LiveTensors, measure_memory_per_input
from featcal_fusionbench.calibration.trace import find_blocks, trace_forward


def plan_toy(model: nn.Module | None = None, **settings: Any) -> Plan:
    model = Toy() if model is None else model
    return build_plan(model, toy_inputs(1, "a"), CalibrationSettings(**settings))


def reasons(plan: Plan) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in plan.skipped}


def groups(plan: Plan, below: str) -> list[tuple[list[str], str]]:
    """Names (without the prefix) and what is needed of the expert, by group below a prefix."""
    return [
        ([module.name.removeprefix(below) for module in group.modules], group.expert_needs)
        for stage in plan.stages
        for group in stage.groups
        if group.leader.name.startswith(below)
    ]


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_order_kinds_shapes(granularity: Any) -> None:
    plan = plan_toy(granularity=granularity)
    assert [m.name for m in plan.modules] == [n for names in TOY_MODULES for n in names]
    assert [b.name for b in plan.blocks] == ["blocks.0", "blocks.1"]
    by_name = {m.name: m for m in plan.modules}
    norm1, norm2, gate, down = (
        by_name[f"blocks.1.{n}"] for n in ("norm1", "norm2", "gate", "down")
    )
    assert (norm1.kind.name, norm1.shape, norm1.has_bias) == ("rms_norm", (6,), False)
    assert (norm2.kind.name, norm2.shape, norm2.has_bias) == ("layer_norm", (6,), True)
    assert (gate.kind.name, gate.shape, gate.has_bias) == ("linear", (10, 6), True)
    assert (down.in_features, down.out_features) == (10, 6)
    assert not by_name["blocks.0.up"].has_bias
    assert all(m.rows == 4 for m in plan.modules)
    assert reasons(plan) == {"embed": "outside all blocks", "head": "outside all blocks"}
    assert {s.type for s in plan.skipped} == {"Linear"}
    if granularity == "block":
        assert [stage.name for stage in plan.stages] == ["blocks.0", "blocks.1"]
    else:
        assert all(len(stage.groups) == 1 for stage in plan.stages)
        assert all(stage.name == stage.groups[0].leader.name for stage in plan.stages)
    assert [stage.block for stage in plan.stages if stage.block is None] == []


def test_rows_are_per_input_even_if_the_example_is_a_batch() -> None:
    plan = build_plan(Toy(), toy_inputs(3, "a"), CalibrationSettings())
    assert {m.rows for m in plan.modules} == {4}


def test_linears_of_one_input_form_a_group() -> None:
    plan = plan_toy()
    assert groups(plan, "blocks.0.") == [
        (["norm1"], "nothing"),
        (["attention.q", "attention.k", "attention.v"], "input"),
        (["attention.out"], "output"),
        (["norm2"], "nothing"),
        (["gate", "up"], "input"),
        (["down"], "output"),
    ]


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_queries_are_weighed_apart_in_the_last_block_of_clip(granularity: Any) -> None:
    model = clip(layers=3).double()
    settings = CalibrationSettings(granularity=granularity)
    rules = clip_vision_rows(0.01)
    plan = build_plan(model, images(1, "a"), settings, rules)
    blocks = [names[0].removesuffix("layer_norm1") for names in clip_modules(model)]
    inner = [
        (["layer_norm1"], "nothing"),
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "input"),
        (["self_attn.out_proj"], "output"),
        (["layer_norm2"], "nothing"),
        (["mlp.fc1"], "input"),
        (["mlp.fc2"], "output"),
    ]
    for block in blocks[:2]:
        found = groups(plan, block)
        # transformers has called query, key and value in more than one order
        assert [(sorted(names), needs) for names, needs in found] == [
            (sorted(names), needs) for names, needs in inner
        ]
    last = [(sorted(names), needs) for names, needs in groups(plan, blocks[2])]
    assert (["self_attn.q_proj"], "output") in last
    assert (["self_attn.k_proj", "self_attn.v_proj"], "input") in last
    assert len(last) == 7
    rule_of = {
        module.name.removeprefix(blocks[2]): group.rule
        for stage in plan.stages
        for group in stage.groups
        for module in group.modules
        if module.name.startswith(blocks[2])
    }
    unweighted = {name for name, rule in rule_of.items() if rule is None}
    assert unweighted == {"self_attn.k_proj", "self_attn.v_proj"}
    assert set(rule_of.values()) == {None, ClassTokenRows(0.01)}
    weights = ClassTokenRows(0.01)(torch.zeros(2, 5, 3), {})
    assert torch.equal(weights, torch.tensor([[1, 0.01, 0.01, 0.01, 0.01]]).expand(2, 5))


def test_equal_weights_need_no_rule() -> None:
    plan = build_plan(clip().double(), images(1, "a"), CalibrationSettings(), clip_vision_rows(1.0))
    assert all(group.rule is None for stage in plan.stages for group in stage.groups)


class Twisted(nn.Module):
    """One module for every reason to be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.ModuleDict(self._block()) for _ in range(2)])
        self.layers[0]["tied"].weight = self.embed.weight

    @staticmethod
    def _block() -> dict[str, nn.Module]:
        return {
            "once": nn.Linear(6, 6), "twice": nn.Linear(6, 6), "never": nn.Linear(6, 6),
            "tied": nn.Linear(6, 6), "conv": nn.Conv1d(4, 4, 1), "scaled": nn.Bilinear(6, 6, 6),
            "bare": nn.LayerNorm(6, bias=False), "flat": nn.LayerNorm((4, 6)),
            "fixed": nn.LayerNorm(6, elementwise_affine=False), "norm": nn.LayerNorm(6),
        }  # fmt: skip

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer["twice"](layer["twice"](layer["once"](x)))
            for name in ("tied", "conv", "bare", "flat", "fixed", "norm"):
                x = layer[name](x)
        return x


def test_blocks_that_nobody_calls_are_no_blocks() -> None:
    # `layers.0` and `layers.1` only hold modules
    with pytest.raises(PlanError, match="outside all blocks, e.g. embed"):
        plan_toy(Twisted().double())


def test_every_skipped_module_has_its_reason() -> None:
    model = Twisted().double()
    inside = {"include": ("layers",), "granularity": "module"}
    plan = plan_toy(model, exclude=(r"layers\.1\.once",), **inside)
    found = reasons(plan)
    assert found["embed"] == "not included by a pattern"
    assert found["layers.1.once"] == "excluded by a pattern"
    assert found["layers.0.twice"] == "called 2 times in one forward"
    assert found["layers.0.never"] == "not reached by the forward"
    assert found["layers.0.tied"] == "shares its weight with another module"
    assert "layers.1.tied" not in found
    no_form = {"conv", "bare", "flat", "scaled"}
    assert {n.split(".")[2] for n, r in found.items() if r.startswith("no closed form")} == no_form
    assert not [name for name in found if "fixed" in name]  # it has no parameters
    assert [m.name for m in plan.modules] == [
        "layers.0.once", "layers.0.norm", "layers.1.tied", "layers.1.norm"
    ]  # fmt: skip
    off = reasons(plan_toy(model, calibrate_norm=False, **inside))
    assert off["layers.0.norm"] == "calibrate_norm is off"
    holders = [n for n, m in model.named_modules() if list(m.parameters(recurse=False))]
    for result in (found, off):
        assert set(result) < set(holders)
    assert {*found, *(m.name for m in plan.modules)} == set(holders)


def test_modules_outside_blocks_need_granularity_module() -> None:
    plan = plan_toy(include=("head", "gate"))
    head = plan.stages[-1]
    assert head.name == "head" and head.block is None
    block = plan_toy(include=("head", "gate"), granularity="block")
    assert [m.name for m in block.modules] == ["blocks.0.gate", "blocks.1.gate"]
    assert reasons(block)["head"] == "outside all blocks (granularity=module can calibrate it)"
    with pytest.raises(PlanError, match="no module is left.*granularity=module"):
        plan_toy(include=("head",), granularity="block")


@pytest.mark.parametrize("which", ["include", "exclude"])
def test_a_pattern_without_a_match_is_named(which: str) -> None:
    with pytest.raises(PlanError, match=rf"{which}: the pattern 'fc\[9\]' matches no module"):
        plan_toy(**{which: ("gate", "fc[9]")})


def test_exclude_may_match_what_include_leaves_out() -> None:
    plan = plan_toy(include=("gate",), exclude=("down",))
    assert [m.name for m in plan.modules] == ["blocks.0.gate", "blocks.1.gate"]


@pytest.mark.parametrize(
    "settings", [{"exclude": (".",)}, {"include": ("gate",), "exclude": ("g",)}]
)
def test_an_empty_plan_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="no module is left to calibrate.*excluded by a pattern"):
        plan_toy(**settings)


def test_a_forward_that_fails_is_named_and_leaves_no_hook() -> None:
    model = Toy()
    with pytest.raises(
        PlanError, match=r"forward of Toy with the inputs \['y'\] failed: TypeError"
    ):
        build_plan(model, {"y": torch.ones(1)}, CalibrationSettings())
    assert not hooks_of(model)
    plan_toy(model.double())
    assert not hooks_of(model)


def test_a_model_of_conv1d_only_has_no_plan_but_its_norms_can_be_asked_for() -> None:
    model = gpt2().eval()
    inputs = text([4], "a")
    with pytest.raises(PlanError, match="no closed form for this kind of module"):
        build_plan(model, inputs, CalibrationSettings())
    plan = build_plan(model, inputs, CalibrationSettings(include=(r"ln_\d",)))
    assert [m.kind.name for m in plan.modules] == ["layer_norm"] * 4
    assert reasons(plan)["lm_head"] == "not included by a pattern"
    heads = CalibrationSettings(include=("",))
    tied = reasons(build_plan(model, inputs, heads))
    assert tied["lm_head"] == "shares its weight with another module"


def test_grouped_query_attention() -> None:
    model = llama().double()
    plan = build_plan(model, text([4], "a"), CalibrationSettings(), mask_rows)
    shapes = {m.name.rpartition(".")[2]: m.shape for m in plan.modules}
    assert (shapes["q_proj"], shapes["k_proj"], shapes["v_proj"]) == ((16, 16), (8, 16), (8, 16))
    assert groups(plan, "model.layers.0.self_attn.")[0][1] == "input"
    assert len(groups(plan, "model.layers.0.self_attn.")) == 2
    kinds = [m.kind.name for m in plan.modules if "norm" in m.name]
    assert kinds == ["rms_norm"] * 4


def test_blocks_are_found_by_structure() -> None:
    model = nn.Module()
    model.tower = nn.Module()
    model.tower.layers = nn.ModuleList(
        [nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])), nn.ReLU()]
    )
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.convs = nn.ModuleList([nn.Conv2d(1, 1, 1)])
    assert find_blocks(model) == ("tower.layers.0", "heads.0", "heads.1")


class Versioned(nn.Module):
    """Changes its input in place between two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({n: nn.Linear(3, 3) for n in "abc"})])

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        a = block["a"](x)
        b = block["b"](x)
        x += 1
        return a + b + block["c"](x)


def test_an_input_changed_in_place_is_another_input() -> None:
    settings = CalibrationSettings(include=("blocks",))
    plan = build_plan(Versioned(), {"x": torch.ones(1, 3)}, settings)
    assert [names for names, _ in groups(plan, "blocks.0.")] == [["a", "b"], ["c"]]


# --- forwards that do not follow the trace ---------------------------------------------------


class Moody(nn.Module):
    """Runs its modules in an order, or leaves one out, as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MoodyBlock(), MoodyBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MoodyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mood = float(x.detach().flatten()[0].round())
        if mood == 100:  # leaves b out
            return x + 0 * self.c(torch.tanh(self.a(x)))
        if mood == 200:  # another order
            return x + 0 * self.a(torch.tanh(self.c(torch.tanh(self.b(x)))))
        if mood == 300:  # b twice
            return x + 0 * self.c(torch.tanh(self.b(self.b(torch.tanh(self.a(x))))))
        return x + 0 * self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("granularity", ["module", "block"])
@pytest.mark.parametrize("mood", [100.0, 200.0, 300.0])
@pytest.mark.parametrize("only", [None, "b", "c"])
def test_order_that_depends_on_the_input(granularity: Any, mood: float, only: str | None) -> None:
    models = family(Moody(), tasks=("calm", "moody"))
    calm = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    calm[0, 0, 0] = 0
    moody = calm.clone()
    moody[0, 0, 0] = mood
    data = {"calm": [{"x": calm}], "moody": [{"x": calm}, {"x": moody}]}
    model = models.copy()
    include = () if only is None else (rf"\.{only}$",)
    follows = (mood, only) in {(100, "c"), (300, "c"), (200, "c")} or (
        # the steps of a block are not told apart there
        granularity == "block" and mood == 200
    )
    if follows:
        models.calibrate(data, granularity=granularity, include=include)
        return
    # Where the expert alone goes another way, it runs into tensors that are not there.
    error = NonFiniteError if (mood, only) == (200, "b") else ForwardError
    with pytest.raises(error, match="task moody") as caught:
        models.calibrate(data, model=model, granularity=granularity, include=include)
    if error is ForwardError:
        assert re.search("batch 1 .*Exclude the modules", str(caught.value))
    assert not hooks_of(model)


# --- what it will cost -----------------------------------------------------------------------


def flops_of(plan: Plan) -> float:
    return sum(stage.flops for stage in plan.stages)


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_flops_are_positive_and_grow(granularity: Any) -> None:
    small, large = Toy(6, 10), Toy(6, 20)
    plans = [plan_toy(model.double(), granularity=granularity) for model in (small, large)]
    flops = [flops_of(plan) for plan in plans]
    assert 0 < flops[0] < flops[1]
    assert all(stage.flops > 0 for plan in plans for stage in plan.stages)
    assert flops_of(plan_toy(small, granularity=granularity, exclude=("down",))) < flops[0]
    # at least the two forwards and one Gram product
    linear = sum(
        2 * m.rows * m.in_features * m.out_features
        for m in plans[0].modules
        if m.kind.name == "linear"
    )
    assert 2 * linear < flops[0] < 12 * linear


def test_flops_of_runs_in_advance_are_counted() -> None:
    attention, out, gated = 3 * 2 * 4 * 6 * 6, 2 * 4 * 6 * 6, 2 * 2 * 4 * 6 * 10
    usual = flops_of(plan_toy())
    # in each of two blocks, for out, norm2, gate and up, down
    merged = attention + 2 * (attention + out) + (attention + out + gated)
    # for out, gate and up; its last run of a block is the real one
    expert = (attention + out) + (attention + out)
    apart = flops_of(plan_toy(hold_activations="never"))
    assert apart - usual == pytest.approx(2 * (merged + expert))
    block = flops_of(plan_toy(granularity="block"))
    assert block - usual == pytest.approx(2 * (attention + out + gated))


def test_a_plan_that_does_not_hold_is_what_the_setting_makes() -> None:
    holding = plan_toy(hold_activations="auto")
    assert holding.holds and plan_toy(hold_activations="always") == holding
    never = plan_toy(hold_activations="never")
    assert not never.holds and holding.without_holding() == never
    assert not plan_toy(granularity="block", hold_activations="always").holds
    pauses = [stage.merged_pause for stage in never.stages]
    assert {(pause.module, pause.side) for pause in pauses} == {
        ("blocks.0", "in advance"), ("blocks.1", "in advance")
    }  # fmt: skip
    # the inputs can be released after the first stage, a norm's, since both paths are past them
    first = never.stages[0].expert_pause
    assert first is not None and (first.module, first.side) == ("blocks.0", "entry")
    last = [stage.expert_pause for stage in never.stages if stage.name.endswith("down")]
    assert [(pause.module, pause.side) for pause in last if pause] == [
        ("blocks.1", "entry"), ("head", "entry")
    ]  # fmt: skip


# --- what it will hold -----------------------------------------------------------------------


MEASURED: dict[str, Any] = {
    "clip": (clip, lambda: images(1, "a"), Releasable(("pixel_values",), block_inputs=True)),
    "llama": (llama, lambda: {k: v for k, v in text([4], "a").items() if k != "position_ids"},
              Releasable(block_inputs=True)),
    "t5": (t5, lambda: {"input_ids": text([5], "a")["input_ids"],
                        "attention_mask": torch.ones(1, 5, dtype=torch.long),
                        "decoder_input_ids": text([3], "b")["input_ids"]},
           Releasable(block_inputs=True)),
    "toy": (Toy, lambda: toy_inputs(1, "a"), Releasable()),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_what_is_held_grows_by_the_input_as_measured_on_one(
    name: str, mode: dict[str, Any]
) -> None:
    """The estimate's measurement against the memory that whole calibrations hold."""
    make, inputs, releasable = MEASURED[name]
    models = family(make(), tasks=("a", "b"))
    settings = CalibrationSettings(**mode, forward_dtype="float64")
    example = inputs()
    plan = build_plan(models.merged, example, settings, releasable=releasable)

    def live_at_steps(count: int) -> list[int]:
        model, live, steps = models.copy(), LiveTensors(), []

        class Watch(SilentObserver):
            def on_step(self, block: str, module: str, task: str, flops: float) -> None:
                if task == "b":
                    steps.append(live.bytes())

        class Fresh:
            """Inputs that the calibration alone holds."""

            def __iter__(self) -> Any:
                for _ in range(count):
                    yield {key: value.clone() for key, value in example.items()}

        data = {task: Fresh() for task in models.experts}
        with live:
            calibrate(model, models.base, models.weights, data, plan, settings, observer=Watch())
        return steps

    few, many = live_at_steps(1), live_at_steps(3)
    grown = [(more - less) / (2 * 2) for less, more in zip(few, many, strict=True)]
    memory = measure_memory_per_input(plan, models.merged, example, settings)
    assert max(grown) == memory.paused
    assert memory.running > 0
    if name == "clip" and not plan.holds:
        # after the first stages nothing but the residual stream of both paths
        assert set(grown[1:]) == {2 * 5 * 16 * 8}


def test_holding_takes_several_times_as_much() -> None:
    model, settings = clip(layers=3), CalibrationSettings()
    plan = build_plan(model, images(1, "a"), settings, releasable=MEASURED["clip"][2])
    holding, not_holding = (
        measure_memory_per_input(of, model, images(1, "a"), settings)
        for of in (plan, plan.without_holding())
    )
    assert holding.paused > 2 * not_holding.paused
    assert not hooks_of(model)


def estimate_toy(**settings: Any) -> Estimate:
    tasks = settings.pop("tasks", 3)
    chosen = CalibrationSettings(**settings)
    model, example = Toy(), toy_inputs(1, "a")
    example["x"] = example["x"].float()
    plan = build_plan(model, example, chosen)
    return estimate_cost(plan, model, example, chosen, tasks=tasks, flops_per_second=1e9)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_estimate_grows_with_what_costs(mode: dict[str, Any]) -> None:
    usual, more = estimate_toy(**mode), estimate_toy(**mode, tasks=6)
    assert 0 < usual.flops < more.flops and usual.seconds < more.seconds
    assert more.activation_bytes == pytest.approx(2 * usual.activation_bytes, rel=0.01)
    assert more.sums_bytes == usual.sums_bytes > 0 and more.working_bytes == usual.working_bytes
    assert estimate_toy(**mode, statistics_dtype="float64").sums_bytes == 2 * usual.sums_bytes
    double = estimate_toy(**mode, forward_dtype="float64").activation_bytes
    assert double == pytest.approx(2 * usual.activation_bytes, rel=0.01)
    assert estimate_toy(**mode, n_samples=512).activation_bytes > usual.activation_bytes
    assert estimate_toy(**mode, batch_size=64).working_bytes > usual.working_bytes
    if mode == MODES[0]:
        half = estimate_toy(**mode, forward_dtype="bfloat16").activation_bytes
        assert half < usual.activation_bytes
    parts = usual.activation_bytes + usual.working_bytes + usual.sums_bytes + usual.model_bytes
    assert usual.memory_bytes == parts
    assert usual.share_that_fits(usual.memory_bytes) == pytest.approx(1)
    assert usual.share_that_fits(0) == 0
    assert measure_matmul_rate("cpu", size=32, repeats=1) > 0


def fit_toy(available: float, **settings: Any) -> Fit:
    chosen = CalibrationSettings(**settings)
    model, example = Toy().double(), toy_inputs(1, "a")
    plan = build_plan(model, example, chosen)
    return fit_to_memory(
        plan, model, example, chosen, tasks=3, flops_per_second=1e9, available_bytes=int(available)
    )


def test_activations_are_held_as_long_as_the_memory_suffices() -> None:
    plenty = fit_toy(2**40)
    assert plenty.plan.holds and not plenty.warning
    needed = plenty.estimate.memory_bytes
    assert re.search(
        r"hold all .*hold_activations=auto: .* GiB would be needed.*free", plenty.holding
    )
    scarce = fit_toy(needed)  # it would fit, but without head room
    assert not scarce.plan.holds and not scarce.warning
    assert scarce.estimate.activation_bytes < plenty.estimate.activation_bytes
    assert "hold the inputs of blocks alone (hold_activations=auto" in scarce.holding
    # who says so decides, and is warned
    always = fit_toy(needed / 2, hold_activations="always")
    assert always.plan.holds and "or set hold_activations=never" in always.warning
    assert re.search(r"lower n_samples to \d+, which would fit", always.warning)
    never = fit_toy(2**40, hold_activations="never")
    assert not never.plan.holds and "(hold_activations=never)" in never.holding
    block = fit_toy(1, granularity="block")
    assert "(granularity=block)" in block.holding
    assert re.search(r"GiB are free: lower n_samples\.$", block.warning)


def test_what_would_fit_fits() -> None:
    needed = fit_toy(2**40, hold_activations="never").estimate.memory_bytes
    warning = fit_toy(0.7 * needed, hold_activations="never").warning
    (samples,) = re.findall(r"n_samples to (\d+)", warning)
    assert 0 < int(samples) < 256
    fewer = fit_toy(0.7 * needed, hold_activations="never", n_samples=int(samples))
    assert not fewer.warning


def test_trace_nests_and_numbers_inputs() -> None:
    trace = trace_forward(Toy().double(), toy_inputs(1, "a"))
    (block,) = trace.calls_of("blocks.0")
    (q,), (k,), (out,) = (trace.calls_of(f"blocks.0.attention.{n}") for n in ("q", "k", "out"))
    assert block.enter < q.enter < q.exit < k.enter < out.exit < block.exit < trace.events
    assert q.input_id == k.input_id != out.input_id
    assert q.input_shape == (1, 4, 6)
    assert trace.calls_of("nothing") == ()


def test_a_norm_with_a_gate_is_no_plain_rms_norm() -> None:
    class GatedNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.variance_epsilon = 1e-6

        def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
            return hidden * self.weight

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(GatedNorm(), nn.Linear(6, 6))])
    model.forward = lambda x: model.blocks[0](x)  # type: ignore[method-assign]
    plan = build_plan(model, {"x": torch.ones(1, 2, 6)}, CalibrationSettings())
    assert [module.name for module in plan.modules] == ["blocks.0.1"]
    assert "no closed form" in reasons(plan)["blocks.0.0"]
