"""Each closed form is the minimiser of its objective, and says so where it cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import randn
from torch import Tensor

from featcal_fusionbench.calibration import NonFiniteError, SingularSystemError
from featcal_fusionbench.calibration.closed_form import (
    anchor,
    factorise,
    solve_bias,
    solve_layer_norm,
    solve_rms_norm,
    solve_weight,
)

NAME = "layers.3.mlp.fc1"


def spectrum(values: Tensor, key: object = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    q, _ = torch.linalg.qr(randn(len(values), len(values), key=key))
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def solve(gram: Tensor, rhs: Tensor, ridge_lambda: float, epsilon: float = 1e-8) -> Tensor:
    factor = factorise(gram, ridge_lambda, epsilon, name=NAME)
    return solve_weight(factor, rhs, name=NAME).value


def is_minimum(objective: Callable[..., Tensor], *solution: Tensor) -> bool:
    """Whether an objective's gradient vanishes: it is convex, so that this is its minimum."""
    variables = [value.clone().requires_grad_() for value in solution]
    value = objective(*variables)
    gradients = torch.autograd.grad(value, variables)
    bound = 1e-9 * max(1.0, float(value.detach()))
    return all(float(g.abs().max()) < bound for g in gradients)


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [40, 12, 5], ids=["tall", "square", "fewer rows than features"])
@pytest.mark.parametrize("ridge_lambda", [3.0, 0.05, 1e-5])
def test_weight_solves_the_stacked_least_squares_problem(rows: int, ridge_lambda: float) -> None:
    width, out, epsilon = 12, 7, 1e-8
    x, y = randn(rows, width, key="x"), randn(rows, out, key="y")
    weight_anchor = randn(out, width, key="anchor")
    ridge = math.sqrt(ridge_lambda + epsilon)
    left = torch.cat([x, ridge * torch.eye(width, dtype=torch.float64)])
    right = torch.cat([y, ridge_lambda / ridge * weight_anchor.T])
    expected = torch.linalg.lstsq(left, right).solution.T
    value = solve(x.T @ x, x.T @ y + ridge_lambda * weight_anchor.T, ridge_lambda, epsilon)
    assert value.is_contiguous()
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-8)


def test_a_healthy_solve_keeps_what_it_is_given_and_says_so() -> None:
    gram = spectrum(torch.linspace(1, 5, 9, dtype=torch.float64))
    rhs = randn(9, 4, key="rhs")
    given = gram.clone(), rhs.clone()
    factor = factorise(gram, 0.05, 1e-8, name=NAME)
    torch.testing.assert_close(factor.system, gram + (0.05 + 1e-8) * torch.eye(9))
    assert factor.damping == 0 and factor.cholesky.dtype == torch.float64
    assert solve_weight(factor, rhs, name=NAME).residual < 1e-14
    assert torch.equal(gram, given[0]) and torch.equal(rhs, given[1])


def test_collinear_features_are_no_problem_above_zero() -> None:
    x = randn(30, 6, key="x")
    x = torch.cat([x, x], dim=1)
    value = solve(x.T @ x, x.T @ randn(30, 4, key="y"), 1e-5, 1e-12)
    # the ridge shares a coefficient equally between two equal features
    torch.testing.assert_close(value[:, :6], value[:, 6:], rtol=1e-5, atol=1e-6)


def exact_collinear_gram() -> Tensor:
    """A Gram matrix of rank 32 and width 64 whose numbers are exact in float32."""
    x = (8 * randn(300, 32, key="collinear")).round().clamp(-20, 20)
    x = torch.cat([x, x], dim=1)
    return x.T @ x


def test_float64_rescues_what_float32_cannot_factorise() -> None:
    # In float32 the rounding of the factorisation exceeds λ, in float64 it does not; the
    # matrix itself is exact in both.
    gram, ridge_lambda = exact_collinear_gram(), 2.0**-9
    single = gram.float()
    assert torch.equal(single.double(), gram)
    system = single + ridge_lambda * torch.eye(64)
    assert torch.equal(system.double(), gram + ridge_lambda * torch.eye(64))
    assert int(torch.linalg.cholesky_ex(system).info) > 0
    factor = factorise(single, ridge_lambda, 1e-12, name=NAME)
    assert factor.cholesky.dtype == torch.float64 and factor.damping == 0
    value = randn(5, 64, key="w")
    value = (value + value.roll(32, 1)).float()  # equal on equal features: well determined
    solution = solve_weight(factor, system @ value.T, name=NAME)
    assert solution.value.dtype == torch.float32
    assert solution.residual < 1e-6
    expected = torch.linalg.solve(system.double(), (system @ value.T).double()).T
    torch.testing.assert_close(solution.value.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("below_zero, step", [(3e-10, 1e-9), (3e-8, 1e-7), (5e-7, 1e-6)])
def test_damping_is_the_smallest_that_helps_and_is_stated(below_zero: float, step: float) -> None:
    values = torch.ones(10, dtype=torch.float64)
    values[0] = -below_zero
    factor = factorise(spectrum(values), 1e-12, 1e-13, name=NAME)
    assert factor.damping == pytest.approx(step * 0.9, rel=1e-3)
    # the system itself is left undamped, and the residual measures against it
    assert float(torch.linalg.eigvalsh(factor.system)[0]) < 0
    assert solve_weight(factor, randn(10, 2, key="rhs"), name=NAME).residual > 1e-11


def test_no_damping_beyond_a_millionth() -> None:
    values = torch.ones(10, dtype=torch.float64)
    values[0] = -2e-6
    with pytest.raises(SingularSystemError, match=f"^{NAME}: .*ridge_lambda=1e-12.*Raise"):
        factorise(spectrum(values), 1e-12, 1e-13, name=NAME)


def test_zero_ridge_with_full_rank_is_least_squares() -> None:
    x, y = randn(50, 8, key="x"), randn(50, 3, key="y")
    expected = torch.linalg.lstsq(x, y).solution.T
    torch.testing.assert_close(solve(x.T @ x, x.T @ y, 0.0, 1e-14), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [11, 6, 1, 0])
def test_zero_ridge_without_full_rank_is_refused(dtype: torch.dtype, rank: int) -> None:
    # many matrices: rounding may make any single one look regular
    for key in range(30):
        x = (randn(40, rank, key=key) @ randn(rank, 12, key=f"{key}/mix")).to(dtype)
        gram = x.T @ x
        gram *= 100 / gram.norm().clamp_min(1e-8)
        with pytest.raises(SingularSystemError, match=f"^{NAME}: .*ridge_lambda") as caught:
            factorise(gram, 0.0, 1e-8, name=NAME)
        assert "n_samples" in str(caught.value)


@given(
    exponent=st.floats(0, 9),
    width=st.integers(2, 60),
    key=st.integers(0, 10**6),
    shape=st.sampled_from(["log", "linear", "one small", "one large"]),
)
@settings(deadline=None, max_examples=60)
def test_condition_is_within_a_small_factor(
    exponent: float, width: int, key: int, shape: str
) -> None:
    smallest = 10.0**-exponent
    values = {
        "log": torch.logspace(-exponent, 0, width, dtype=torch.float64),
        "linear": torch.linspace(smallest, 1, width, dtype=torch.float64),
        "one small": torch.tensor([smallest] + [1.0] * (width - 1), dtype=torch.float64),
        "one large": torch.tensor([smallest] * (width - 1) + [1.0], dtype=torch.float64),
    }[shape]
    factor = factorise(spectrum(values, key), 1e-13, 1e-14, name=NAME)
    exact = float(torch.linalg.cond(factor.system))
    # iterations from any start approach it from below
    assert exact / 2 < factor.condition < exact * 1.01


def test_nan_and_infinity_are_named() -> None:
    gram = spectrum(torch.ones(5, dtype=torch.float64))
    factor = factorise(gram, 0.05, 1e-8, name=NAME)
    rhs = randn(5, 2, key="rhs")
    rhs[3, 1] = math.nan
    with pytest.raises(NonFiniteError, match=f"^{NAME}: .*right-hand side is not finite"):
        solve_weight(factor, rhs, name=NAME)
    for value in (math.nan, math.inf):
        broken = gram.clone()
        broken[2, 2] = value
        with pytest.raises(NonFiniteError, match=f"^{NAME}: "):
            factorise(broken, 0.05, 1e-8, name=NAME)


def test_nan_off_the_diagonal_is_no_solution() -> None:
    broken = spectrum(torch.ones(5, dtype=torch.float64))
    broken[4, 1] = broken[1, 4] = math.nan
    with pytest.raises((NonFiniteError, SingularSystemError), match=f"^{NAME}: "):
        solve(broken, randn(5, 2, key="rhs"), 0.05)


def test_anchor_extrapolates() -> None:
    merged, base = randn(4, 3, key="merged"), randn(4, 3, key="base")
    assert torch.equal(anchor(merged, base, 0.0), base)
    torch.testing.assert_close(anchor(merged, base, 1.0), merged)
    torch.testing.assert_close(anchor(merged, base, 2.2), 2.2 * merged - 1.2 * base)


# --- biases and norms ------------------------------------------------------------------------


@given(ridge_lambda=st.floats(0, 10), tasks=st.integers(1, 4), key=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_bias_minimises_its_objective(ridge_lambda: float, tasks: int, key: int) -> None:
    def draw(name: str, *shape: int) -> Tensor:
        return randn(*shape, key=f"{key}/{name}")

    weight, bias_anchor = draw("weight", 3, 5), draw("anchor", 3)
    omegas = [0.1 + float(draw(f"omega{i}", 1).abs()) for i in range(tasks)]
    cals = [draw(f"cal{i}", 7, 5) for i in range(tasks)]
    targets = [draw(f"target{i}", 7, 3) for i in range(tasks)]  # expert outputs, bias included
    bias = solve_bias(
        sum((w * t.mean(0) for w, t in zip(omegas, targets, strict=True)), torch.zeros(3)),
        sum((w * x.mean(0) for w, x in zip(omegas, cals, strict=True)), torch.zeros(5)),
        sum(omegas),
        weight,
        ridge_lambda,
        bias_anchor,
    )

    def objective(b: Tensor) -> Tensor:
        value = ridge_lambda * (b - bias_anchor).square().sum()
        for omega, x, target in zip(omegas, cals, targets, strict=True):
            value = value + omega * (x @ weight.T + b - target).square().sum(1).mean()
        return value

    assert is_minimum(objective, bias)


@given(
    ridge_lambda=st.floats(1e-3, 10),
    tasks=st.integers(1, 4),
    key=st.integers(0, 10**6),
    has_shift=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_norms_minimise_their_objective(
    ridge_lambda: float, tasks: int, key: int, has_shift: bool
) -> None:
    def draw(name: str, *shape: int) -> Tensor:
        return randn(*shape, key=f"{key}/{name}")

    zs = [draw(f"z{i}", 9, 4) for i in range(tasks)]
    gains = [1 + draw(f"gain{i}", 4) for i in range(tasks)]
    shifts = [draw(f"shift{i}", 4) * has_shift for i in range(tasks)]
    gain_anchor, shift_anchor = draw("gain anchor", 4), draw("shift anchor", 4)
    e, m = [z.square().mean(0) for z in zs], [z.mean(0) for z in zs]
    zero = torch.zeros(4)
    parts = range(tasks)
    expert_gain = sum((e[i] * gains[i] + m[i] * shifts[i] for i in parts), zero)
    expert_shift = sum((m[i] * gains[i] + shifts[i] for i in parts), zero)

    def objective(gain: Tensor, shift: Tensor) -> Tensor:
        value = ridge_lambda * (gain - gain_anchor).square().sum()
        if has_shift:
            value = value + ridge_lambda * (shift - shift_anchor).square().sum()
        for i in parts:
            error = (gain - gains[i]) * zs[i] + shift - shifts[i]
            value = value + error.square().mean(0).sum()
        return value

    if has_shift:
        sums = torch.stack([sum(e, zero), sum(m, zero)])
        solution = solve_layer_norm(
            sums, expert_gain, expert_shift, tasks, ridge_lambda, gain_anchor, shift_anchor, 1e-8
        )
        assert is_minimum(objective, *solution)
    else:
        gain = solve_rms_norm(sum(e, zero), expert_gain, ridge_lambda, gain_anchor, 1e-8)
        assert is_minimum(lambda value: objective(value, zero), gain)


def test_degenerate_norms_stay_finite() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    gain, shift = solve_layer_norm(torch.zeros(2, 3), zero, one, 1, 0.0, one, one, 1e-8)
    assert torch.isfinite(gain).all() and torch.isfinite(shift).all()
    assert torch.isfinite(solve_rms_norm(zero, zero, 0.0, one, 1e-8)).all()
    # a constant z of 1 leaves only γ + β determined
    sums = torch.ones(2, 3)
    gain, shift = solve_layer_norm(sums, one, one, 1, 0.0, one, one, 1e-8)
    assert torch.isfinite(gain).all() and torch.isfinite(shift).all()
