"""The engine reproduces the released implementation on its own tiny CLIP.

`data/golden/manifest.json` says where the numbers come from: outputs of the authors' released code
in float32, and their difference from a run of the same algorithm in float64.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import largest_difference, split
from torch import Tensor, nn

from featcal_fusionbench.architectures.clip_vision import ClipVisionSettings, clip_vision_rows
from featcal_fusionbench.calibration import (
    CalibrationResult,
    CalibrationSettings,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.kinds import linear, norm
from featcal_fusionbench.calibration.kinds.base import Tensors

GOLDEN = Path(__file__).with_name("golden")
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
TOLERANCE = MANIFEST["suggested_tolerance_max_abs"]
PREFIX = "vision_model."


@lru_cache
def load(name: str) -> dict[str, Tensor]:
    """One golden file; float16 is lossless storage of float32 values."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    return {k: v.float() if v.dtype == torch.float16 else v for k, v in tensors.items()}


@lru_cache
def tower() -> nn.Module:
    """The merged model, in the layout of the installed transformers."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = json.loads((GOLDEN / "config.json").read_text())["vision_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "image_size", "patch_size", "hidden_act", "layer_norm_eps")  # fmt: skip
    model = CLIPVisionModel(CLIPVisionConfig(**{name: config[name] for name in names}))
    state = model.state_dict()
    merged = for_layout(load("merged_ta0.3"), state)
    missing, unexpected = model.load_state_dict(merged, strict=False)
    assert not unexpected and all(name.endswith("position_ids") for name in missing)
    return model.eval()


def for_layout(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Golden tensors of the vision tower under the names of a model's state."""
    has_prefix = any(name.startswith(PREFIX) for name in state)
    vision = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
    return vision if has_prefix else {k.removeprefix(PREFIX): v for k, v in vision.items()}


def as_golden(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's floating tensors under the golden names."""
    return {
        k if k.startswith(PREFIX) else PREFIX + k: v.cpu()
        for k, v in state.items()
        if v.is_floating_point()
    }


def run(
    case: str,
    model: nn.Module,
    *,
    tasks: tuple[str, ...] = tuple(MANIFEST["tasks"]),
    batch_size: int = MANIFEST["batch_size"],
    **changes: Any,
) -> CalibrationResult:
    """Calibrate `model` with the settings of a golden case."""
    golden = MANIFEST["cases"][case]
    settings = CalibrationSettings(
        **{
            "granularity": "block",
            "ridge_lambda": golden["lambda_ratio"],
            "anchor_rho": golden["anchor_blend_rho"],
            "target_alpha": golden["teacher_interp_alpha"],
            "epsilon": golden["covariance_eps"],
            "calibrate_bias": golden["calibrate_bias"],
            "calibrate_norm": golden["calibrate_layernorm"],
        }
        | changes
    )
    state = model.state_dict()
    data = {task: split({"pixel_values": load("pixels")[task]}, batch_size) for task in tasks}
    experts = {task: for_layout(load(f"expert_{task}"), state) for task in tasks}
    rules = clip_vision_rows(ClipVisionSettings().nonclass_row_weight)
    plan = build_plan(model, {"pixel_values": load("pixels")["task_a"][:1]}, settings, rules)
    return calibrate(model, for_layout(load("base_clip"), state), experts, data, plan, settings)


@pytest.mark.parametrize("batch_size", [4, 5, 12])
@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_block_granularity_equals_the_released_code(case: str, batch_size: int) -> None:
    model = copy.deepcopy(tower())
    run(case, model, batch_size=batch_size)
    state, expected = as_golden(model.state_dict()), load(f"calibrated_{case}")
    assert largest_difference({k: state[k] for k in expected}, expected) <= TOLERANCE[case]


class _Wrapped(nn.Module):
    """A tower below `vision_model`, as transformers < 5.6 and CLIPModel have it."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.vision_model = tower

    def forward(self, pixel_values: Tensor) -> Any:
        return self.vision_model(pixel_values)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_both_key_layouts(has_prefix: bool) -> None:
    model = copy.deepcopy(tower())
    inner = getattr(model, "vision_model", model)
    model = _Wrapped(inner) if has_prefix else inner
    assert all(name.startswith(PREFIX) == has_prefix for name in model.state_dict())
    run("a", model)
    state, expected = as_golden(model.state_dict()), load("calibrated_a")
    assert largest_difference({k: state[k] for k in expected}, expected) <= TOLERANCE["a"]


@pytest.mark.parametrize("case, tolerance", [("a", 1e-7), ("d", 1e-5)])
def test_float64_equals_the_released_algorithm_in_float64(case: str, tolerance: float) -> None:
    model = copy.deepcopy(tower()).double()
    run(case, model, statistics_dtype="float64")
    differences = load("float64_minus_float32_a_d")
    expected = {
        name: value.double() + differences[f"{case}::{name}"].double()
        for name, value in load(f"calibrated_{case}").items()
    }
    state = as_golden(model.state_dict())
    assert largest_difference({k: state[k] for k in expected}, expected) <= tolerance


@pytest.mark.parametrize("case", ["a", "b"])
def test_only_planned_tensors_differ_from_the_merged_model(case: str) -> None:
    model = copy.deepcopy(tower())
    result = run(case, model)
    state, merged = as_golden(model.state_dict()), load("merged_ta0.3")
    changed = {name for name in merged if not torch.equal(state[name], merged[name])}
    leaves = ("weight", "bias") if case == "a" else ("weight",)
    planned = {f"{m.name}.{leaf}" for m in result.modules for leaf in leaves}
    assert changed == {n if n.startswith(PREFIX) else PREFIX + n for n in planned}
    if case == "a":
        assert changed == set(load("calibrated_a"))


@pytest.mark.parametrize("case", ["a", "d"])
def test_pooled_outputs_of_the_calibrated_model(case: str) -> None:
    model = copy.deepcopy(tower())
    run(case, model)
    for task in MANIFEST["tasks"]:
        with torch.no_grad():
            pooled = model(pixel_values=load("pixels")[task]).pooler_output
        expected, merged = (load("pooled_outputs")[f"{of}.{task}"] for of in (case, "merged"))
        error = float((pooled - expected).norm() / expected.norm())
        assert error < 1e-3 < 0.05 < float((merged - expected).norm() / expected.norm())


def test_module_granularity_is_near_but_not_the_same() -> None:
    block, module = copy.deepcopy(tower()), copy.deepcopy(tower())
    run("a", block)
    run("a", module, granularity="module")
    difference = largest_difference(block.state_dict(), module.state_dict())
    assert 1e-3 < difference < 0.2
    # nothing before the first block's output projection depends on the granularity
    prefix = PREFIX if any(n.startswith(PREFIX) for n in block.state_dict()) else ""
    query = f"{prefix}encoder.layers.0.layer_norm1.weight"
    assert torch.equal(block.state_dict()[query], module.state_dict()[query])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    model = copy.deepcopy(tower()).cuda()
    run("a", model)
    state, expected = as_golden(model.state_dict()), load("calibrated_a")
    assert largest_difference({k: state[k] for k in expected}, expected) <= TOLERANCE["a"]


class _Recorder:
    """Copies of the sums of all groups, by name of the leader."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.linear: dict[str, linear.LinearSystem] = {}
        self.norm: dict[str, norm.NormSystem] = {}
        recorder = self

        class RecordedLinear(linear.LinearSums):
            def end_task(self, task: str, parameters: Mapping[str, Tensors]) -> None:
                super().end_task(task, parameters)
                recorder.linear.setdefault(self._group.leader.name, copy.deepcopy(self.system()))

        class RecordedNorm(norm.NormSums):
            def end_task(self, task: str, parameters: Mapping[str, Tensors]) -> None:
                super().end_task(task, parameters)
                recorder.norm.setdefault(self._name, copy.deepcopy(self.system()))

        monkeypatch.setattr(linear, "LinearSums", RecordedLinear)
        monkeypatch.setattr(norm, "NormSums", RecordedNorm)


def test_sums_of_the_first_block_equal_the_released_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = _Recorder(monkeypatch)
    # with one task, the sums over tasks are that task's, times its weight
    run("a", copy.deepcopy(tower()), tasks=("task_a",))
    stats, expert = load("stats_a_layer0_task_a"), load("expert_task_a")

    def close(value: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)

    seen = set()
    for leader, sums in recorder.linear.items():
        _, found, module = leader.partition("encoder.layers.0.")
        if not found:
            continue
        seen.add(module)
        gram = stats[f"{module}.cov_ss"]
        omega = 1 / float(gram.norm())
        assert sums.task_weight == pytest.approx(omega, rel=1e-5)
        close(sums.gram / omega, gram)
        close(sums.mean_cal / omega, stats[f"{module}.mean_student"])
        # the released "teacher" is the target: already interpolated between the two paths
        target, mean = stats[f"{module}.cross_st"], stats[f"{module}.mean_teacher"]
        assert sums.rhs.keys() == sums.expert_bias.keys()
        for name, rhs in sums.rhs.items():
            golden = name if name.startswith(PREFIX) else PREFIX + name
            weight, bias = expert[f"{golden}.weight"], expert[f"{golden}.bias"]
            close(rhs / omega, target @ weight.T)
            close(sums.expert_bias[name] / omega, bias + weight @ mean)
    assert seen == {"self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"}
    for leader, sums in recorder.norm.items():
        _, found, module = leader.partition("encoder.layers.0.")
        if found:
            close(sums.moments[0], stats[f"{module}.energy_student"])
            close(sums.moments[1], stats[f"{module}.mean_student"])
