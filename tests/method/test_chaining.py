"""Methods of this package as the upstream of one another, nested by Hydra or as objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench import BaseAlgorithm
from fusion_bench.method import TaskArithmeticAlgorithm
from pico import Pico
from torch import Tensor, nn

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.calibration import CalibrationError
from featcal_fusionbench.corrected import CorrectedClipVision
from featcal_fusionbench.method.featcal_report import FeatCalReport
from featcal_fusionbench.method.merge_only_report import MergeReport
from featcal_fusionbench.method.surgery import RepresentationSurgeryAlgorithm
from featcal_fusionbench.pools.opening import floating_tensors
from featcal_fusionbench.report import RunReport

NAME = "featcal_report.json"


class Untouchable(BaseAlgorithm):
    def run(self, modelpool: Any) -> Any:
        raise AssertionError("the merger was run although the chain is bad")


def task_arithmetic() -> TaskArithmeticAlgorithm:
    return TaskArithmeticAlgorithm(scaling_factor=0.3)


def featcal(merger: Any, **settings: Any) -> FeatCalAlgorithm:
    return FeatCalAlgorithm(merger=merger, **{"n_samples": 16, "n_heldout": 2, **settings})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in floating_tensors(model).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read(path: Path) -> RunReport:
    report = RunReport.read(path)
    assert report.status == "complete"
    return report


def test_featcal_on_featcal_equals_calibrating_the_saved_first_result(
    pico: Pico, tmp_path: Path
) -> None:
    pool = pico.instance_pool()
    first = featcal(task_arithmetic(), output_dir=str(tmp_path / "first")).run(pool)
    pool.save_model(first, str(tmp_path / "saved"))
    second = featcal(
        None, merged_model=str(tmp_path / "saved"), seed=1, output_dir=str(tmp_path / "second")
    ).run(pool)
    nested = featcal(featcal(task_arithmetic()), seed=1, output_dir=str(tmp_path / "nested")).run(
        pool
    )
    assert equal(weights(nested), weights(second)) and not equal(weights(first), weights(second))
    assert not pool.has_merged

    outer, inner = read(tmp_path / "nested" / NAME), read(tmp_path / "nested/merger" / NAME)
    alone = read(tmp_path / "first" / NAME)
    assert isinstance(outer, FeatCalReport) and isinstance(inner, FeatCalReport)
    assert isinstance(alone, FeatCalReport)
    assert (outer.settings.seed, inner.settings.seed) == (1, 0)
    assert inner.models == alone.models and inner.drift_after == alone.drift_after
    assert outer.outputs["merger"] == str(tmp_path / "nested/merger" / NAME)
    spent = {phase.name: phase.wall_seconds for phase in outer.phases}
    assert spent["merging"] > 0.9 * sum(phase.wall_seconds for phase in inner.phases)


def test_merge_only_on_featcal_is_featcal(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    alone = featcal(task_arithmetic(), output_dir=str(tmp_path / "a")).run(pool)
    outer = MergeOnlyAlgorithm(merger=featcal(task_arithmetic()), output_dir=str(tmp_path / "b"))
    assert equal(weights(alone), weights(outer.run(pool)))
    report = read(tmp_path / "b/merge_only_report.json")
    assert isinstance(report, MergeReport)
    (merging,) = [phase for phase in report.phases if phase.name == "merging"]
    assert merging.wall_seconds > 0 and merging.peak_memory_bytes > 0
    hashed = {model.role: model.sha256 for model in report.models}
    assert hashed["merged"] and hashed["expert"] and hashed["base"]


def test_three_levels_by_hydra(pico: Pico, in_tmp_path: Path) -> None:
    quick = [f"method.{level}n_samples={n}" for level, n in
             (("", 12), ("merger.", 14), ("merger.merger.", 16))]  # fmt: skip
    result = pico.run_program(
        "method=representation_surgery",
        "method@method.merger=featcal",
        "method@method.merger.merger=featcal",
        "method@method.merger.merger.merger=clip_regmean_plusplus",
        "method.merger.merger.merger.num_regmean_examples=16",
        "method.steps=5",
        "merged_model_save_path='{log_dir}/model'",
        *quick,
    )
    assert isinstance(result["merged_model"], CorrectedClipVision)
    (directory,) = [path.parent for path in in_tmp_path.rglob("representation_surgery_report.json")]
    reports = [
        read(directory / path)
        for path in (
            "representation_surgery_report.json",
            f"merger/{NAME}",
            f"merger/merger/{NAME}",
        )
    ]
    assert [report.data[0].requested for report in reports] == [12, 14, 16]
    assert "RegMean" in reports[2].merger["_target_"] or "PlusPlus" in reports[2].merger["_target_"]
    # the model is saved once, by the outermost
    assert ["model" in report.outputs for report in reports] == [True, False, False]
    assert len(list(directory.rglob("model.safetensors"))) == 1
    tags = logged(directory)
    assert {"representation_surgery/seconds", "merger/featcal/seconds",
            "merger/merger/featcal/seconds"} <= tags  # fmt: skip


def logged(directory: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return set(events.Tags()["scalars"])


def surgery(**settings: Any) -> RepresentationSurgeryAlgorithm:
    return RepresentationSurgeryAlgorithm(merger=Untouchable(), **settings)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda: featcal(surgery()), "FeatCal cannot take the result of Representation Surgery"),
        (lambda: MergeOnlyAlgorithm(merger=surgery()), "merge_only cannot take the result"),
        (lambda: featcal(featcal(surgery())), "FeatCal cannot take the result of Represent"),
        (lambda: featcal(featcal(Untouchable(), plan_only=True)), "method.plan_only=true instead"),
        (lambda: featcal({"_target_": "no.such.Method"}), "cannot be made"),
        (lambda: featcal(featcal({"_target_": "no.such.Method"})), "cannot be made"),
    ],
)
def test_what_cannot_be_chained_is_refused_before_anything_is_loaded(
    pico: Pico,
    in_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chain: Callable[[], Any],
    message: str,
) -> None:
    pool = pico.instance_pool()
    monkeypatch.setattr(pool, "load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(CalibrationError, match=message):
        chain().run(pool)


def test_two_levels_in_one_directory_are_refused(pico: Pico, tmp_path: Path) -> None:
    inner = featcal(Untouchable(), output_dir=str(tmp_path))
    with pytest.raises(CalibrationError, match="method.merger.output_dir"):
        featcal(inner, output_dir=str(tmp_path)).run(pico.instance_pool())


def test_a_method_that_was_nested_runs_alone_again(pico: Pico, in_tmp_path: Path) -> None:
    inner = MergeOnlyAlgorithm(merger=task_arithmetic())
    featcal(inner, output_dir="outer").run(pico.instance_pool())
    assert (in_tmp_path / "outer/merger/merge_only_report.json").exists()
    inner.run(pico.instance_pool())
    assert len(list(in_tmp_path.rglob("merge_only_report.json"))) == 2


def test_merge_only_reports_how_it_failed(pico: Pico, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        MergeOnlyAlgorithm(merger=Untouchable(), output_dir=str(tmp_path)).run(pico.instance_pool())
    report = RunReport.read(tmp_path / "merge_only_report.json")
    assert report.status == "failed" and "the chain is bad" in report.error
