"""The real `fusion_bench` command, from a temporary directory, offline, on the pico family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pico import Pico
from places import CONFIG
from transformers import CLIPProcessor, CLIPVisionModel

from featcal_fusionbench.report import RunReport

pytestmark = [pytest.mark.cli, pytest.mark.slow]

# What each ready variant needs to be quick on the pico family.
QUICK = {
    "adamerging": ["method.merger.max_steps=2", "method.merger.num_workers=0"],
    "wudi": ["method.merger.iter_num=2"],
    "regmean": ["method.merger.num_regmean_examples=16"],
    "regmean_plusplus": ["method.merger.num_regmean_examples=16"],
}
VARIANTS = sorted(
    path.stem
    for path in (CONFIG / "method/featcal").glob("*.yaml")
    if not path.stem.startswith(("_", "flan_t5"))
)


def log_dir(cwd: Path) -> Path:
    (directory,) = [d for d in (cwd / "outputs/fabric_model_fusion").iterdir() if d.is_dir()]
    return directory


def test_featcal_runs_from_any_directory(pico: Pico, tmp_path: Path) -> None:
    """One command: merge, calibrate, save, evaluate, and everything that a run leaves."""
    finished = pico.run_cli(
        "method=featcal",
        "method.n_samples=24",
        "method.n_heldout=4",
        "merged_model_save_path='{log_dir}/model'",
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert "FeatCal plan" in finished.stdout and "FeatCal complete" in finished.stdout
    directory = log_dir(tmp_path)

    accuracies = json.loads((directory / "program_report.json").read_text())
    assert {*pico.tasks, "average"} <= accuracies.keys()
    report = RunReport.read(directory / "featcal_report.json")
    assert report.status == "complete" and report.modules_calibrated == 16
    assert "method=featcal" in report.command
    assert report.merger["_target_"] == "fusion_bench.method.TaskArithmeticAlgorithm"
    assert (directory / "featcal_drift.png").exists()
    assert any("featcal/mean_drift_after" in str(v) for v in _logged_tags(directory))

    saved = directory / "model"
    model = CLIPVisionModel.from_pretrained(saved).eval()
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        model(pixels)
    assert CLIPProcessor.from_pretrained(saved).image_processor.crop_size == {
        "height": 16,
        "width": 16,
    }
    calibrated = model.state_dict()
    base = pico.load_base().state_dict()
    name = next(n for n in base if n.endswith("layers.1.mlp.fc2.weight"))
    assert not torch.equal(calibrated[name], base[name])


def _logged_tags(directory: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return events.Tags()["scalars"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ready_variants_run(
    pico: Pico, in_tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = pico.run_program(
        f"method=featcal/{variant}",
        "method.n_samples=16",
        "method.n_heldout=0",
        *QUICK.get(variant, []),
    )
    assert isinstance(result["merged_model"], CLIPVisionModel)
    assert 0 <= result["report"]["average"]["accuracy"] <= 1


def test_any_upstream_method_nests_by_hydra(pico: Pico, in_tmp_path: Path) -> None:
    result = pico.run_program(
        "method=featcal",
        "method@method.merger=dare/task_arithmetic",
        "method.merger.sparsity_ratio=0.1",
        "method.n_samples=16",
        "method.n_heldout=0",
    )
    assert isinstance(result["merged_model"], CLIPVisionModel)


def test_merge_only_equals_the_merger_alone(pico: Pico, in_tmp_path: Path) -> None:
    alone = pico.run_program("method=ties_merging")["merged_model"].state_dict()
    ours = pico.run_program("method=merge_only", "method@method.merger=ties_merging")
    for name, value in ours["merged_model"].state_dict().items():
        assert torch.equal(value, alone[name]), name


def test_data_sets_and_settings_are_overridden_on_the_command_line(
    pico: Pico, in_tmp_path: Path
) -> None:
    task = pico.tasks[0]
    pico.run_program(
        "method=featcal",
        "method.n_samples=6",
        "method.include=[fc1,fc2]",
        "method.exclude=[layers.0]",
        f"modelpool.train_datasets.{task}={pico.dataset(pico.tasks[1])}",
        "method.output_dir=mine",
    )
    report = RunReport.read(in_tmp_path / "mine/featcal_report.json")
    assert report.data[0].source == str(pico.dataset(pico.tasks[1]))
    assert report.result is not None
    assert [m.name.rpartition("layers.")[2] for m in report.result.modules] == [
        "1.mlp.fc1",
        "1.mlp.fc2",
    ]


def test_bad_setting_ends_the_command_with_its_message(pico: Pico, tmp_path: Path) -> None:
    finished = pico.run_cli("method=featcal", "method.ridge_lambda=-1", cwd=tmp_path)
    assert finished.returncode != 0
    assert "ridge_lambda=-1" in finished.stdout
