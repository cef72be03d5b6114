"""Bad input: a message that names the thing and the remedy, before the merger is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench import BaseAlgorithm
from fusion_bench.modelpool import CLIPVisionModelPool
from pico import Pico
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from featcal_fusionbench.calibration import CalibrationError
from featcal_fusionbench.method.featcal import FeatCalAlgorithm


class Untouchable(BaseAlgorithm):
    """A merger that must not be reached."""

    def run(self, modelpool: Any) -> Any:
        raise AssertionError("the merger was run although the input is bad")


class Returning(BaseAlgorithm):
    """A merger that returns what it is told to."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def run(self, modelpool: Any) -> Any:
        return self._make(modelpool)


def run(pool: CLIPVisionModelPool, tmp_path: Path, **settings: Any) -> Any:
    settings = {"merger": Untouchable(), "n_samples": 8, "n_heldout": 2, **settings}
    return FeatCalAlgorithm(output_dir=str(tmp_path / "out"), **settings).run(pool)


def fails(pool: CLIPVisionModelPool, tmp_path: Path, *words: str, **settings: Any) -> None:
    """The run fails on purpose, and its message holds all the words."""
    with pytest.raises(CalibrationError) as caught:
        run(pool, tmp_path, **settings)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.fixture
def pool(pico: Pico) -> CLIPVisionModelPool:
    return pico.instance_pool()


def test_no_base(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    del pool._models["_pretrained_"]
    fails(pool, tmp_path, "_pretrained_", "modelpool.models")


def test_no_experts(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    pool._models = {"_pretrained_": pool._models["_pretrained_"]}
    fails(pool, tmp_path, "no experts", "modelpool.models")


def test_no_train_data_at_all(pico: Pico, tmp_path: Path) -> None:
    fails(
        pico.instance_pool(with_data=False),
        tmp_path,
        *pico.tasks,
        "modelpool.train_datasets",
    )


def test_no_train_data_for_one_task(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    del pool._train_datasets[pico.tasks[1]]
    fails(pool, tmp_path, pico.tasks[1], "modelpool.train_datasets")


def test_validation_data_stand_in_for_train_data(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    task = pico.tasks[0]
    pool._val_datasets = {
        task: {
            "_target_": "datasets.load_dataset",
            "path": str(pico.dataset(task)),
            "split": "test",
        }
    }
    del pool._train_datasets[task]
    algorithm = FeatCalAlgorithm(
        merger=Untouchable(), plan_only=True, output_dir=str(tmp_path), n_samples=8
    )
    assert algorithm.run(pool) is None


def test_data_that_does_not_load(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    pool._train_datasets[pico.tasks[0]] = str(tmp_path / "nowhere")
    fails(pool, tmp_path, pico.tasks[0], "modelpool.train_datasets")


def test_empty_data(
    pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "load_train_dataset", lambda task: [])
    fails(pool, tmp_path, pico.tasks[0], "empty")


def test_data_without_images(
    pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "load_train_dataset", lambda task: [{"picture": 1}] * 20)
    fails(pool, tmp_path, pico.tasks[0], "'image'", "picture")


def test_no_processor(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    pool._processor = None
    fails(pool, tmp_path, "modelpool.processor")


def test_expert_of_another_width(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    config = CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    pool._models[pico.tasks[1]] = CLIPVisionModel(config)
    fails(pool, tmp_path, pico.tasks[1], "shape")


def test_expert_of_another_depth(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    config = pool._models["_pretrained_"].config
    shallow = CLIPVisionConfig(**{**config.to_dict(), "num_hidden_layers": 1})
    pool._models[pico.tasks[1]] = CLIPVisionModel(shallow)
    fails(pool, tmp_path, pico.tasks[1], "another architecture")


def test_unknown_architecture(tmp_path: Path, pico: Pico) -> None:
    pool = pico.instance_pool()
    pool._models["_pretrained_"] = nn.Linear(3, 3)
    fails(pool, tmp_path, "Linear", "CONTRIBUTING")


def test_meta_tensors(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    pool._models[pico.tasks[1]].to("meta")
    fails(pool, tmp_path, pico.tasks[1], "meta")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_expert_that_is_not_finite(
    pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path, value: float
) -> None:
    expert = pool._models[pico.tasks[1]]
    with torch.no_grad():
        next(p for name, p in expert.named_parameters() if "fc1.weight" in name)[0, 0] = value
    fails(pool, tmp_path, pico.tasks[1], "fc1.weight", "NaN or Inf")


def test_merged_model_that_is_not_finite(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    def broken(view: CLIPVisionModelPool) -> nn.Module:
        model = view.load_model("_pretrained_")
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return model

    fails(pool, tmp_path, "merged", "NaN or Inf", merger=Returning(broken))


def test_two_experts_with_one_checkpoint_are_a_warning(
    pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool._models[pico.tasks[1]] = pool._models[pico.tasks[0]]
    assert run(pool, tmp_path, plan_only=True) is None
    assert f"{pico.tasks[0]} and {pico.tasks[1]} are the same checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ridge_lambda", -0.1),
        ("target_alpha", 1.5),
        ("target_alpha", -0.1),
        ("n_samples", 0),
        ("granularity", "layer"),
        ("include", ["["]),
        ("statistics_dtype", "float16"),
    ],
)
def test_settings_out_of_range_fail_when_the_method_is_made(setting: str, value: Any) -> None:
    with pytest.raises(CalibrationError, match=setting):
        FeatCalAlgorithm(**{setting: value})


def test_unknown_setting_gets_a_suggestion() -> None:
    with pytest.raises(CalibrationError, match="did you mean ridge_lambda"):
        FeatCalAlgorithm(ridge_lamda=0.1)


@pytest.mark.parametrize("which", ["include", "exclude"])
def test_pattern_that_matches_nothing(
    pool: CLIPVisionModelPool, tmp_path: Path, which: str
) -> None:
    fails(pool, tmp_path, which, "nosuchmodule", **{which: ["nosuchmodule"]})


def test_singular_system_at_no_ridge(pico: Pico, pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    def base(view: CLIPVisionModelPool) -> nn.Module:
        return view.load_model("_pretrained_")

    fails(
        pool,
        tmp_path,
        "ridge_lambda",
        "singular",
        merger=Returning(base),
        ridge_lambda=0.0,
        n_samples=1,
    )


def test_keep_leaves_singular_modules_at_their_merged_values(
    pool: CLIPVisionModelPool, tmp_path: Path
) -> None:
    from featcal_fusionbench.report import RunReport

    run(
        pool,
        tmp_path,
        merger=Returning(lambda view: view.load_model("_pretrained_")),
        ridge_lambda=0.0,
        n_samples=1,
        on_failure="keep",
    )
    report = RunReport.read(tmp_path / "out" / "featcal_report.json")
    assert report.modules_kept > 0 and report.result is not None
    kept = [module for module in report.result.modules if not module.calibrated]
    assert all("singular" in module.note for module in kept)


def test_no_merger(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    fails(pool, tmp_path, "method.merger", merger=None)


@pytest.mark.parametrize(
    "config",
    [
        {"_target_": "fusion_bench.method.NoSuchAlgorithm"},
        {"name": "no_such_algorithm"},
        {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm"},  # lacks its scaling factor
    ],
)
def test_merger_that_cannot_be_made(
    pool: CLIPVisionModelPool, tmp_path: Path, config: dict[str, Any]
) -> None:
    fails(pool, tmp_path, "merger", "method.merger", merger=config)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda view: {"a": view.load_model("_pretrained_")}, "dict"),
        (lambda view: [view.load_model("_pretrained_")] * 2, "list"),
        (lambda view: nn.ModuleList([view.load_model("_pretrained_")]), "ModuleList"),
        (lambda view: None, "NoneType"),
    ],
)
def test_merger_that_returns_no_single_model(
    pool: CLIPVisionModelPool, tmp_path: Path, make: Callable[[Any], Any], named: str
) -> None:
    fails(pool, tmp_path, "Returning", named, merger=Returning(make))


def test_lazy_state_dict_becomes_a_model(pico: Pico, tmp_path: Path) -> None:
    from fusion_bench.utils.lazy_state_dict import LazyStateDict

    class Lazy(LazyStateDict):
        """FusionBench's mapping with the names that the running transformers has."""

        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self._tensors = tensors

        def __getitem__(self, key: str) -> torch.Tensor:
            return self._tensors[key]

    pool = pico.instance_pool()
    merged = pool.load_model(pico.tasks[0])
    lazy = Lazy({k: v.clone() for k, v in merged.state_dict().items()})
    model = run(pool, tmp_path, merger=Returning(lambda view: lazy))
    assert isinstance(model, CLIPVisionModel)


def test_merged_checkpoint_that_is_not_there(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    fails(pool, tmp_path, "merged_model", "safetensors", merged_model=str(tmp_path / "no"))


def test_pickled_checkpoints_are_not_read(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    directory = tmp_path / "pickled"
    directory.mkdir()
    torch.save(pool.load_model("_pretrained_").state_dict(), directory / "pytorch_model.bin")
    fails(pool, tmp_path, "pickled", merged_model=str(directory))


def test_output_directory_that_cannot_be_written(pool: CLIPVisionModelPool, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the directory should be")
    with pytest.raises(OSError, match="method.output_dir"):
        run(pool, tmp_path)
