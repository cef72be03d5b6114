"""The engine equals a slow, independent implementation to the last few bits of float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from reference import Reference, Weigh, ones
from tiny import (
    TOY_MODULES,
    Family,
    Toy,
    bert,
    clip,
    clip_modules,
    family,
    images,
    largest_difference,
    llama,
    mask_rows,
    split,
    text,
    toy_inputs,
)
from torch import Tensor

from featcal_fusionbench.architectures.clip_vision import clip_vision_rows
from featcal_fusionbench.calibration import RowRules, uniform_rows

TOLERANCE = 1e-9
SAMPLES = {"a": 5, "b": 3, "c": 7}
# exact in float32, in which the row rule of CLIP gives it
OTHERS = 0.25

clip_family = lru_cache(lambda: family(clip()))
toy_family = lru_cache(lambda: family(Toy()))


def weigh_class_token(module: str, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """The row weights of a two-block CLIP vision tower, from the specification's words."""
    weights = torch.ones(features.shape[:-1], dtype=torch.float64)
    if "layers.1." in module and not module.endswith(("k_proj", "v_proj")):
        weights[:, 1:] = OTHERS
    return weights


def weigh_mask(module: str, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    return inputs["attention_mask"]


def compare(
    models: Family,
    inputs: Mapping[str, Any],
    blocks: list[list[str]],
    *,
    batch_size: int,
    rules: RowRules = uniform_rows,
    weigh: Weigh = ones,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    **reference: Any,
) -> None:
    """Calibrate with both, and compare every tensor."""
    data = {task: split(of, batch_size) for task, of in inputs.items()}
    slow = Reference(**reference)
    calibrated, result = models.calibrate(
        data,
        rules,
        granularity=slow.granularity,
        ridge_lambda=slow.ridge_lambda,
        anchor_rho=slow.rho,
        target_alpha=slow.alpha,
        epsilon=slow.epsilon,
        calibrate_bias=slow.bias,
        calibrate_norm=slow.norm,
        include=include,
        exclude=exclude,
    )

    def chosen(name: str) -> bool:
        wanted = not include or any(re.search(pattern, name) for pattern in include)
        return wanted and not any(re.search(pattern, name) for pattern in exclude)

    blocks = [[name for name in names if chosen(name)] for names in blocks]
    whole = {task: [of] for task, of in inputs.items()}
    expected = slow.calibrate(models.merged, models.base, models.experts, whole, blocks, weigh)
    assert largest_difference(calibrated.state_dict(), expected.state_dict()) < TOLERANCE
    assert largest_difference(calibrated.state_dict(), models.merged.state_dict()) > 1e-2
    norms = {name for names in blocks for name in names if "norm" in name}
    names = {name for names in blocks for name in names if slow.norm or name not in norms}
    assert {module.name for module in result.modules} == names


@pytest.mark.parametrize("granularity", ["module", "block"])
@pytest.mark.parametrize(
    "batch_size, case",
    [
        (1, {}),
        (3, {"alpha": 0.0}),
        (2, {"alpha": 1.0, "rho": 0.5}),
        (7, {"bias": False}),
        (4, {"norm": False, "ridge_lambda": 1e-3}),
        (3, {"bias": False, "norm": False, "epsilon": 1e-3}),
        (3, {"include": (r"layers\.1\.",), "exclude": ("fc2$", "q_proj")}),
        (2, {"include": ("fc[12]$", "layer_norm")}),
        (5, {"exclude": (r"layers\.0\.",), "alpha": 1.0}),
    ],
    ids=str,
)
def test_clip(granularity: str, batch_size: int, case: dict[str, Any]) -> None:
    inputs = {task: images(count, task) for task, count in SAMPLES.items()}
    models = clip_family()
    compare(
        models,
        inputs,
        clip_modules(models.merged),
        batch_size=batch_size,
        rules=clip_vision_rows(OTHERS),
        weigh=weigh_class_token,
        granularity=granularity,
        **case,
    )


@pytest.mark.parametrize("granularity", ["module", "block"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_toy_with_padding(granularity: str, alpha: float) -> None:
    inputs = {task: toy_inputs(count, task) for task, count in SAMPLES.items()}
    compare(
        toy_family(),
        inputs,
        TOY_MODULES,
        batch_size=2,
        rules=mask_rows,
        weigh=weigh_mask,
        granularity=granularity,
        alpha=alpha,
    )


def test_modules_outside_blocks() -> None:
    inputs = {task: toy_inputs(count, task) for task, count in SAMPLES.items()}
    blocks = [["embed"], *TOY_MODULES, ["head"]]
    compare(toy_family(), inputs, blocks, batch_size=3, include=("",))


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_llama(granularity: str) -> None:
    names = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
             "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
             "mlp.down_proj")  # fmt: skip
    blocks = [[f"model.layers.{i}.{name}" for name in names] for i in range(2)]
    inputs = {task: text([6, 3, 5], task) for task in SAMPLES}
    # RMSNorm computes in float32 there, in the reference's forwards as in the engine's
    compare(
        family(llama()),
        inputs,
        blocks,
        batch_size=2,
        rules=mask_rows,
        weigh=weigh_mask,
        granularity=granularity,
    )


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_bert(granularity: str) -> None:
    names = ("attention.self.query", "attention.self.key", "attention.self.value",
             "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense",
             "output.dense", "output.LayerNorm")  # fmt: skip
    blocks = [[f"encoder.layer.{i}.{name}" for name in names] for i in range(2)]
    inputs = {task: text([6, 3, 5], task) for task in SAMPLES}
    compare(
        family(bert()),
        inputs,
        blocks,
        batch_size=2,
        rules=mask_rows,
        weigh=weigh_mask,
        granularity=granularity,
        alpha=0.6,
    )
