"""The closed forms of FeatCal (arXiv 2605.13030) as pure functions of running sums.

Shapes: ``in`` and ``out`` are a Linear's widths. Everything is computed in the dtype of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import NonFiniteError, SingularSystemError

__all__ = [
    "Factor",
    "Solution",
    "anchor",
    "factorise",
    "solve_bias",
    "solve_layer_norm",
    "solve_rms_norm",
    "solve_weight",
]

# Damping tried, relative to the mean diagonal, where rounding makes the factorisation fail although
# λ > 0. The largest is far below any useful λ: beyond it the sums themselves are broken.
_DAMPING_LADDER = (0.0, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6)
_EIGENVALUE_ITERATIONS = 12


@dataclass(frozen=True)
class Factor:
    """A Cholesky factor of the ridge system that several Linears with one input share.

    Attributes:
        ridge_lambda: λ.
        system: A = Σ ω_i G_i + (λ + ε) I, shape (in, in), damping not included.
        cholesky: Lower factor of A + damping·I, in the precision that could be factorised.
        damping: What was added to the diagonal beyond λ + ε.
        condition: Estimate of the 2-norm condition of A.
    """

    ridge_lambda: float
    system: Tensor
    cholesky: Tensor
    damping: float
    condition: float


@dataclass(frozen=True)
class Solution:
    """A solved weight.

    Attributes:
        value: The weight, shape (out, in).
        residual: ‖A·valueᵀ − B‖_F / ‖B‖_F.
    """

    value: Tensor
    residual: float


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """The anchor ρ·merged + (1−ρ)·base that the ridge pulls a parameter towards."""
    return torch.lerp(base, merged, rho)


def factorise(gram: Tensor, ridge_lambda: float, epsilon: float, *, name: str) -> Factor:
    """Factorise A = Σ ω_i G_i + (λ + ε) I.

    Args:
        gram: Σ ω_i G_i, symmetric, shape (in, in). It stays as it is, for other λ.
        ridge_lambda: λ ≥ 0.
        epsilon: ε > 0, on the diagonal only.
        name: Name of the module, for messages.

    Returns:
        The factor. Where the precision of the sums does not suffice, float64 is tried, then a
        damping of at most 1e-6 of the mean diagonal, which the result states.

    Raises:
        SingularSystemError: λ = 0 and the Gram matrix does not have full rank, or nothing helped.
    """
    system = gram.clone()
    system.diagonal().add_(ridge_lambda + epsilon)
    scale = float(system.diagonal().mean())
    if not scale < float("inf"):
        raise NonFiniteError(f"{name}: the Gram matrix holds NaN or Inf.")
    for damping in _DAMPING_LADDER:
        for dtype in dict.fromkeys((system.dtype, torch.float64)):
            matrix = system.to(dtype, copy=damping > 0)
            if damping > 0:
                matrix.diagonal().add_(damping * scale)
            cholesky, info = torch.linalg.cholesky_ex(matrix)
            if int(info) == 0:
                largest, smallest = _extreme_eigenvalues(matrix, cholesky)
                if ridge_lambda == 0:
                    _require_full_rank(smallest, largest, epsilon, system, name)
                condition = largest / smallest
                return Factor(ridge_lambda, system, cholesky, damping * scale, condition)
        if ridge_lambda == 0:
            break
    raise SingularSystemError(
        f"{name}: the system is singular to working precision at ridge_lambda={ridge_lambda:g}, "
        "likely because there are fewer rows than input features, or collinear features. Raise "
        "ridge_lambda or n_samples, or set statistics_dtype=float64."
    )


def _require_full_rank(
    smallest: float, largest: float, epsilon: float, system: Tensor, name: str
) -> None:
    """Refuse λ = 0 where only ε or rounding keeps the system away from singularity.

    The rounding is that of the sums: factorising them in float64 does not undo it.
    """
    rounding = system.shape[0] * torch.finfo(system.dtype).eps * largest
    if smallest <= 2 * epsilon + rounding:
        raise SingularSystemError(
            f"{name}: the system is singular at ridge_lambda=0 (smallest eigenvalue about "
            f"{smallest:.1e}, largest {largest:.1e}, rounding {rounding:.1e}): the calibration "
            "inputs do not span the input features. Set ridge_lambda above 0, raise n_samples, or "
            "set statistics_dtype=float64."
        )


def _extreme_eigenvalues(matrix: Tensor, cholesky: Tensor) -> tuple[float, float]:
    """Largest and smallest eigenvalue by power and inverse iteration from a fixed start."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[0], 1, generator=generator, dtype=torch.float64)
    start = start.to(matrix)
    largest, vector = 0.0, start / start.norm()
    for _ in range(_EIGENVALUE_ITERATIONS):
        vector = matrix @ vector
        largest = float(vector.norm())
        vector = vector / largest
    inverse, vector = 0.0, start / start.norm()
    for _ in range(_EIGENVALUE_ITERATIONS):
        vector = torch.cholesky_solve(vector, cholesky)
        inverse = float(vector.norm())
        vector = vector / inverse
    return largest, 1 / inverse


def solve_weight(factor: Factor, rhs: Tensor, *, name: str) -> Solution:
    """Solve A Wᵀ = B for one Linear.

    Args:
        factor: The factorised A.
        rhs: B = Σ ω_i C_i W_iᵀ + λ W_ancᵀ, shape (in, out).
        name: Name of the module, for messages.

    Raises:
        NonFiniteError: The solution holds NaN or Inf.
    """
    transposed = torch.cholesky_solve(rhs.to(factor.cholesky.dtype), factor.cholesky).to(rhs.dtype)
    if not bool(torch.isfinite(transposed).all()):
        raise NonFiniteError(
            f"{name}: the solution holds NaN or Inf; its right-hand side "
            f"{'is' if bool(torch.isfinite(rhs).all()) else 'is not'} finite. Check the expert "
            "weights and set statistics_dtype=float64."
        )
    error = torch.addmm(rhs, factor.system, transposed, beta=-1)
    residual = float(error.norm() / rhs.norm().clamp_min(torch.finfo(rhs.dtype).tiny))
    return Solution(transposed.T.contiguous(), residual)


def solve_bias(
    expert_term: Tensor,
    mean_cal: Tensor,
    total_weight: float,
    weight: Tensor,
    ridge_lambda: float,
    bias_anchor: Tensor,
) -> Tensor:
    """Solve for a bias: [Σ ω_i (b_i + W_i μ_tgt,i − W μ_cal,i) + λ b_anc] / (Σ ω_i + λ).

    Args:
        expert_term: Σ ω_i (b_i + W_i μ_tgt,i), shape (out,).
        mean_cal: Σ ω_i μ_cal,i, shape (in,).
        total_weight: Σ ω_i.
        weight: The new W, shape (out, in).
        ridge_lambda: λ.
        bias_anchor: b_anc, shape (out,).

    Returns:
        The bias, shape (out,).
    """
    numerator = expert_term - weight @ mean_cal + ridge_lambda * bias_anchor
    return numerator / (total_weight + ridge_lambda)


def solve_layer_norm(
    sums: Tensor, expert_gain: Tensor, expert_shift: Tensor, tasks: float,
    ridge_lambda: float, gain_anchor: Tensor, shift_anchor: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gain γ and shift β of a LayerNorm, a 2×2 system in each channel.

    With z the merged model's normalised input, e_i = E[z²] and m_i = E[z]::

        [Σe_i + λ   Σm_i ] [γ]   [Σ(e_i γ_i + m_i β_i) + λ γ_anc]
        [Σm_i      K + λ ] [β] = [Σ(m_i γ_i + β_i)     + λ β_anc]

    Args:
        sums: Σ e_i and Σ m_i, shape (2, channels).
        expert_gain: Σ (e_i γ_i + m_i β_i), shape (channels,).
        expert_shift: Σ (m_i γ_i + β_i), shape (channels,).
        tasks: K, the number of tasks summed over.
        ridge_lambda: λ.
        gain_anchor: γ_anc, shape (channels,).
        shift_anchor: β_anc, shape (channels,).
        epsilon: Lower bound of the determinant.

    Returns:
        γ and β, each of shape (channels,).
    """
    a, b, d = sums[0] + ridge_lambda, sums[1], tasks + ridge_lambda
    first = expert_gain + ridge_lambda * gain_anchor
    second = expert_shift + ridge_lambda * shift_anchor
    determinant = (a * d - b * b).clamp_min(epsilon)
    return (d * first - b * second) / determinant, (a * second - b * first) / determinant


def solve_rms_norm(
    power: Tensor, expert_gain: Tensor, ridge_lambda: float, gain_anchor: Tensor, epsilon: float
) -> Tensor:
    """Gain γ of a norm without a shift (RMSNorm, T5's LayerNorm).

    The LayerNorm system of FeatCal minimises, per channel, Σ_i E[(γ z + β − γ_i z − β_i)²] +
    λ (γ − γ_anc)² + λ (β − β_anc)². With β and β_i absent its first row is left:
    (Σ e_i + λ) γ = Σ e_i γ_i + λ γ_anc.

    Args:
        power: Σ e_i = Σ E[z²], shape (channels,).
        expert_gain: Σ e_i γ_i, shape (channels,).
        ridge_lambda: λ.
        gain_anchor: γ_anc, shape (channels,).
        epsilon: Lower bound of the denominator.
    """
    return (expert_gain + ridge_lambda * gain_anchor) / (power + ridge_lambda).clamp_min(epsilon)
