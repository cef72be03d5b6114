"""The FusionBench methods, called as Python objects on the pico family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench import BaseAlgorithm
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from pico import Pico
from torch import Tensor, nn
from transformers import CLIPVisionModel

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.method import preparation, recorder
from featcal_fusionbench.pools.opening import floating_tensors
from featcal_fusionbench.report import RunReport, write_figure

TASK_ARITHMETIC = {
    "_target_": "fusion_bench.method.TaskArithmeticAlgorithm",
    "scaling_factor": 0.3,
}


def featcal(output_dir: Path, **settings: Any) -> FeatCalAlgorithm:
    settings = {"merger": TASK_ARITHMETIC, "n_samples": 20, "n_heldout": 4, **settings}
    return FeatCalAlgorithm(output_dir=str(output_dir), **settings)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in floating_tensors(model).items()}


def differs(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def read(output_dir: Path) -> RunReport:
    return RunReport.read(output_dir / "featcal_report.json")


def test_settings_of_another_architecture_are_warned_of(pico: Pico, tmp_path: Path) -> None:
    featcal(tmp_path, plan_only=True, decoder_tokens=3).run(pico.instance_pool())
    report = read(tmp_path)
    (warning,) = [text for text in report.warnings if "no effect" in text]
    assert warning == "decoder_tokens=3 has no effect on a CLIP vision tower: it is for a T5."
    assert report.architecture_settings == {"nonclass_row_weight": 0.01}


def test_calibration_changes_what_the_plan_names_and_nothing_else(
    pico: Pico, tmp_path: Path
) -> None:
    pool = pico.instance_pool()
    merged = MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(pool)
    model = featcal(tmp_path).run(pool)
    changed = differs(weights(merged), weights(model))
    report = read(tmp_path)
    assert report.result is not None and report.status == "complete"
    planned = {module.name for module in report.result.modules}
    assert {name.rpartition(".")[0] for name in changed} == planned
    assert all("encoder.layers" in name for name in planned)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_pool_is_not_changed_and_runs_repeat(pico: Pico, tmp_path: Path, granularity: str) -> None:
    pool = pico.instance_pool()
    before = {name: weights(pool.load_model(name)) for name in pool.all_model_names}
    algorithm = featcal(tmp_path, granularity=granularity)
    first = weights(algorithm.run(pool))
    torch.rand(7)  # the global generator must not matter
    second = weights(algorithm.run(pool))
    assert differs(first, second) == []
    for name, tensors in before.items():
        assert differs(tensors, weights(pool.load_model(name))) == [], name
    assert not pool.has_merged


def test_seed_changes_the_samples(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    featcal(tmp_path / "a", seed=0).run(pool)
    featcal(tmp_path / "b", seed=1).run(pool)
    a, b = read(tmp_path / "a").data[0], read(tmp_path / "b").data[0]
    assert set(a.indices) != set(b.indices)


def test_calibration_brings_features_nearer_to_the_expert(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    for task in pico.tasks[1:]:  # experts of random weights have too little in common for one model
        del pool._models[task]
    featcal(tmp_path, n_samples=40, n_heldout=8).run(pool)
    report = read(tmp_path)
    assert report.mean_drift_before is not None and report.mean_drift_after is not None
    assert report.mean_drift_after < 0.8 * report.mean_drift_before


def test_held_out_inputs_are_never_calibrated_on(pico: Pico, tmp_path: Path) -> None:
    featcal(tmp_path).run(pico.instance_pool())
    for data in read(tmp_path).data:
        assert len(set(data.indices)) == data.used == 20
        assert len(set(data.heldout_indices)) == 4
        assert not set(data.indices) & set(data.heldout_indices)


def test_too_few_samples_are_all_used_and_reported(pico: Pico, tmp_path: Path) -> None:
    featcal(tmp_path, n_samples=1000).run(pico.instance_pool())
    report = read(tmp_path)
    assert [data.used for data in report.data] == [48] * len(pico.tasks)
    assert all(data.requested == 1000 for data in report.data)
    text = " ".join(report.warnings)
    assert "instead of n_samples=1000" in text and "n_heldout" in text
    assert report.drift_before == ()


def test_report_says_what_took_part(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "write_figure", write_figure)  # draws it, as elsewhere
    featcal(tmp_path).run(pico.instance_pool())
    report = read(tmp_path)
    roles = [model.role for model in report.models]
    assert roles == ["base", *["expert"] * len(pico.tasks), "merged"]
    assert len({model.sha256 for model in report.models}) == len(report.models)
    assert report.merger == TASK_ARITHMETIC
    assert {"torch", "transformers", "fusion-bench"} <= report.versions.keys()
    names = [phase.name for phase in report.phases]
    assert {"checks", "merging", "drift", "calibration"} <= set(names)
    assert (tmp_path / "featcal_drift.png").read_bytes().startswith(b"\x89PNG")
    raw = json.loads((tmp_path / "featcal_report.json").read_text())
    assert raw["summary"]["modules_calibrated"] == len(raw["result"]["modules"])


def test_plan_only_plans_and_neither_merges_nor_calibrates(
    pico: Pico, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Untouchable(BaseAlgorithm):
        def run(self, modelpool: Any) -> Any:
            raise AssertionError("the merger was run")

    assert featcal(tmp_path, merger=Untouchable(), plan_only=True).run(pico.instance_pool()) is None
    report = read(tmp_path)
    assert report.status == "planned" and report.result is None
    printed = " ".join(capsys.readouterr().out.split())
    assert "FeatCal plan" in printed and f"memory: {report.holding}" in printed


def test_with_little_memory_the_same_is_computed_and_the_report_says_so(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pico.instance_pool()
    expected = weights(featcal(tmp_path / "a").run(pool))
    assert "hold all that is alive in a block" in read(tmp_path / "a").holding
    monkeypatch.setattr(preparation, "_available_bytes", lambda device: 1000)
    found = weights(featcal(tmp_path / "b").run(pool))
    assert differs(expected, found) == []
    report = read(tmp_path / "b")
    assert "hold the inputs of blocks alone (hold_activations=auto" in report.holding
    assert any("GiB are free: lower n_samples" in warning for warning in report.warnings)


def test_saved_checkpoint_is_calibrated_like_the_merged_model(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(pool).save_pretrained(tmp_path / "merged")
    expected = weights(featcal(tmp_path / "a").run(pool))
    source = str(tmp_path / "merged")
    found = weights(featcal(tmp_path / "b", merger=None, merged_model=source).run(pool))
    assert differs(expected, found) == []
    assert read(tmp_path / "b").models[-1].source == source


def test_pool_with_merged_is_calibrated_as_it_is(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    expected = weights(featcal(tmp_path / "a").run(pool))
    merged = MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(pool)
    before = weights(merged)
    pool.add_model("_merged_", merged)
    found = weights(featcal(tmp_path / "b", merger=None).run(pool))
    assert differs(expected, found) == []
    assert differs(before, weights(pool.load_model("_merged_"))) == []


def test_checkpoint_without_the_prefix_is_read_under_either_layout(
    pico: Pico, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    pool = pico.instance_pool()
    merged = MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(pool)
    for prefix in ("", "vision_model."):
        tensors = {
            prefix + name.removeprefix("vision_model."): value
            for name, value in weights(merged).items()
        }
        path = tmp_path / f"with{prefix}.safetensors"
        save_file(tensors, path)
        loaded = MergeOnlyAlgorithm(merged_model=str(path)).run(pool)
        assert differs(weights(merged), weights(loaded)) == []


def test_calibrated_model_reloads_with_equal_outputs(pico: Pico, tmp_path: Path) -> None:
    model = featcal(tmp_path).run(pico.instance_pool())
    pico.instance_pool().save_model(model, str(tmp_path / "model"))
    again = CLIPVisionModel.from_pretrained(tmp_path / "model").eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(pixels).pooler_output, again(pixels).pooler_output)


def test_any_merger_object_will_do(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    by_config = weights(featcal(tmp_path / "a").run(pool))
    merger = TaskArithmeticAlgorithm(scaling_factor=0.3)
    by_object = weights(featcal(tmp_path / "b", merger=merger).run(pool))
    assert differs(by_config, by_object) == []
    average = featcal(tmp_path / "c", merger=SimpleAverageAlgorithm()).run(pool)
    assert differs(by_config, weights(average))


def test_bfloat16_models_come_back_as_such(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    for name in pool.all_model_names:
        pool.load_model(name).to(torch.bfloat16)
    model = featcal(tmp_path).run(pool)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_float64_forwards_agree_with_float32(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    single = weights(featcal(tmp_path / "a").run(pool))
    double = weights(
        featcal(tmp_path / "b", forward_dtype="float64", statistics_dtype="float64").run(pool)
    )
    for name, value in single.items():
        torch.testing.assert_close(value, double[name], rtol=1e-3, atol=1e-4)


class Interrupting(BaseAlgorithm):
    """A merger whose model raises in the middle of the calibration's forwards."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def run(self, modelpool: Any) -> nn.Module:
        model = TaskArithmeticAlgorithm(scaling_factor=0.3).run(modelpool)
        calls = 0

        def hook(*_: Any) -> None:
            nonlocal calls
            calls += 1
            # past the drift of the merged model, which runs it and the experts once per task
            if calls > 2 * len(modelpool.model_names) + 2:
                raise self._error

        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        blocks[1].register_forward_pre_hook(hook)
        return model


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
        (RuntimeError("boom"), Exception, "failed"),
    ],
)
def test_partial_report_survives_an_interruption(
    pico: Pico, tmp_path: Path, error: BaseException, raised: type[BaseException], status: str
) -> None:
    with pytest.raises(raised):
        featcal(tmp_path, merger=Interrupting(error)).run(pico.instance_pool())
    report = read(tmp_path)
    assert report.status == status
    assert report.result is not None
    assert 0 < len(report.result.modules) < 16  # some of them, not all
    assert report.drift_before and not report.drift_after
    assert {path.name for path in tmp_path.iterdir()} == {
        "featcal_report.json",
        "featcal_drift.png",
    }
