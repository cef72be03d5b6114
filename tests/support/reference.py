"""FeatCal written down a second time: slow, plain, and sharing no code with the engine.

Whole forwards of whole models with ordinary hooks, every row of every task kept, and each closed
form replaced by what it is the solution of: a least squares problem with the ridge as extra rows,
handed to NumPy's `lstsq`. `granularity="module"` recomputes all forwards for every single module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]
Weigh = Callable[[str, Tensor, Mapping[str, Any]], Tensor]
"""Row weights of shape `features.shape[:-1]` from a module's name, features and inputs."""


def ones(module: str, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Every row counts the same."""
    return torch.ones(features.shape[:-1])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One calibration's settings; the defaults are the engine's."""

    granularity: str = "module"
    ridge_lambda: float = 0.05
    rho: float = 2.0
    alpha: float = 0.3
    epsilon: float = 1e-8
    bias: bool = True
    norm: bool = True

    def calibrate(
        self,
        merged: nn.Module,
        base: Mapping[str, Tensor],
        experts: Mapping[str, nn.Module],
        data: Mapping[str, Sequence[Mapping[str, Any]]],
        blocks: Sequence[Sequence[str]],
        weigh: Weigh = ones,
    ) -> nn.Module:
        """A calibrated copy of `merged`.

        Args:
            merged: the merged model.
            base: weights of the base.
            experts: expert models by task.
            data: batches by task; how they are cut does not matter.
            blocks: names of the modules to calibrate in forward order, block by block.
            weigh: row weights.
        """
        model = copy.deepcopy(merged)
        for names in blocks:
            steps = [[name] for name in names] if self.granularity == "module" else [names]
            for step in steps:
                new = {}
                for name in step:
                    new |= self._solve(name, model, base, experts, data, weigh)
                model.load_state_dict(new, strict=False)
        return model

    def _solve(
        self,
        name: str,
        model: nn.Module,
        base: Mapping[str, Tensor],
        experts: Mapping[str, nn.Module],
        data: Mapping[str, Sequence[Mapping[str, Any]]],
        weigh: Weigh,
    ) -> dict[str, Tensor]:
        module = model.get_submodule(name)
        tasks = []
        for task, expert in experts.items():
            cal, exp, rows = [], [], []
            for inputs in data[task]:
                features = input_of(model, name, inputs)
                cal.append(features.reshape(-1, features.shape[-1]).numpy())
                other = input_of(expert, name, inputs)
                exp.append(other.reshape(-1, other.shape[-1]).numpy())
                rows.append(weigh(name, features, inputs).reshape(-1).double().numpy())
            r = np.concatenate(rows)
            kept = r > 0
            if kept.any():
                part = _Task(
                    cal=np.concatenate(cal)[kept],
                    exp=np.concatenate(exp)[kept],
                    share=r[kept] / r.sum(),
                    weight=array(expert.get_submodule(name).weight),
                    bias=_bias(expert.get_submodule(name)),
                )
                tasks.append(part)
        weight_anchor = self._anchor(array(module.weight), array(base[f"{name}.weight"]))
        bias = _bias(module)
        bias_anchor = None if bias is None else self._anchor(bias, array(base[f"{name}.bias"]))
        if isinstance(module, nn.Linear):
            solved = self._linear(tasks, weight_anchor, bias_anchor if self.bias else None)
        elif self.norm:
            solved = self._norm(module, tasks, weight_anchor, bias_anchor)
        else:
            solved = {}
        return {f"{name}.{leaf}": torch.from_numpy(value) for leaf, value in solved.items()}

    def _anchor(self, merged: Array, base: Array) -> Array:
        return self.rho * merged + (1 - self.rho) * base

    def _linear(
        self, tasks: Sequence[_Task], anchor: Array, bias_anchor: Array | None
    ) -> dict[str, Array]:
        """min Σ ω_i Σ_rows share ‖x_cal Wᵀ − x_tgt W_iᵀ‖² + ridge, over W; then over b."""
        left, right, omegas = [], [], []
        for task in tasks:
            gram = sum(s * np.outer(x, x) for s, x in zip(task.share, task.cal, strict=True))
            omegas.append(1 / max(float(np.linalg.norm(gram)), self.epsilon))
            target = self.alpha * task.exp + (1 - self.alpha) * task.cal
            root = np.sqrt(omegas[-1] * task.share)[:, None]
            left.append(root * task.cal)
            right.append(root * (target @ task.weight.T))
        ridge = np.sqrt(self.ridge_lambda + self.epsilon)
        left.append(ridge * np.eye(anchor.shape[1]))
        right.append(self.ridge_lambda / ridge * anchor.T)
        weight = least_squares(np.concatenate(left), np.concatenate(right)).T
        if bias_anchor is None:
            return {"weight": weight}
        left, right = [], []
        for omega, task in zip(omegas, tasks, strict=True):
            target = self.alpha * task.exp + (1 - self.alpha) * task.cal
            outputs = target @ task.weight.T + task.bias - task.cal @ weight.T
            left.append(np.sqrt(omega))
            right.append(np.sqrt(omega) * (task.share @ outputs))
        left.append(np.sqrt(self.ridge_lambda))
        right.append(np.sqrt(self.ridge_lambda) * bias_anchor)
        bias = least_squares(np.array(left)[:, None], np.array(right))[0]
        return {"weight": weight, "bias": bias}

    def _norm(
        self,
        module: nn.Module,
        tasks: Sequence[_Task],
        gain_anchor: Array,
        shift_anchor: Array | None,
    ) -> dict[str, Array]:
        """Per channel: min Σ_i E[(γ z + β − γ_i z − β_i)²] + λ(γ − γ_anc)² + λ(β − β_anc)²."""
        zs = [normalised(module, task.cal) for task in tasks]
        root = np.sqrt(self.ridge_lambda)
        gains, shifts = [], []
        for channel in range(len(gain_anchor)):
            left, right = [], []
            for z, task in zip(zs, tasks, strict=True):
                column, share = z[:, channel], np.sqrt(task.share)
                output = task.weight[channel] * column
                if task.bias is not None:
                    output = output + task.bias[channel]
                left.append(np.stack([share * column, share], axis=1))
                right.append(share * output)
            left.append(root * np.eye(2))
            anchors = [gain_anchor[channel], 0 if shift_anchor is None else shift_anchor[channel]]
            right.append(root * np.array(anchors))
            matrix, vector = np.concatenate(left), np.concatenate(right)
            if shift_anchor is None:
                gains.append(least_squares(matrix[:-1, :1], vector[:-1])[0])
            else:
                gain, shift = least_squares(matrix, vector)
                gains.append(gain)
                shifts.append(shift)
        solved = {"weight": np.array(gains)}
        return solved if shift_anchor is None else solved | {"bias": np.array(shifts)}


@dataclass(frozen=True)
class _Task:
    """All rows of one task at one module, the share of each, and its expert's parameters."""

    cal: Array
    exp: Array
    share: Array
    weight: Array
    bias: Array | None


def input_of(model: nn.Module, name: str, inputs: Mapping[str, Any]) -> Tensor:
    """What a module is called with in a forward of the whole model."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(next(iter([*args, *kwargs.values()]))),
        with_kwargs=True,
    )
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    (features,) = seen
    return features


def normalised(module: nn.Module, features: Array) -> Array:
    """Rows before the affine part of a LayerNorm, or of an RMSNorm."""
    if isinstance(module, nn.LayerNorm):
        centred = features - features.mean(1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(1, keepdims=True) + module.eps)
    epsilon: Any = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return features / np.sqrt((features**2).mean(1, keepdims=True) + epsilon)


def least_squares(left: Array, right: Array) -> Array:
    """The minimiser of ‖left·x − right‖."""
    return np.linalg.lstsq(left, right, rcond=None)[0]


def array(tensor: Any) -> Array:
    """A tensor as float64 numbers."""
    return tensor.detach().double().numpy()


def _bias(module: nn.Module) -> Array | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else array(bias)
