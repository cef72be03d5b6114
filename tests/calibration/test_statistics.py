"""Running sums: what they add up to and end in, what has no influence on them, what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import randn
from torch import Tensor, nn

from featcal_fusionbench.calibration import CalibrationSettings, NonFiniteError
from featcal_fusionbench.calibration.closed_form import factorise, solve_weight
from featcal_fusionbench.calibration.kinds.base import (
    BatchFeatures,
    Group,
    PlannedModule,
    Sums,
    System,
    Tensors,
)
from featcal_fusionbench.calibration.kinds.linear import Linear, LinearSums, LinearSystem
from featcal_fusionbench.calibration.kinds.norm import LayerNorm, NormSums, normalise
from featcal_fusionbench.calibration.suspended import Capture

ALPHA, EPSILON = 0.3, 1e-8
CPU = torch.device("cpu")
Route = Literal["input", "output"]
LEAVES = ("weight", "bias")


def linear_group(width: int, outs: Mapping[str, int], route: Route = "input") -> Group:
    modules = [
        PlannedModule(name, Linear(), (out, width), LEAVES, 1, width, out)
        for name, out in outs.items()
    ]
    return Group(tuple(modules), route)


def new_sums(group: Group, *, alpha: float = ALPHA, dtype: Any = "float64") -> LinearSums:
    if alpha == 0:
        group = replace(group, expert_needs="nothing")
    chosen = CalibrationSettings(target_alpha=alpha, epsilon=EPSILON, statistics_dtype=dtype)
    return LinearSums(group, chosen, CPU)


def seen(
    cal: Tensor,
    exp: Tensor | None = None,
    output: Tensor | None = None,
    rows: Tensor | None = None,
    experts: Mapping[str, Tensors] | None = None,
    module: nn.Module | None = None,
) -> BatchFeatures:
    """A batch as the loop hands it over."""
    expert = None if exp is None else Capture((exp,), {}, output)
    merged = Capture((cal,), {})
    return BatchFeatures(module or nn.Identity(), merged, expert, experts or {}, rows)


def expert_of(width: int, out: int, key: object) -> dict[str, Tensor]:
    return {"weight": randn(out, width, key=f"{key}/w"), "bias": randn(out, key=f"{key}/b")}


class Task:
    """Features of both paths, row weights and an expert, all drawn from a key."""

    def __init__(self, key: object, width: int, out: int, batch: int, tokens: int = 5) -> None:
        self.cal = randn(batch, tokens, width, key=f"{key}/cal")
        self.exp = self.cal + 0.3 * randn(batch, tokens, width, key=f"{key}/exp")
        self.rows = randn(batch, tokens, key=f"{key}/rows").abs()
        self.expert = expert_of(width, out, key)

    def add(self, sums: LinearSums, route: Route, rows: Tensor | None, size: int = 1000) -> None:
        """Run the task through the sums in batches of `size`."""
        for start in range(0, len(self.cal), size):
            part = slice(start, start + size)
            cal, exp, r = self.cal[part], self.exp[part], None if rows is None else rows[part]
            weight, bias = self.expert.values()
            output = exp @ weight.T + bias if route == "output" else None
            sums.update(seen(cal, exp, output, r, {"m": self.expert}))
        sums.end_task("task", {"m": self.expert})


def assert_equal(one: LinearSystem, other: LinearSystem, rtol: float = 1e-11) -> None:
    def close(a: Any, b: Any) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)

    close(one.gram, other.gram)
    close(one.rhs, other.rhs)
    close(one.expert_bias, other.expert_bias)
    close(one.mean_cal, other.mean_cal)
    close(one.task_weight, other.task_weight)
    assert one.rows == other.rows


@pytest.mark.parametrize("route", ["input", "output"])
@pytest.mark.parametrize("weighted", [False, True])
# wider than one and two column blocks of the symmetric product
@pytest.mark.parametrize("width", [7, 512, 700, 1100])
def test_sums_are_those_of_the_paper(route: Route, weighted: bool, width: int) -> None:
    out = 4
    tasks = [Task(i, width, out, batch=3 + i) for i in range(2)]
    sums = new_sums(linear_group(width, {"m": out}, route))
    gram, mean = torch.zeros(width, width), torch.zeros(width)
    rhs, bias, total = torch.zeros(width, out), torch.zeros(out), 0.0
    for task in tasks:
        task.add(sums, route, task.rows if weighted else None, size=2)
        x, y = task.cal.flatten(0, 1), task.exp.flatten(0, 1)
        r = task.rows.flatten() if weighted else torch.ones(len(x), dtype=torch.float64)
        target = ALPHA * y + (1 - ALPHA) * x
        g = (x.T * r) @ x / r.sum()
        omega = 1 / float(g.norm())
        gram = gram + omega * g
        rhs = rhs + omega * (x.T * r) @ target @ task.expert["weight"].T / r.sum()
        mean = mean + omega * (r @ x) / r.sum()
        mean_output = task.expert["weight"] @ (r @ target) / r.sum()
        bias = bias + omega * (task.expert["bias"] + mean_output)
        total += omega
    system = sums.system()
    found = (system.gram, system.rhs["m"], system.mean_cal, system.expert_bias["m"])
    torch.testing.assert_close(found, (gram, rhs, mean, bias), rtol=1e-10, atol=1e-11)
    assert system.task_weight == pytest.approx(total)
    assert system.rows == sum(task.rows.numel() for task in tasks)


@given(
    key=st.integers(0, 10**6),
    width=st.integers(1, 9),
    batch=st.integers(1, 6),
    size=st.integers(1, 6),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=30)
def test_order_and_size_of_batches_and_tasks_and_the_route_do_not_matter(
    key: int, width: int, batch: int, size: int, order: Any
) -> None:
    tasks = [Task(f"{key}/{i}", width, 3, batch + i) for i in range(3)]
    whole = new_sums(linear_group(width, {"m": 3}, "input"))
    for task in tasks:
        task.add(whole, "input", task.rows)
    order.shuffle(tasks)
    cut = new_sums(linear_group(width, {"m": 3}, "output"))
    for task in tasks:
        rows = list(range(len(task.cal)))
        order.shuffle(rows)
        task.cal, task.exp, task.rows = task.cal[rows], task.exp[rows], task.rows[rows]
        task.add(cut, "output", task.rows, size)
    assert_equal(whole.system(), cut.system())


@given(key=st.integers(0, 10**6), copies=st.integers(2, 4), scale=st.floats(0.01, 100))
@settings(deadline=None, max_examples=20)
def test_copies_of_samples_and_the_scale_of_row_weights_change_nothing(
    key: int, copies: int, scale: float
) -> None:
    once, often = (new_sums(linear_group(5, {"m": 3})) for _ in range(2))
    task = Task(key, 5, 3, batch=3)
    task.add(once, "input", task.rows)
    task.cal, task.exp = task.cal.repeat(copies, 1, 1), task.exp.repeat(copies, 1, 1)
    task.add(often, "input", scale * task.rows.repeat(copies, 1))
    one, many = once.system(), often.system()
    assert many.rows == copies * one.rows
    assert_equal(one, replace(many, rows=one.rows))


@given(key=st.integers(0, 10**6), scale=st.floats(0.1, 10), ridge_lambda=st.floats(1e-3, 1))
@settings(deadline=None, max_examples=20)
def test_solution_is_linear_in_the_experts_and_anchor(
    key: int, scale: float, ridge_lambda: float
) -> None:
    def solution(weights: list[Tensor], anchor: Tensor) -> Tensor:
        sums = new_sums(linear_group(5, {"m": 3}))
        for index, weight in enumerate(weights):
            task = Task(f"{key}/{index}", 5, 3, batch=3)
            task.expert["weight"] = weight
            task.add(sums, "input", None)
        system = sums.system()
        factor = factorise(system.gram, ridge_lambda, 1e-12, name="m")
        return solve_weight(factor, system.rhs["m"] + ridge_lambda * anchor.T, name="m").value

    one, other = ([randn(3, 5, key=f"{key}/{s}/{i}") for i in range(3)] for s in "ab")
    both = [a + scale * b for a, b in zip(one, other, strict=True)]
    torch.testing.assert_close(
        solution(both[:2], both[2]),
        solution(one[:2], one[2]) + scale * solution(other[:2], other[2]),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("route", ["input", "output"])
def test_rows_of_weight_zero_have_no_influence_whatever_they_hold(route: Route) -> None:
    task = Task(0, 6, 3, batch=4)
    task.rows[:, -2:] = 0
    clean = new_sums(linear_group(6, {"m": 3}, route))
    padding = task.rows == 0
    kept = Task(0, 6, 3, batch=4)
    kept.cal, kept.exp, kept.rows = (t[:, :-2] for t in (task.cal, task.exp, task.rows))
    kept.add(clean, route, kept.rows)
    for value in (math.nan, math.inf, 1e30):
        task.cal[padding] = task.exp[padding] = value
        dirty = new_sums(linear_group(6, {"m": 3}, route))
        task.add(dirty, route, task.rows, size=3)
        assert_equal(clean.system(), dirty.system())
        assert dirty.system().rows == 12


def test_a_task_without_rows_counts_for_nothing() -> None:
    one, other = new_sums(linear_group(5, {"m": 3})), new_sums(linear_group(5, {"m": 3}))
    full, empty = Task(0, 5, 3, batch=3), Task(1, 5, 3, batch=2)
    full.add(one, "input", None)
    other.end_task("no batches", {"m": empty.expert})
    empty.add(other, "input", torch.zeros_like(empty.rows))
    full.add(other, "input", None)
    assert_equal(one.system(), other.system())
    nothing = new_sums(linear_group(5, {"m": 3}))
    empty.add(nothing, "input", torch.zeros_like(empty.rows))
    system = nothing.system()
    assert system.rows == 0 and system.task_weight == 0 and not system.gram.any()


def test_without_interpolation_no_expert_features_are_needed() -> None:
    task = Task(0, 5, 3, batch=3)
    none = new_sums(linear_group(5, {"m": 3}), alpha=0.0)
    none.update(seen(task.cal))
    none.end_task("t", {"m": task.expert})
    task.exp = task.cal
    other = new_sums(linear_group(5, {"m": 3}), alpha=0.7)
    task.add(other, "input", None)
    assert_equal(none.system(), other.system())


def test_linears_of_one_input_share_the_gram_matrix() -> None:
    task = Task(0, 5, 3, batch=3)
    outs = {"q": 3, "k": 2, "v": 4}
    experts = {name: expert_of(5, out, name) for name, out in outs.items()}

    def system(outs: Mapping[str, int]) -> LinearSystem:
        sums = new_sums(linear_group(5, outs))
        sums.update(seen(task.cal, task.exp))
        sums.end_task("t", experts)
        return sums.system()

    shared = system(outs)
    for name, out in outs.items():
        alone = system({name: out})
        torch.testing.assert_close(alone.gram, shared.gram, rtol=0, atol=0)
        torch.testing.assert_close(alone.rhs[name], shared.rhs[name], rtol=0, atol=0)
        torch.testing.assert_close(alone.expert_bias[name], shared.expert_bias[name])


def bytes_of(sums: Sums) -> int:
    """All memory that running sums hold on to."""
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, System):
            walk(vars(value))
        else:
            assert value is None or isinstance(value, int | float | str | torch.dtype | Group)

    for value in vars(sums).values():
        walk(value)
    return sum(found.values())


@pytest.mark.parametrize("route", ["input", "output"])
def test_memory_does_not_grow_with_tasks(route: Route) -> None:
    width, out = 24, 6
    sizes = {}
    for tasks in (2, 20):
        sums = new_sums(linear_group(width, {"m": out}, route))
        for index in range(tasks):
            Task(index, width, out, batch=2).add(sums, route, None)
        sizes[tasks] = bytes_of(sums)
    cross = width * (width if route == "input" else out)
    wide = 8 * (2 * width * width + cross + width * out)
    assert sizes[2] == sizes[20]
    assert wide < sizes[20] < wide + 8 * (4 * width + 2 * out)


def test_nothing_of_one_task_is_left_for_the_next() -> None:
    first, second = Task(0, 5, 3, batch=3), Task(1, 5, 3, batch=3)
    both, one, two = (new_sums(linear_group(5, {"m": 3})) for _ in range(3))
    first.add(both, "input", first.rows)
    second.add(both, "input", second.rows)
    first.add(one, "input", first.rows)
    second.add(two, "input", second.rows)
    whole, a, b = (sums.system() for sums in (both, one, two))
    torch.testing.assert_close(whole.gram, a.gram + b.gram)
    torch.testing.assert_close(whole.rhs["m"], a.rhs["m"] + b.rhs["m"])
    torch.testing.assert_close(whole.mean_cal, a.mean_cal + b.mean_cal)


def test_rows_held_out_are_summed_apart() -> None:
    task = Task(0, 5, 3, batch=6)
    fitted, heldout = task.rows.clone(), task.rows.clone()
    fitted[4:], heldout[:4] = 0, 0
    for weights, part in ((fitted, slice(4)), (heldout, slice(4, None))):
        apart, alone = (new_sums(linear_group(5, {"m": 3}, "output")) for _ in range(2))
        task.add(apart, "output", weights, size=3)
        of_part = Task(0, 5, 3, batch=6)
        of_part.cal, of_part.exp = task.cal[part], task.exp[part]
        of_part.add(alone, "output", task.rows[part])
        assert_equal(apart.system(), alone.system())


def test_a_system_is_solved_for_any_ridge_as_often_as_wanted() -> None:
    outs = {"q": 3, "k": 2}
    group = linear_group(5, outs)
    experts = {name: expert_of(5, out, name) for name, out in outs.items()}
    anchors = {name: expert_of(5, out, f"{name}/anchor") for name, out in outs.items()}
    task = Task(0, 5, 3, batch=3)

    def system() -> LinearSystem:
        sums = new_sums(group)
        sums.update(seen(task.cal, task.exp))
        sums.end_task("t", experts)
        return sums.system()

    def solve(system: System, ridge_lambda: float) -> list[Tensor]:
        solved = [system.solve(m, ridge_lambda, anchors[m.name].__getitem__) for m in group.modules]
        return [value for of in solved for value in of.values.values()]

    often = system()
    by_ridge = {}
    for ridge_lambda in (0.05, 3.0, 1e-3, 0.05):
        by_ridge[ridge_lambda] = values = solve(often, ridge_lambda)
        fresh = solve(system(), ridge_lambda)
        assert len(values) == 4 and all(map(torch.equal, values, fresh))
    assert not torch.equal(by_ridge[3.0][0], by_ridge[0.05][0])
    assert_equal(often, system(), rtol=0)


@pytest.mark.parametrize("route", ["input", "output"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("path, wording", [("cal", "merged model's"), ("exp", "expert's")])
def test_non_finite_features_name_task_path_and_module(
    route: Route, value: float, path: str, wording: str
) -> None:
    task = Task(0, 5, 3, batch=3)
    getattr(task, path)[1, 2, 3] = value
    sums = new_sums(linear_group(5, {"m": 3}, route))
    with pytest.raises(NonFiniteError, match=f"task task: the {wording} features .* at m"):
        task.add(sums, route, None)


def test_float32_is_near_float64() -> None:
    task = Task(0, 64, 8, batch=20)
    double, single = (new_sums(linear_group(64, {"m": 8}), dtype=d) for d in ("float64", "float32"))
    task.add(double, "input", task.rows)
    task.cal, task.exp = task.cal.float(), task.exp.float()
    task.expert = {leaf: value.float() for leaf, value in task.expert.items()}
    task.add(single, "input", task.rows)
    one, two = single.system(), double.system()
    torch.testing.assert_close(one.gram.double(), two.gram, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.rhs["m"].double(), two.rhs["m"], rtol=1e-5, atol=1e-5)


# --- norms -----------------------------------------------------------------------------------


def new_norm(width: int = 5) -> NormSums:
    norm = PlannedModule("norm", LayerNorm(), (width,), LEAVES, 1, width, width)
    chosen = CalibrationSettings(statistics_dtype="float64")
    return NormSums(Group((norm,), "nothing"), chosen, CPU)


PLAIN = {"norm": {"weight": torch.ones(5), "bias": torch.zeros(5)}}


@given(
    key=st.integers(0, 10**6), batch=st.integers(1, 5), size=st.integers(1, 5), rms=st.booleans()
)
@settings(deadline=None, max_examples=25)
def test_norm_sums_are_those_of_the_specification(
    key: int, batch: int, size: int, rms: bool
) -> None:
    norm = nn.RMSNorm(5, eps=1e-5) if rms else nn.LayerNorm(5, eps=1e-3)
    sums = new_norm()
    moments, gain, shift = torch.zeros(2, 5), torch.zeros(5), torch.zeros(5)
    for index in range(2):
        x = 3 * randn(batch + index, 4, 5, key=f"{key}/{index}") + 1
        r = randn(batch + index, 4, key=f"{key}/{index}/rows").clamp_min(0)
        x[r == 0] = math.nan
        w, b = randn(5, key=f"{key}/{index}/w"), randn(5, key=f"{key}/{index}/b")
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            sums.update(seen(x[part], rows=r[part], module=norm))
        sums.end_task("t", {"norm": {"weight": w} if rms else {"weight": w, "bias": b}})
        kept = x[r > 0]
        if not rms:
            kept = kept - kept.mean(1, keepdim=True)
        z = kept / (kept.square().mean(1, keepdim=True) + (1e-5 if rms else 1e-3)).sqrt()
        share = r[r > 0] / r.sum()
        if not len(z):
            continue
        e, m = share @ z.square(), share @ z
        moments = moments + torch.stack([e, m])
        gain = gain + e * w + (0 if rms else m * b)
        shift = shift + m * w + (0 if rms else b)
    system = sums.system()
    torch.testing.assert_close(system.moments, moments.double(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(system.expert_gain, gain.double(), rtol=1e-10, atol=1e-12)
    if not rms:
        torch.testing.assert_close(system.expert_shift, shift.double(), rtol=1e-10, atol=1e-12)


def test_norm_sums_do_not_grow_and_skip_tasks_without_rows() -> None:
    sums, norm = new_norm(), nn.LayerNorm(5)
    size = bytes_of(sums)
    for index in range(20):
        sums.update(seen(randn(2, 3, 5, key=index), module=norm))
        sums.end_task("t", PLAIN)
    sums.update(seen(randn(2, 3, 5, key=99), rows=torch.zeros(2, 3), module=norm))
    sums.end_task("t", PLAIN)
    assert bytes_of(sums) == size
    assert sums.system().tasks == 20 and sums.system().rows == 120


def test_non_finite_norm_input_names_task_and_module() -> None:
    sums, features = new_norm(), randn(2, 3, 5, key=0)
    features[1, 1, 1] = math.nan
    sums.update(seen(features, module=nn.LayerNorm(5)))
    with pytest.raises(NonFiniteError, match="task some: the merged model's .* at norm"):
        sums.end_task("some", PLAIN)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "RMSNorm without eps", "T5", "Llama"])
def test_normalise_is_the_norm_without_its_affine_part(kind: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    norm = {
        "LayerNorm": lambda: nn.LayerNorm(6, eps=1e-2),
        "RMSNorm": lambda: nn.RMSNorm(6, eps=1e-2),
        "RMSNorm without eps": lambda: nn.RMSNorm(6),
        "T5": lambda: T5LayerNorm(6, eps=1e-2),
        "Llama": lambda: LlamaRMSNorm(6, eps=1e-2),
    }[kind]()
    features = randn(3, 4, 6, key="features").float()
    with torch.no_grad():
        affine = normalise(norm, features)
        norm.weight.copy_(randn(6, key="gain"))
        expected = norm(features)
        assert not torch.allclose(affine, expected)
        shift = norm.bias if isinstance(norm, nn.LayerNorm) else 0
    torch.testing.assert_close(affine * norm.weight + shift, expected)
