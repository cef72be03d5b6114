"""Representation Surgery and ProbSurgery as FusionBench methods on the pico CLIP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench import BaseAlgorithm
from fusion_bench.modelpool import CLIPVisionModelPool
from fusion_bench.models.hf_clip import HFCLIPClassifier
from omegaconf import OmegaConf
from pico import Pico
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPModel, CLIPProcessor

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.baselines import ProbSurgerySettings, RepresentationSurgerySettings
from featcal_fusionbench.calibration import CalibrationError
from featcal_fusionbench.corrected import (
    CorrectedClipVision,
    CorrectionsFileError,
    load_corrected_model,
)
from featcal_fusionbench.errors import SettingsError
from featcal_fusionbench.method.surgery import (
    TEST_INPUTS_LABEL,
    ProbSurgeryAlgorithm,
    RepresentationSurgeryAlgorithm,
)
from featcal_fusionbench.method.surgery_report import (
    ProbSurgeryReport,
    RepresentationSurgeryReport,
    SurgeryReport,
)
from featcal_fusionbench.report import RunReport

TASK_ARITHMETIC = {
    "_target_": "fusion_bench.method.TaskArithmeticAlgorithm",
    "scaling_factor": 0.3,
}
METHODS = {
    "representation_surgery": (RepresentationSurgeryAlgorithm, RepresentationSurgerySettings),
    "prob_surgery": (ProbSurgeryAlgorithm, ProbSurgerySettings),
}


class Untouchable(BaseAlgorithm):
    def run(self, modelpool: Any) -> Any:
        raise AssertionError("the merger was run although the input is bad")


def path_pool(pico: Pico, **changes: Any) -> CLIPVisionModelPool:
    """The pool of paths: only with a whole CLIP as base there is a visual projection."""
    models = {"_pretrained_": str(pico.base)} | {t: str(pico.expert(t)) for t in pico.tasks}
    data = {f"{split}_datasets": {t: str(pico.dataset(t)) for t in pico.tasks}
            for split in ("train", "test")}  # fmt: skip
    return CLIPVisionModelPool(
        OmegaConf.create(models), processor=str(pico.base), **(data | changes)
    )


def surgery(output_dir: Path, **settings: Any) -> RepresentationSurgeryAlgorithm:
    defaults = {"merger": TASK_ARITHMETIC, "n_samples": 20, "n_heldout": 4, "steps": 40}
    return RepresentationSurgeryAlgorithm(output_dir=str(output_dir), **(defaults | settings))


def read(output_dir: Path, method: str = "representation_surgery") -> SurgeryReport:
    report = RunReport.read(output_dir / f"{method}_report.json")
    assert isinstance(report, SurgeryReport) and report.method == method
    return report


@pytest.fixture(scope="module")
def trained(pico: Pico, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One model for the tests that only look at it."""
    directory = tmp_path_factory.mktemp("surgery")
    return surgery(directory).run(path_pool(pico)), directory


def test_unknown_setting_gets_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="ProbSurgery: did you mean kl_weight"):
        ProbSurgeryAlgorithm(kl_wieght=0.1)


def test_inputs_are_those_that_featcal_draws(pico: Pico, tmp_path: Path, trained: Any) -> None:
    featcal = FeatCalAlgorithm(
        merger=Untouchable(), n_samples=20, n_heldout=4, plan_only=True, output_dir=str(tmp_path)
    )
    featcal.run(path_pool(pico))
    assert RunReport.read(tmp_path / "featcal_report.json").data == read(trained[1]).data


def test_only_the_modules_are_new(pico: Pico, trained: Any) -> None:
    model, _ = trained
    merged = MergeOnlyAlgorithm(merger=TASK_ARITHMETIC).run(path_pool(pico)).state_dict()
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, merged[name]), name
    assert model.tasks == pico.tasks and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_report_says_what_was_trained(pico: Pico, trained: Any) -> None:
    report = read(trained[1])
    assert isinstance(report, RepresentationSurgeryReport)
    assert report.status == "complete" and report.labels == () and report.result is not None
    assert [phase.name for phase in report.phases] == ["checks", "merging", "features", "training"]
    assert all(phase.peak_memory_bytes > 0 for phase in report.phases)
    assert [model.role for model in report.models] == ["base", *["expert"] * 3, "merged"]
    for task, data in zip(report.result.tasks, report.data, strict=True):
        assert task.task == data.task and data.split == "train"
        assert (task.inputs, task.rows, task.width, task.steps) == (20, 20, 16, 40)
        assert task.loss_end < task.loss_start and task.parameters == 2 * 16 * 16


def embeddings(pico: Pico, model: Any, pixels: Tensor) -> Tensor:
    """The base CLIP's projection of a vision tower's output."""
    clip = CLIPModel.from_pretrained(pico.base)
    with torch.no_grad():
        return clip.visual_projection(model(pixels).pooler_output)


def test_losses_are_those_of_projected_embeddings(pico: Pico, trained: Any) -> None:
    model, directory = trained
    report, pool = read(directory), path_pool(pico)
    assert report.result is not None
    for task, data, module in zip(report.result.tasks, report.data, model.corrections, strict=True):
        dataset = pool.load_train_dataset(data.task)
        images = [dataset[i]["image"] for i in data.heldout_indices]
        pixels = pool.load_processor()(images=images, return_tensors="pt")["pixel_values"]
        ours, theirs = (embeddings(pico, m, pixels)
                        for m in (model.model, pool.load_model(data.task).eval()))  # fmt: skip
        assert task.heldout_start == pytest.approx(float((ours - theirs).abs().mean()), rel=1e-4)
        corrected = ours - module.up(module.down(ours).relu())
        end = float((corrected - theirs).abs().mean())
        assert task.heldout_end == pytest.approx(end, rel=1e-4)


def test_fusionbench_s_classifier_corrects_before_it_normalises(pico: Pico, trained: Any) -> None:
    model, _ = trained
    clip = CLIPModel.from_pretrained(pico.base).eval()
    clip.vision_model = model
    classifier = HFCLIPClassifier(clip, CLIPProcessor.from_pretrained(pico.base))
    classifier.set_classification_task(["a cat", "a dog"])
    pixels = torch.randn(5, 3, 16, 16)
    task = pico.tasks[1]
    with torch.no_grad():
        logits = classifier(pixels, task_name=task)
        features = embeddings(pico, model.model, pixels)
        module = model.corrections[1]
        corrected = features - module.up(module.down(features).relu())
        expected = F.normalize(corrected, dim=-1) @ classifier.zeroshot_weights.T
        uncorrected = F.normalize(features, dim=-1) @ classifier.zeroshot_weights.T
    scale = clip.logit_scale.exp()
    torch.testing.assert_close(logits, expected * scale)
    assert not torch.allclose(logits, uncorrected * scale)


def test_embeddings_must_be_those_of_the_last_forward(pico: Pico, trained: Any) -> None:
    model, _ = trained
    pixels = torch.randn(2, 3, 16, 16)
    model(pixels)
    own = F.normalize(embeddings(pico, model.model, pixels), dim=-1)
    with pytest.raises(CalibrationError, match="taskpool.base_model"):
        model.compute_surgery_features(own.flip(-1), pico.tasks[0])
    with pytest.raises(CalibrationError, match="the forward just before"):
        model.compute_surgery_features(own, pico.tasks[0])


def test_a_task_without_a_correction_is_named(trained: Any) -> None:
    with pytest.raises(CalibrationError, match="task 'dtd', only for mnist, svhn"):
        trained[0].find_task("dtd")
    assert trained[0].find_task("glue-mnist") == "mnist"


def test_float64_forwards_agree_with_float32(pico: Pico, trained: Any, tmp_path: Path) -> None:
    double = surgery(tmp_path, forward_dtype="float64").run(path_pool(pico))
    assert {p.dtype for p in double.parameters()} == {torch.float32}
    for a, b in zip(trained[0].parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# --- test inputs ------------------------------------------------------------------------------


def test_training_on_test_inputs_is_labelled(
    pico: Pico, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = ProbSurgeryAlgorithm(
        merger=TASK_ARITHMETIC, train_on="test", n_samples=1000, rounds=1, batches_per_round=3,
        output_dir=str(tmp_path),
    )  # fmt: skip
    algorithm.run(path_pool(pico))
    report = read(tmp_path, "prob_surgery")
    assert isinstance(report, ProbSurgeryReport)
    assert report.labels == (TEST_INPUTS_LABEL,)
    assert {data.split for data in report.data} == {"test"}
    assert [data.used for data in report.data] == [40] * 3
    assert any("not to be compared" in warning for warning in report.warnings)
    assert TEST_INPUTS_LABEL in caplog.text and TEST_INPUTS_LABEL in capsys.readouterr().out


def test_a_pool_without_test_data_is_refused(pico: Pico, tmp_path: Path) -> None:
    pool = path_pool(pico, test_datasets=None)
    with pytest.raises(CalibrationError, match="mnist, svhn, eurosat.*modelpool.test_datasets"):
        surgery(tmp_path, merger=Untouchable(), train_on="test").run(pool)


# --- before the work --------------------------------------------------------------------------


def test_plan_only_neither_merges_nor_trains(
    pico: Pico, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert surgery(tmp_path, merger=Untouchable(), plan_only=True).run(path_pool(pico)) is None
    assert read(tmp_path).status == "planned" and read(tmp_path).result is None
    assert "72 inputs of 3 tasks" in " ".join(capsys.readouterr().out.split())


def test_a_base_without_projection_is_refused(pico: Pico, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="visual projection.*_pretrained_"):
        surgery(tmp_path, merger=Untouchable()).run(pico.instance_pool())
    assert read(tmp_path).status == "failed"


def test_a_checkpoint_without_projection_is_refused(pico: Pico, tmp_path: Path) -> None:
    """Transformers would fill in a random one, with a warning."""
    shutil.copytree(pico.base, tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    pool = path_pool(pico)
    pool._models["_pretrained_"] = str(tmp_path / "base")
    with pytest.raises(CalibrationError, match="has no visual_projection.weight"):
        surgery(tmp_path, merger=Untouchable()).run(pool)


def test_an_interrupted_training_leaves_what_it_had(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featcal_fusionbench.method import surgery as module

    done = module.train_module

    def interrupted(task: str, *args: Any) -> Any:
        if task == pico.tasks[1]:
            raise KeyboardInterrupt
        return done(task, *args)

    monkeypatch.setattr(module, "train_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        surgery(tmp_path).run(path_pool(pico))
    report = read(tmp_path)
    assert report.status == "interrupted" and report.result is not None
    assert [task.task for task in report.result.tasks] == [pico.tasks[0]]


# --- saving -----------------------------------------------------------------------------------


@pytest.fixture
def saved(pico: Pico, trained: Any, tmp_path: Path) -> Path:
    path_pool(pico).save_model(trained[0], str(tmp_path / "model"))
    return tmp_path / "model"


def test_saved_model_reloads_with_equal_outputs(pico: Pico, trained: Any, saved: Path) -> None:
    model, again = trained[0], load_corrected_model(saved)
    assert isinstance(again, CorrectedClipVision) and again.settings == model.settings
    pixels = torch.randn(3, 3, 16, 16)
    for task in pico.tasks:
        results = []
        for one in (model, again):
            with torch.no_grad():
                output = F.normalize(embeddings(pico, one, pixels), dim=-1)
                results.append(one.compute_surgery_features(output, task)[0])
        assert torch.equal(*results)
    assert [entry.name for entry in saved.parent.iterdir()] == ["model"]  # nothing temporary
    assert json.loads((saved / "config.json").read_text())


def test_saving_keeps_what_is_there_and_bfloat16(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/preprocessor_config.json").write_text("{}")
    model = trained[0].around(trained[0].model)
    model.set_corrections(dict(zip(trained[0].tasks, trained[0].corrections, strict=True)),
                          trained[0].settings)  # fmt: skip
    model.model = type(model.model)(model.model.config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m/preprocessor_config.json").read_text() == "{}"
    assert load_corrected_model(tmp_path / "m").tasks == model.tasks


def test_a_failure_while_saving_leaves_nothing(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featcal_fusionbench.pools import finishing

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(finishing, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        trained[0].save_pretrained(tmp_path / "m")
    assert list(tmp_path.iterdir()) == [tmp_path / "m"] and not list((tmp_path / "m").iterdir())


def cut_off(path: Path) -> None:
    content = (path / "corrections.safetensors").read_bytes()
    (path / "corrections.safetensors").write_bytes(content[:-9])


def replace_model(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    name = next(key for key in tensors if key.endswith("fc1.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def remove(path: Path) -> None:
    (path / "corrections.safetensors").unlink()


def replace_corrections(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path / "corrections.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "damaged"),
        (replace_model, "not the one that corrections.safetensors was trained for"),
        (remove, "is not there"),
        (replace_corrections, "holds no corrections"),
    ],
)
def test_a_damaged_save_is_refused(saved: Path, damage: Any, message: str) -> None:
    damage(saved)
    with pytest.raises(CorrectionsFileError, match=message):
        load_corrected_model(saved)


def test_a_saved_model_with_corrections_is_not_one_model(
    pico: Pico, saved: Path, tmp_path: Path
) -> None:
    featcal = FeatCalAlgorithm(merged_model=str(saved), output_dir=str(tmp_path / "out"))
    with pytest.raises(CalibrationError, match="one correction per task"):
        featcal.run(path_pool(pico))
    (saved / "corrections.safetensors").unlink()
    assert isinstance(MergeOnlyAlgorithm(merged_model=str(saved)).run(path_pool(pico)), nn.Module)


# --- FusionBench's program --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "quick"),
    [("representation_surgery", "method.steps=50"), ("prob_surgery", "method.rounds=1")],
)
def test_program_routes_by_task_and_saves(
    pico: Pico, in_tmp_path: Path, method: str, quick: str
) -> None:
    result = pico.run_program(
        f"method={method}",
        "method@method.merger=ties_merging",
        "method.n_samples=24",
        quick,
        "merged_model_save_path='{log_dir}/model'",
    )
    assert set(pico.tasks) <= result["report"].keys()
    (path,) = (in_tmp_path / "outputs/fabric_model_fusion").glob(f"*/{method}_report.json")
    report = read(path.parent, method)
    assert Path(report.outputs["model"]).resolve() == path.parent / "model"
    assert load_corrected_model(path.parent / "model").tasks == pico.tasks
    assert CLIPProcessor.from_pretrained(path.parent / "model")


@pytest.mark.cli
@pytest.mark.slow
def test_the_command(pico: Pico, tmp_path: Path) -> None:
    finished = pico.run_cli("method=representation_surgery", "method.n_samples=24", cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert "representation_surgery complete" in finished.stdout
    shutil.rmtree(tmp_path / "outputs")
