"""Drift measured on models where it can be worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from tiny import Family, Toy, family, hooks_of, images, split, text, toy_data, toy_inputs
from torch import Tensor, nn

from featcal_fusionbench.calibration import (
    CalibrationSettings,
    ForwardError,
    TaskDrift,
    build_plan,
)
from featcal_fusionbench.calibration.drift import final_features, measure_drift
from featcal_fusionbench.calibration.trace import Block, find_blocks, trace_forward


class Scale(nn.Module):
    """Multiplies by one number; returns a tensor, or a tuple as older transformers do."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self._as_tuple = as_tuple

    def forward(self, x: Tensor, *, shift: float) -> Any:
        x = self.linear(x) + shift
        return (x, None) if self._as_tuple else x


class Line(nn.Module):
    """h ↦ a·h + 1, then ↦ b·h + 1, then three times that."""

    def __init__(self, a: float, b: float, as_tuple: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(as_tuple), Scale(as_tuple)])
        self._as_tuple = as_tuple
        with torch.no_grad():
            for block, value in zip(self.blocks, (a, b), strict=True):
                block.linear.weight.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=1.0)
            x = x[0] if self._as_tuple else x
        return 3 * x


def drift(
    model: nn.Module, experts: dict[str, nn.Module], data: Any, **kwargs: Any
) -> dict[str, TaskDrift]:
    example = next(batch for batches in data.values() for batch in batches)
    trace = trace_forward(model, example)
    blocks = tuple(Block(name, index) for index, name in enumerate(find_blocks(model)))
    weights = {task: expert.state_dict() for task, expert in experts.items()}
    measured = measure_drift(model, weights, data, blocks, trace, **kwargs)
    assert not hooks_of(model)
    return {entry.task: entry for entry in measured}


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_against_numbers_worked_out_by_hand(as_tuple: bool, size: int) -> None:
    a, b = 2.0, -1.5
    tasks = {"one": (2.5, 4.0), "two": (2.0, 0.5)}
    model = Line(a, b, as_tuple).double()
    experts: dict[str, nn.Module] = {t: Line(*ab, as_tuple).double() for t, ab in tasks.items()}
    x = torch.tensor([[1.0], [-2.0], [3.0], [0.5], [7.0]], dtype=torch.float64)
    measured = drift(model, experts, dict.fromkeys(tasks, split({"x": x}, size)))

    def ratio(part: Tensor, whole: Tensor) -> Any:
        return pytest.approx(math.sqrt(float((part**2).sum() / (whole**2).sum())), rel=1e-12)

    for task, (ea, eb) in tasks.items():
        cal1, exp1 = a * x + 1, ea * x + 1
        cal2, exp2 = b * cal1 + 1, eb * exp1 + 1
        first, second = measured[task].blocks
        assert (first.block, first.name) == (0, "blocks.0")
        assert (second.block, second.name) == (1, "blocks.1")
        assert first.total == first.local == ratio((a - ea) * x, exp1)
        assert first.propagated == 0
        assert second.total == ratio(cal2 - exp2, exp2)
        assert second.local == ratio((b - eb) * exp1, exp2)
        assert second.propagated == ratio(b * (a - ea) * x, exp2)
        assert measured[task].inputs == 5
        assert measured[task].final == ratio(cal2 - exp2, exp2)  # relative: the 3 cancels
    # the second task shares its first block with the model: nothing is passed on
    assert measured["two"].blocks[0].total == 0 == measured["two"].blocks[1].propagated
    assert measured["two"].blocks[1].total == measured["two"].blocks[1].local > 0


ARCHITECTURES = {
    "toy": (Toy, lambda key: toy_inputs(4, key)),
    "clip": (tiny.clip, lambda key: images(4, key)),
    "llama": (tiny.llama, lambda key: text([5, 3, 4, 2], key)),
    "bert": (tiny.bert_classifier, lambda key: text([5, 3, 4, 2], key)),
    "t5": (
        tiny.t5,
        lambda key: {
            k: v for k, v in text([5, 3, 4, 2], key).items() if k != "position_ids"
        } | {"decoder_input_ids": text([3, 3, 3, 3], f"{key}/d")["input_ids"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_no_drift_from_itself(name: str) -> None:
    make, inputs = ARCHITECTURES[name]
    models = family(make(), tasks=("a", "b"))
    experts = {"a": models.merged, "b": models.experts["b"]}
    data = {task: split(inputs(task), 2) for task in experts}
    measured = drift(models.merged, experts, data)
    assert measured["a"].final == 0
    assert all((b.total, b.local, b.propagated) == (0, 0, 0) for b in measured["a"].blocks)
    assert 0.01 < measured["b"].final < 3
    first, *later = measured["b"].blocks
    assert first.total > 0 and first.local > 0
    assert all(min(b.total, b.local, b.propagated) > 0 for b in later)
    assert len(measured["b"].blocks) == (4 if name == "t5" else 2)


@pytest.mark.parametrize("name", ["toy", "clip", "llama"])
def test_first_and_later_blocks_against_plain_forwards(name: str) -> None:
    make, inputs = ARCHITECTURES[name]
    models = family(make(), tasks=("a",))
    merged, expert, batch = models.merged, models.experts["a"], inputs("a")
    measured = drift(merged, models.experts, {"a": split(batch, 3)})["a"]

    def hidden(model: nn.Module) -> list[Tensor]:
        seen = []
        handles = [
            model.get_submodule(b).register_forward_hook(
                lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out)
            )
            for b in find_blocks(model)
        ]
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()
        return seen

    for block, cal, exp in zip(measured.blocks, hidden(merged), hidden(expert), strict=True):
        assert block.total == pytest.approx(float((cal - exp).norm() / exp.norm()), rel=1e-10)
        # the triangle inequality of total = local + propagated
        assert abs(block.local - block.propagated) <= block.total + 1e-12
        assert block.total <= block.local + block.propagated + 1e-12


def test_calibration_to_one_expert_lowers_the_drift_of_heldout_inputs() -> None:
    models = family(Toy(), tasks=("a",))
    heldout = {"a": split(toy_inputs(8, "heldout"), 4)}
    data = {"a": split(toy_inputs(40, "train"), 10)}
    before = drift(models.merged, models.experts, heldout)["a"]
    for granularity in ("module", "block"):
        model, _ = models.calibrate(data, granularity=granularity, anchor_rho=1.0)
        after = drift(model, models.experts, heldout)["a"]
        assert after.final < 0.7 * before.final
        for old, new in zip(before.blocks, after.blocks, strict=True):
            assert new.total < 0.8 * old.total and new.local < 0.8 * old.local


def test_tasks_without_inputs_are_left_out() -> None:
    models = family(Toy())
    measured = drift(models.merged, models.experts, {"b": toy_data()["b"], "c": []})
    assert list(measured) == ["b"]


def test_final_features() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(4)]
    everything = {
        "pooler_output": tensors[0],
        "logits": tensors[1],
        "last_hidden_state": tensors[2],
    }
    assert final_features(SimpleNamespace(**everything)) is tensors[0]
    del everything["pooler_output"]
    assert final_features(SimpleNamespace(**everything, pooler_output=None)) is tensors[1]
    del everything["logits"]
    assert final_features(SimpleNamespace(**everything)) is tensors[2]
    assert final_features(tensors[3]) is tensors[3]
    assert final_features((None, tensors[3])) is tensors[3]
    assert final_features({"nothing": None, "similarity": tensors[3]}) is tensors[3]
    with pytest.raises(ForwardError, match="str holds no tensor"):
        final_features("text")


def test_features_can_be_chosen() -> None:
    models = family(Toy(), tasks=("a",))
    data = {"a": toy_data()["a"]}
    whole = drift(models.merged, models.experts, data)["a"]
    part = drift(models.merged, models.experts, data, features=lambda out: out[..., :1])["a"]
    assert whole.blocks == part.blocks and whole.final != part.final


def test_an_error_leaves_no_hook() -> None:
    models = family(Toy(), tasks=("a",))

    class Brittle(Toy):
        fails = False

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("brittle")
            return super().forward(x, attention_mask)

    model = Brittle().double()
    model.load_state_dict(models.merged.state_dict())
    weights = {"a": dict(models.experts["a"].state_dict())}
    trace = trace_forward(model, toy_inputs(1, "a"))
    plan = build_plan(model, toy_inputs(1, "a"), CalibrationSettings())
    model.fails = True
    with pytest.raises(RuntimeError, match="brittle"):
        measure_drift(model, weights, {"a": toy_data()["a"]}, plan.blocks, trace)
    assert not hooks_of(model)
    model.fails = False
    broken = {"a": {k: v for k, v in weights["a"].items() if not k.startswith("blocks.1")}}
    with pytest.raises((KeyError, ForwardError)):
        measure_drift(model, broken, {"a": toy_data()["a"]}, plan.blocks, trace)
    assert not hooks_of(model)
    assert torch.is_grad_enabled()


def test_family_is_what_these_tests_take_it_for() -> None:
    models = family(Toy())
    assert isinstance(models, Family)
    state = models.merged.state_dict()
    for name, base in models.base.items():
        vectors = sum((e[name] - base for e in models.weights.values()), torch.zeros_like(base))
        torch.testing.assert_close(state[name], base + 0.3 * vectors)
