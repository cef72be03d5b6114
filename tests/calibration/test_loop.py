"""The calibration loop: its invariants, and what it leaves behind, whatever happens."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import (
    MODES,
    Family,
    MaskRows,
    Toy,
    family,
    hooks_of,
    images,
    largest_difference,
    mask_rows,
    split,
    tensors_of,
    text,
    toy_data,
    toy_inputs,
)
from torch import Tensor, nn

from featcal_fusionbench.architectures.clip_vision import clip_vision_rows
from featcal_fusionbench.calibration import (
    CalibrationError,
    CalibrationSettings,
    ForwardError,
    ModuleResult,
    NonFiniteError,
    PhaseClock,
    Releasable,
    RowRule,
    SilentObserver,
    SingularSystemError,
    build_plan,
    calibrate,
    closed_form,
    kinds,
    loop,
    pauses,
    uniform_rows,
)
from featcal_fusionbench.calibration.kinds import linear, norm
from featcal_fusionbench.calibration.kinds.base import (
    BatchFeatures,
    Cost,
    Group,
    Kind,
    PlannedModule,
    Solved,
    Sums,
    System,
)
from featcal_fusionbench.calibration.suspended import SuspendedForward

GRANULARITIES = ["module", "block"]


# --- the invariant: resumed forwards are forwards of the calibrated model ---------------------


def plain_text(key: object) -> dict[str, Tensor]:
    inputs = text([5, 3, 7, 2], key)
    del inputs["position_ids"]
    return inputs


def pairs_of_texts(key: object) -> dict[str, Tensor]:
    answers = text([4, 2, 3, 1], f"{key}/answers")
    return plain_text(key) | {
        "decoder_input_ids": answers["input_ids"],
        "decoder_attention_mask": answers["attention_mask"],
    }


def t5_rows(module: str, block: int | None, blocks: int) -> RowRule:
    """Keys and values of the cross-attention read the encoder's tokens."""
    reads_encoder = module.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    in_decoder = module.startswith("decoder.") and not reads_encoder
    return MaskRows("decoder_attention_mask" if in_decoder else "attention_mask")


RELEASABLE = {
    "clip": Releasable(inputs=("pixel_values",), block_inputs=True),
    "llama": Releasable(block_inputs=True),
    "t5": Releasable(block_inputs=True),
}

ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[object], Any], Any, int]] = {
    "clip": (tiny.clip, lambda key: images(4, key), clip_vision_rows(0.01), 16),
    "dinov2": (tiny.dinov2, lambda key: images(4, key), uniform_rows, 16),
    "llama": (tiny.llama, plain_text, mask_rows, 18),
    "qwen3": (tiny.qwen3, plain_text, mask_rows, 22),
    "bert": (tiny.bert, lambda key: text([5, 3, 7, 2], key), mask_rows, 16),
    "bert classifier": (tiny.bert_classifier, plain_text, mask_rows, 16),
    "t5": (tiny.t5, pairs_of_texts, t5_rows, 46),
    "toy": (Toy, lambda key: toy_inputs(4, key), mask_rows, 18),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_are_those_of_the_calibrated_model_bit_for_bit(
    name: str, mode: dict[str, Any], dtype: torch.dtype
) -> None:
    make, inputs, rules, modules = ARCHITECTURES[name]
    try:
        models = family(make(), tasks=("a", "b"))
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    data = {task: split(inputs(task), 3) for task in models.experts}
    model = models.copy().to(dtype)
    chosen = CalibrationSettings(**mode)
    plan = build_plan(model, data["a"][0], chosen, rules, RELEASABLE.get(name, Releasable()))
    assert len(plan.modules) == modules
    outputs: dict[tuple[str, int], Any] = {}
    result = calibrate(
        model, models.base, models.weights, data, plan, chosen,
        on_output=lambda task, index, output: outputs.__setitem__((task, index), output),
    )  # fmt: skip
    assert list(outputs) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [m.name for m in result.modules] == [m.name for m in plan.modules]
    assert all(1e-4 < m.relative_change < 1 and m.calibrated for m in result.modules)
    for (task, index), output in outputs.items():
        batch = {
            k: v.to(dtype) if v.is_floating_point() else v for k, v in data[task][index].items()
        }
        with torch.no_grad():
            fresh = model(**batch)
        pairs = list(zip(tensors_of(output), tensors_of(fresh), strict=True))
        assert pairs and all(torch.equal(one, other) for one, other in pairs)
        assert all(bool(one.isfinite().all()) for one, _ in pairs)
    assert not hooks_of(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["clip", "t5", "llama", "bert", "toy"])
def test_holding_activations_or_not_gives_the_same_weights_bit_for_bit(
    name: str, dtype: Any
) -> None:
    make, inputs, rules, _ = ARCHITECTURES[name]
    models = family(make(), tasks=("a", "b"))
    models.merged.to(torch.float64 if dtype == "float64" else torch.float32)
    data = {task: split(inputs(task), 3) for task in models.experts}
    states = []
    for hold in ("always", "never"):
        settings = CalibrationSettings(hold_activations=hold, forward_dtype=dtype)
        model = models.copy()
        plan = build_plan(model, data["a"][0], settings, rules, RELEASABLE.get(name, Releasable()))
        assert plan.holds == (hold == "always")
        result = calibrate(model, models.base, models.weights, data, plan, settings)
        states.append(model.state_dict())
    assert [m.name for m in result.modules] == [m.name for m in plan.modules]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert largest_difference(states[0], models.merged.state_dict()) > 1e-3


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_tensors_that_are_released_change_nothing(mode: dict[str, Any]) -> None:
    """Also where a block's input is what its first Linears read, as in BERT."""
    models = family(tiny.bert())
    data = {task: split(text([5, 3, 7, 2], task), 2) for task in models.experts}
    states = []
    for releasable in (
        Releasable(),
        Releasable(inputs=("token_type_ids", "absent"), block_inputs=True),
    ):
        model, settings = models.copy(), CalibrationSettings(**mode)
        plan = build_plan(model, data["a"][0], settings, mask_rows, releasable)
        calibrate(model, models.base, models.weights, data, plan, settings)
        states.append(model.state_dict())
    assert largest_difference(*states) == 0


def test_norms_of_a_model_with_tied_head_can_be_calibrated() -> None:
    models = family(tiny.gpt2())
    models.merged.float()  # its attention mask has no float64 form in transformers 4
    data = {task: split(plain_text(task), 2) for task in models.experts}
    outputs = {}
    model = models.copy()
    chosen = CalibrationSettings(include=(r"h\.\d\.ln_",))
    plan = build_plan(model, data["a"][0], chosen, mask_rows)
    calibrate(
        model, models.base, models.weights, data, plan, chosen,
        on_output=lambda task, index, output: outputs.__setitem__((task, index), output.logits),
    )  # fmt: skip
    with torch.no_grad():
        assert torch.equal(outputs["b", 1], model(**data["b"][1]).logits)
    assert model.lm_head.weight is model.transformer.wte.weight


# --- what does not matter --------------------------------------------------------------------


@given(
    granularity=st.sampled_from(GRANULARITIES),
    size=st.integers(1, 7),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_order_of_tasks_and_cut_of_batches_do_not_matter(
    granularity: str, size: int, alpha: float, order: Any
) -> None:
    models = family(Toy())
    inputs = {task: toy_inputs(6, task) for task in models.experts}
    whole, _ = models.calibrate(
        {task: [of] for task, of in inputs.items()},
        mask_rows,
        granularity=granularity,
        target_alpha=alpha,
    )
    tasks = list(models.experts)
    order.shuffle(tasks)
    rows = list(range(6))
    order.shuffle(rows)
    shuffled = {
        task: split({key: value[rows] for key, value in inputs[task].items()}, size)
        for task in tasks
    }
    other = Family(models.merged, models.base, {task: models.experts[task] for task in tasks})
    cut, _ = other.calibrate(shuffled, mask_rows, granularity=granularity, target_alpha=alpha)
    assert largest_difference(whole.state_dict(), cut.state_dict()) < 1e-10


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_copies_of_every_sample_change_nothing(granularity: str) -> None:
    models = family(Toy())
    once, _ = models.calibrate(toy_data(), granularity=granularity)
    thrice = {task: batches * 3 for task, batches in toy_data().items()}
    often, result = models.calibrate(thrice, granularity=granularity)
    assert largest_difference(once.state_dict(), often.state_dict()) < 1e-11
    assert {module.rows for module in result.modules} == {3 * 3 * 6 * 4}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_task_taken_twice_is_that_task_at_half_the_ridge(granularity: str) -> None:
    models = family(Toy(), tasks=("a",))
    one = models.experts["a"]
    data = toy_data(("a",))
    # ε is not scaled with λ, so it has to be negligible
    common = {"granularity": granularity, "epsilon": 1e-14}
    once, _ = models.calibrate(data, ridge_lambda=0.02, **common)
    for copies in (2, 5):
        tasks = [f"copy {i}" for i in range(copies)]
        many = Family(models.merged, models.base, dict.fromkeys(tasks, one))
        repeated = dict.fromkeys(tasks, data["a"])
        often, _ = many.calibrate(repeated, ridge_lambda=0.02 * copies, **common)
        assert largest_difference(once.state_dict(), often.state_dict()) < 1e-10
        other, _ = many.calibrate(repeated, ridge_lambda=0.02, **common)
        assert largest_difference(once.state_dict(), other.state_dict()) > 1e-4


@given(
    granularity=st.sampled_from(GRANULARITIES),
    alpha=st.floats(0, 1),
    ridge_lambda=st.floats(1e-3, 5),
    rho=st.floats(0, 3),
)
@settings(deadline=None, max_examples=15)
def test_one_expert_that_is_the_merged_model_is_given_back(
    granularity: str, alpha: float, ridge_lambda: float, rho: float
) -> None:
    models = family(Toy(), tasks=("a",))
    only = Family(models.merged, models.base, {"a": models.merged})
    common = {"granularity": granularity, "target_alpha": alpha, "ridge_lambda": ridge_lambda}
    data = toy_data(("a",))
    model, _ = only.calibrate(data, anchor_rho=1.0, epsilon=1e-13, **common)
    assert largest_difference(model.state_dict(), models.merged.state_dict()) < 1e-8
    # with the base equal to it, the anchor's extrapolation does not matter either
    same = replace(only, base=dict(models.merged.state_dict()))
    model, _ = same.calibrate(data, anchor_rho=rho, epsilon=1e-13, **common)
    assert largest_difference(model.state_dict(), models.merged.state_dict()) < 1e-8


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_large_ridge_gives_the_anchor(granularity: str) -> None:
    models = family(Toy())
    model, result = models.calibrate(
        toy_data(), granularity=granularity, ridge_lambda=1e9, anchor_rho=2.2
    )
    for module in result.modules:
        for leaf in ("weight", "bias"):
            name = f"{module.name}.{leaf}"
            if name in models.base:
                merged = models.merged.state_dict()[name]
                expected = 2.2 * merged - 1.2 * models.base[name]
                torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=1e-7)


class FixedRows(MaskRows):
    """A mask scaled by a constant."""

    def __call__(self, features: Tensor, inputs: Any) -> Tensor:
        return 7.5 * super().__call__(features, inputs)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_padded_rows_have_no_influence_whatever_they_hold(granularity: str) -> None:
    models = family(Toy())
    clean, _ = models.calibrate(toy_data(), mask_rows, granularity=granularity)
    dirty = copy.deepcopy(toy_data())
    for batches in dirty.values():
        for batch in batches:
            batch["x"][batch["attention_mask"] == 0] = 1e6
    other, result = models.calibrate(dirty, mask_rows, granularity=granularity)
    assert largest_difference(clean.state_dict(), other.state_dict()) < 1e-11
    assert {module.rows for module in result.modules} == {3 * (6 * 4 - 3)}
    scaled, _ = models.calibrate(toy_data(), lambda *_: FixedRows(), granularity=granularity)
    assert largest_difference(clean.state_dict(), scaled.state_dict()) < 1e-11
    uniform, _ = models.calibrate(toy_data(), granularity=granularity)
    assert largest_difference(clean.state_dict(), uniform.state_dict()) > 1e-4


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_length_and_side_of_padding_do_not_matter(granularity: str) -> None:
    models = family(tiny.bert())
    states = []
    for width, side in ((0, "right"), (11, "right"), (9, "left")):
        data = {
            task: split(text([5, 3, 7, 2], task, width=width, side=side), 2)
            for task in models.experts
        }
        model, result = models.calibrate(data, mask_rows, granularity=granularity)
        assert {module.rows for module in result.modules} == {3 * 17}
        states.append(model.state_dict())
    assert largest_difference(states[0], states[1]) < 1e-10
    assert largest_difference(states[0], states[2]) < 1e-10


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_routes_agree(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sums get from the expert's own outputs, they also get from its inputs and weights."""
    models = family(Toy())
    usual, _ = models.calibrate(toy_data(), mask_rows, granularity=granularity)
    needed: list[str] = []
    original = linear.Linear.expert_needs

    def input_alone(*args: Any) -> str:
        needed.append(original(*args))
        return "input"

    monkeypatch.setattr(linear.Linear, "expert_needs", input_alone)
    other, _ = models.calibrate(toy_data(), mask_rows, granularity=granularity)
    assert needed.count("output") == 4
    assert largest_difference(usual.state_dict(), other.state_dict()) < 1e-11


# --- another kind of module ------------------------------------------------------------------


class Centre(nn.Module):
    """Subtracts a buffer and multiplies by a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.weight


class Centres(Kind):
    """The mean of the merged model's inputs, and the mean of the experts' gains."""

    name = "centre"

    def recognises(self, module: nn.Module) -> bool:
        return isinstance(module, Centre)

    def describe(self, name: str, module: nn.Module, rows: int) -> PlannedModule:
        return PlannedModule(name, self, (6,), ("weight", "mean"), rows, 6, 6)

    def expert_needs(self, *_: Any) -> Any:
        return "nothing"

    def cost(self, group: Group) -> Cost:
        return Cost(0.0, 6 * group.leader.rows, 0.0, 12, 0)

    def new_sums(self, group: Group, *_: Any) -> Sums:
        return CentreSums(group.leader.name)


class CentreSums(Sums, System):
    """Sums that are their own system."""

    def __init__(self, name: str) -> None:
        self.name, self.rows, self.tasks = name, 0, 0
        self.total, self.gain = torch.zeros(2, 6, dtype=torch.float64)

    def update(self, batch: BatchFeatures) -> None:
        x = batch.merged.input.flatten(0, -2)
        self.total += x.sum(0)
        self.rows += len(x)

    def end_task(self, task: str, parameters: Any) -> None:
        self.gain += parameters[self.name]["weight"]
        self.tasks += 1

    def system(self) -> System:
        return self

    def solve(self, *_: Any) -> Solved:
        return Solved({"weight": self.gain / self.tasks, "mean": self.total / self.rows})


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_kind_is_added_to_one_list_and_may_write_buffers(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(Centre(), nn.Linear(6, 6)) for _ in range(2)]
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, Centres()))
    models = family(Centred())
    data = {task: [{"x": toy_inputs(6, task)["x"]}] for task in models.experts}
    model, result = models.calibrate(data, **mode)
    found = {module.name: module.kind for module in result.modules if module.calibrated}
    assert found == {
        "blocks.0.0": "centre", "blocks.0.1": "linear",
        "blocks.1.0": "centre", "blocks.1.1": "linear",
    }  # fmt: skip
    x = torch.cat([batches[0]["x"] for batches in data.values()]).flatten(0, 1)
    for index in range(2):
        gains = [expert[f"blocks.{index}.0.weight"] for expert in models.weights.values()]
        centre = model.get_submodule(f"blocks.{index}.0")
        torch.testing.assert_close(centre.get_buffer("mean"), x.mean(0))
        torch.testing.assert_close(centre.weight.data, torch.stack(gains).mean(0))
        with torch.no_grad():
            x = model.get_submodule(f"blocks.{index}")(x)


# --- how much work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, merged, expert",
    # not holding: for out, norm2, fc1, fc2 and in earnest; the expert for out and fc1, then both
    [(MODES[0], 1, 1), (MODES[1], 5, 3), (MODES[2], 2, 1)],
    ids=str,
)
def test_number_of_forwards_and_gram_products(
    mode: dict[str, Any], merged: int, expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = family(tiny.clip(layers=3))
    data = {task: split(images(4, task), 2) for task in models.experts}
    name = next(n for n in tiny.clip_modules(models.merged)[1] if n.endswith("q_proj"))
    calls = {"merged": 0, "expert": 0}
    made: list[int] = []

    def count(model: nn.Module, which: str) -> None:
        def hook(*_: object) -> None:
            calls[which] += 1

        model.get_submodule(name).register_forward_hook(hook)

    class CountedSums(linear.LinearSums):
        def __init__(self, group: Any, *args: Any) -> None:
            made.append(len(group.modules))
            super().__init__(group, *args)

    class CountedPath(loop.ExpertPath):
        def __init__(self, model: nn.Module, trace: Any) -> None:
            super().__init__(model, trace)
            count(model, "merged")
            count(self.model, "expert")

    monkeypatch.setattr(linear, "LinearSums", CountedSums)
    monkeypatch.setattr(loop, "ExpertPath", CountedPath)
    model, chosen = models.copy(), CalibrationSettings(**mode)
    plan = build_plan(model, data["a"][0], chosen, clip_vision_rows(0.01))
    calibrate(model, models.base, models.weights, data, plan, chosen, on_output=lambda *_: None)
    assert calls == {"merged": 6 * merged, "expert": 6 * expert}
    # q, k and v together; out; fc1; fc2; and in the last block q apart from k and v
    assert sorted(made) == sorted(2 * [3, 1, 1, 1] + [1, 2, 1, 1, 1])


def test_no_expert_forward_without_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    models = family(Toy())

    def fail(*_: object) -> None:
        raise AssertionError("an expert ran")

    class Untouched(loop.ExpertPath):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.model.register_forward_pre_hook(fail)

    monkeypatch.setattr(loop, "ExpertPath", Untouched)
    models.calibrate(toy_data(), target_alpha=0.0)
    with pytest.raises(ForwardError, match="an expert ran"):
        models.calibrate(toy_data(), target_alpha=0.1)


def test_data_are_read_once_and_only_when_needed() -> None:
    models = family(Toy())
    read: list[str] = []
    steps: list[str] = []

    class Once:
        def __init__(self, task: str) -> None:
            self.task = task

        def __iter__(self) -> Iterator[Any]:
            read.append(self.task)
            steps.append(f"read {self.task}")
            yield from toy_data()[self.task]

    class Steps(SilentObserver):
        def on_step(self, block: str, module: str, task: str, flops: float) -> None:
            steps.append(f"{module} {task}")

    model, chosen = models.copy(), CalibrationSettings()
    plan = build_plan(model, toy_inputs(1, "a"), chosen)
    data = {task: Once(task) for task in models.experts}
    calibrate(model, models.base, models.weights, data, plan, chosen, observer=Steps())
    assert read == ["a", "b", "c"]
    assert steps[:6] == [
        "read a", "blocks.0.norm1 a", "read b", "blocks.0.norm1 b", "read c", "blocks.0.norm1 c"
    ]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_progress_adds_up_and_results_are_whole(mode: dict[str, Any]) -> None:
    models = family(Toy())
    seen: list[ModuleResult] = []
    ended: list[tuple[str, int]] = []
    flops = {"total": 0.0, "done": 0.0}

    class Watch(SilentObserver):
        def on_start(self, total_flops: float) -> None:
            flops["total"] = total_flops

        def on_step(self, block: str, module: str, task: str, flops_: float) -> None:
            flops["done"] += flops_

        def on_module(self, result: ModuleResult) -> None:
            seen.append(result)

        def on_stage_end(self, stage: str) -> None:
            ended.append((stage, len(seen)))

    model, chosen = models.copy(), CalibrationSettings(**mode)
    plan = build_plan(model, toy_inputs(1, "a"), chosen)
    clock = PhaseClock()
    result = calibrate(
        model, models.base, models.weights, toy_data(), plan, chosen, observer=Watch(), clock=clock
    )
    assert flops["done"] == pytest.approx(flops["total"]) and flops["total"] > 0
    assert tuple(seen) == result.modules
    assert [name for name, _ in ended] == [stage.name for stage in plan.stages]
    sizes = [len(list(stage.modules)) for stage in plan.stages]
    assert [count for _, count in ended] == list(accumulate(sizes))
    assert result.skipped == plan.skipped and result.phases == clock.costs()
    assert {phase.name for phase in result.phases} == {"data", "forwards", "statistics", "solves"}
    for module in result.modules:
        state = (f"{module.name}.weight", models.merged.state_dict(), model.state_dict())
        before, after = (s[state[0]] for s in state[1:])
        change = float((after - before).norm() / before.norm())
        assert module.relative_change == pytest.approx(change, rel=1e-4)
        assert module.rows == 3 * 6 * 4 and module.damping == 0 and module.note == ""
        assert module.ridge_lambda == chosen.ridge_lambda
        assert (module.condition is None) == (module.kind != "linear")
        if module.condition is not None and module.residual is not None:
            assert 1 < module.condition < 1e4 and module.residual < 1e-5
    assert {module.block for module in result.modules} == {0, 1}


# --- what is left behind ---------------------------------------------------------------------


@pytest.fixture
def greenlets(monkeypatch: pytest.MonkeyPatch) -> list[SuspendedForward]:
    """Every suspended forward that is made; one that is true is alive."""
    made = []

    class Kept(SuspendedForward):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(pauses, "SuspendedForward", Kept)
    return made


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that experts ran through."""
    made = []

    class KeptPath(loop.ExpertPath):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self.model)

    monkeypatch.setattr(loop, "ExpertPath", KeptPath)
    return made


class Boom(Exception):
    """Raised on purpose."""


class Fuse(nn.Identity):
    """Passes its input on, and at its n-th call raises."""

    def __init__(self) -> None:
        super().__init__()
        self.error: type[BaseException] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            if self.calls == 0:
                raise self.error("the fuse")
            self.calls -= 1
        return x


class FusedToy(Toy):
    """A toy with a fuse before the MLP of its second block."""

    def __init__(self) -> None:
        super().__init__()
        block: Any = self.blocks[1]
        block.attention.out = nn.Sequential(block.attention.out, Fuse())


def fuse_of(model: nn.Module) -> Fuse:
    return next(module for module in model.modules() if isinstance(module, Fuse))


def assert_clean(
    model: nn.Module, paths: list[nn.Module], greenlets: list[SuspendedForward]
) -> None:
    assert not hooks_of(model)
    assert paths and not any(hooks_of(path) for path in paths)
    assert not any(greenlets)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("with_output", [False, True])
def test_nothing_is_left_after_success(
    mode: dict[str, Any], dtype: Any, with_output: bool, paths: Any, greenlets: Any
) -> None:
    models = family(Toy())
    models.merged.float()
    model = models.copy()
    chosen = CalibrationSettings(**mode, forward_dtype=dtype)
    plan = build_plan(model, toy_inputs(1, "a"), chosen)
    on_output = (lambda *_: None) if with_output else None
    calibrate(model, models.base, models.weights, toy_data(), plan, chosen, on_output=on_output)
    assert_clean(model, paths, greenlets)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["merged", "expert"])
def test_nothing_is_left_after_an_error_in_a_forward(
    granularity: Any, dtype: Any, error: type[BaseException], where: str, paths: Any, greenlets: Any
) -> None:  # fmt: skip
    models = family(FusedToy())
    models.merged.float()
    model = models.copy()
    chosen = CalibrationSettings(granularity=granularity, forward_dtype=dtype)
    plan = build_plan(model, toy_inputs(1, "a"), chosen)

    class Armed(SilentObserver):
        """Arms the fuse once the first block is through, so that forwards are paused."""

        def on_module(self, result: ModuleResult) -> None:
            if result.name == "blocks.0.down":
                fuse = fuse_of(model if where == "merged" else paths[0])
                fuse.error, fuse.calls = error, 3  # two batches of task a pass, and one of b

    with pytest.raises(error if error is KeyboardInterrupt else ForwardError) as caught:
        calibrate(model, models.base, models.weights, toy_data(), plan, chosen, observer=Armed())
    if error is Boom:
        path = "the merged model's" if where == "merged" else "the expert's"
        after = {
            ("module", "merged"): "blocks.1.attention.out.0",
            ("module", "expert"): "blocks.1.attention.out.0",
            ("block", "merged"): "blocks.0",
            ("block", "expert"): "blocks.0",
        }[granularity, where]
        assert str(caught.value) == (
            f"{path} forward of task b, batch 1 failed after {after}: Boom: the fuse"
        )
        assert isinstance(caught.value.__cause__, Boom)
    del caught
    assert_clean(model, paths, greenlets)
    # what was solved before keeps its values, the rest its merged ones
    state, merged = model.state_dict(), models.merged.state_dict()
    assert not torch.equal(state["blocks.0.down.weight"], merged["blocks.0.down.weight"])
    assert torch.equal(state["blocks.1.down.weight"], merged["blocks.1.down.weight"])
    other, _ = models.calibrate(toy_data(), granularity=granularity, forward_dtype=dtype)
    assert largest_difference(
        {k: v for k, v in state.items() if "blocks.0" in k},
        {k: v for k, v in other.state_dict().items() if "blocks.0" in k},
    ) < 1e-5  # fmt: skip
    assert_clean(other, paths, greenlets)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize(
    "where",
    ["on_start", "on_step", "on_module", "on_stage_end", "on_output", "solve", "data"],
)
def test_nothing_is_left_after_an_error_elsewhere(
    mode: dict[str, Any], error: type[BaseException], where: str, paths: Any, greenlets: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    models = family(Toy())
    model, chosen = models.copy(), CalibrationSettings(**mode)
    plan = build_plan(model, toy_inputs(1, "a"), chosen)
    data: dict[str, Any] = toy_data()

    def fail(*_: object, **__: object) -> Any:
        raise error

    observer, on_output = SilentObserver(), None
    if where == "on_output":
        on_output = fail
    elif where == "data":
        data["b"] = map(fail, data["b"])
    elif where == "solve":
        monkeypatch.setattr(closed_form, "factorise", fail)
    else:
        monkeypatch.setattr(observer, where, fail)
    with pytest.raises(error) as caught:
        calibrate(
            model, models.base, models.weights, data, plan, chosen,
            observer=observer, on_output=on_output,
        )  # fmt: skip
    del caught
    assert_clean(model, paths, greenlets)
    monkeypatch.undo()
    models.calibrate(toy_data(), **mode)


def test_grad_mode_and_autocast_of_the_caller_are_kept(paths: Any, greenlets: Any) -> None:
    models = family(Toy())
    models.merged.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        models.calibrate(toy_data(), forward_dtype="bfloat16")
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    assert_clean(models.merged, paths, greenlets)


def test_forwards_and_their_activations_are_freed() -> None:
    models, seen = family(Toy()), []

    class Watched(SuspendedForward):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(pauses, "SuspendedForward", Watched)
        models.calibrate(toy_data())
    gc.collect()
    assert len(seen) == 12 and all(ref() is None for ref in seen)


def test_hooks_of_the_user_stay_and_run_once_per_forward() -> None:
    models = family(Toy())
    model, calls = models.copy(), []
    module: Any = model.get_submodule("blocks.0.gate")
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    chosen = CalibrationSettings(target_alpha=0.0)
    plan = build_plan(model, toy_inputs(1, "a"), chosen)
    calls.clear()
    calibrate(
        model, models.base, models.weights, toy_data(), plan, chosen, on_output=lambda *_: None
    )
    assert len(calls) == 6 and list(module._forward_hooks) == [handle.id]


# --- numbers that cannot be --------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_in_inputs_names_task_and_module(granularity: str) -> None:
    models, data = family(Toy()), toy_data()
    data["b"][1]["x"] = data["b"][1]["x"].clone()
    data["b"][1]["x"][0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"task b: the merged model's .* at blocks\.0\."):
        models.calibrate(data, granularity=granularity)


def test_tasks_without_inputs_are_named() -> None:
    models = family(Toy())
    inputs = toy_data()
    settings = CalibrationSettings(statistics_dtype="float64")
    plan = build_plan(models.merged, toy_inputs(1, "a"), settings)
    for data in ({**inputs, "b": []}, {k: v for k, v in inputs.items() if k != "b"}):
        with pytest.raises(CalibrationError, match=r"\bb\b"):
            calibrate(models.merged, models.base, models.weights, data, plan, settings)


@pytest.mark.parametrize("name", ["blocks.0.gate.bias", "blocks.1.norm2.bias"])
def test_a_module_is_calibrated_wholly_or_not_at_all(name: str) -> None:
    models = family(Toy())
    expert = models.experts["c"] = copy.deepcopy(models.experts["c"])
    with torch.no_grad():
        expert.get_parameter(name).view(-1)[1] = math.nan
    module = name.rpartition(".")[0]
    model = models.copy()
    # without the experts' features, a NaN in a bias touches that bias alone
    with pytest.raises(NonFiniteError, match=rf"^{module}\."):
        models.calibrate(toy_data(), model=model, target_alpha=0.0)
    state, merged = model.state_dict(), models.merged.state_dict()
    assert torch.equal(state[f"{module}.weight"], merged[f"{module}.weight"])
    model, result = models.calibrate(toy_data(), target_alpha=0.0, on_failure="keep")
    state = model.state_dict()
    for leaf in ("weight", "bias"):
        assert torch.equal(state[f"{module}.{leaf}"], merged[f"{module}.{leaf}"])
    kept = {m.name: m.note for m in result.modules if not m.calibrated}
    assert list(kept) == [module] and "NaN or Inf" in kept[module]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["blocks.0.gate.weight", "blocks.1.norm2.weight"])
def test_nan_in_an_expert_is_found(granularity: str, name: str) -> None:
    models = family(Toy())
    expert = models.experts["c"] = copy.deepcopy(models.experts["c"])
    with torch.no_grad():
        expert.get_parameter(name).view(-1)[1] = math.nan
    with pytest.raises(NonFiniteError, match=name.rpartition(".")[0].rpartition(".")[0]):
        models.calibrate(toy_data(), granularity=granularity)


def test_zero_ridge_without_enough_rows_is_refused_and_can_be_kept() -> None:
    models = family(Toy())
    few = {task: [toy_inputs(1, task)] for task in models.experts}
    thin = {task: few[task] for task in ("a",)}
    one = Family(models.merged, models.base, {"a": models.experts["a"]})
    common = {"ridge_lambda": 0.0, "calibrate_norm": False}
    with pytest.raises(SingularSystemError, match=r"^blocks\.0\.attention\.q: .*ridge_lambda"):
        one.calibrate(thin, **common)
    model, result = one.calibrate(thin, on_failure="keep", **common)
    assert not any(module.calibrated for module in result.modules)
    assert {module.ridge_lambda for module in result.modules} == {None}
    assert all("singular" in module.note for module in result.modules)
    assert largest_difference(model.state_dict(), models.merged.state_dict()) == 0
    # full rank: no ridge is needed, and an expert alone is given back
    whole = {"a": split(toy_inputs(20, "a"), 5)}
    same = Family(models.merged, models.base, {"a": models.merged})
    model, result = same.calibrate(whole, epsilon=1e-13, **common)
    assert all(module.calibrated for module in result.modules)
    assert largest_difference(model.state_dict(), models.merged.state_dict()) < 1e-7


def test_modules_that_no_row_reaches_keep_their_values() -> None:
    models = family(Toy())
    none = lambda features, inputs: torch.zeros(features.shape[:-1])  # noqa: E731
    rules = lambda module, block, blocks: none if block == 1 else None  # noqa: E731
    model, result = models.calibrate(toy_data(), rules)
    for module in result.modules:
        assert module.calibrated == (module.block == 0)
        assert module.note == (
            "" if module.block == 0 else "no row of weight above zero reached it"
        )
        assert module.rows == (72 if module.block == 0 else 0)
    state, merged = model.state_dict(), models.merged.state_dict()
    assert all(torch.equal(state[n], merged[n]) for n in state if n.startswith("blocks.1"))


def test_a_task_without_rows_is_left_out_of_every_sum() -> None:
    models = family(Toy())
    data = toy_data()
    for batch in data["c"]:
        batch["attention_mask"] = batch["attention_mask"].clone()
    rules = lambda module, block, blocks: _NotTaskC()  # noqa: E731
    data["c"] = [batch | {"skip": torch.ones(1)} for batch in data["c"]]
    two = Family(models.merged, models.base, {t: models.experts[t] for t in ("a", "b")})
    expected, _ = two.calibrate(toy_data(("a", "b")))

    class Skipping(Toy):
        def forward(self, x: Tensor, attention_mask: Tensor, skip: Any = None) -> Tensor:
            return super().forward(x, attention_mask)

    three = family(Skipping())
    model, _ = three.calibrate(data, rules)
    # the merged model holds a third task vector: compare with two experts around that one
    two = Family(three.merged, three.base, {t: three.experts[t] for t in ("a", "b")})
    expected, _ = two.calibrate(toy_data(("a", "b")))
    assert largest_difference(model.state_dict(), expected.state_dict()) < 1e-12


class _NotTaskC:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NotTaskC)

    def __hash__(self) -> int:
        return 0

    def __call__(self, features: Tensor, inputs: Any) -> Tensor:
        return torch.full(features.shape[:-1], 0.0 if "skip" in inputs else 1.0)


# --- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["clip", "llama", "t5", "toy"])
def test_bfloat16_forwards_are_close_and_use_the_new_weights(granularity: Any, name: str) -> None:
    make, inputs, rules, _ = ARCHITECTURES[name]
    models = family(make(), tasks=("a", "b"))
    models.merged.float()
    data = {task: split(inputs(task), 2) for task in models.experts}
    exact, _ = models.calibrate(data, rules, granularity=granularity)
    model = models.copy()
    chosen = CalibrationSettings(granularity=granularity, forward_dtype="bfloat16")
    plan = build_plan(model, data["a"][0], chosen, rules)
    outputs: dict[tuple[str, int], Any] = {}
    calibrate(
        model, models.base, models.weights, data, plan, chosen,
        on_output=lambda task, index, output: outputs.__setitem__((task, index), output),
    )  # fmt: skip
    for key, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        assert value.dtype == torch.float32
        other = exact.state_dict()[key]
        assert float((value - other).norm() / other.norm().clamp_min(0.1)) < 0.03, key
    assert largest_difference(exact.state_dict(), model.state_dict()) > 0
    for (task, index), output in outputs.items():
        batch = {k: v.float() if v.is_floating_point() else v for k, v in data[task][index].items()}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            fresh = model(**batch)
        for one, two in zip(tensors_of(output), tensors_of(fresh), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_statistics_and_solves_are_never_in_bfloat16(
    granularity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: dict[str, set[bool]] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            modes.setdefault(name, set()).add(torch.is_autocast_enabled("cpu"))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for sums in (linear.LinearSums, norm.NormSums):
        watch(sums, "update")
        watch(sums, "end_task")
    for name in ("factorise", "solve_weight", "solve_bias", "solve_layer_norm", "solve_rms_norm"):
        watch(closed_form, name)
    watch(nn.functional, "silu")
    models = family(Toy())
    models.merged.float()
    models.calibrate(toy_data(), granularity=granularity, forward_dtype="bfloat16")
    # the first forward is the plan's trace
    assert modes.pop("silu") == {False, True}
    assert len(modes) == 7 and all(mode == {False} for mode in modes.values())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_float32_statistics_are_close_to_float64(granularity: str) -> None:
    models = family(Toy())
    models.merged.float()
    single, _ = models.calibrate(toy_data(), granularity=granularity, statistics_dtype="float32")
    double, _ = models.calibrate(toy_data(), granularity=granularity)
    assert largest_difference(single.state_dict(), double.state_dict()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cuda_equals_the_processor(granularity: str) -> None:
    models = family(Toy())
    expected, _ = models.calibrate(toy_data(), mask_rows, granularity=granularity)
    model, _ = models.calibrate(
        toy_data(), mask_rows, model=models.copy().cuda(), granularity=granularity
    )
    assert largest_difference(model.cpu().state_dict(), expected.state_dict()) < 1e-9
