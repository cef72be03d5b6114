"""Calibration samples: drawing, batches, and the kinds of data sets that a pool may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pico import Pico
from PIL import Image
from torch import nn

from featcal_fusionbench.architectures.clip_vision import (
    ClassTokenRows,
    ClipVision,
    clip_vision_rows,
)
from featcal_fusionbench.data.draws import Batches, draw, shortfalls
from featcal_fusionbench.errors import CalibrationDataError
from featcal_fusionbench.method.featcal import FeatCalAlgorithm
from featcal_fusionbench.report import RunReport, TaskData


def drawn(
    task: str = "a", available: int = 100, n: int = 10, h: int = 5, seed: int = 0
) -> TaskData:
    return draw(task, "source", "train", available, n_samples=n, n_heldout=h, seed=seed)


@given(
    available=st.integers(1, 300),
    n=st.integers(1, 300),
    h=st.integers(0, 50),
    seed=st.integers(0, 2**31),
)
def test_draws_are_without_replacement_and_held_out_is_apart(
    available: int, n: int, h: int, seed: int
) -> None:
    data = drawn(available=available, n=n, h=h, seed=seed)
    both = [*data.indices, *data.heldout_indices]
    assert len(set(both)) == len(both)
    assert all(0 <= index < available for index in both)
    assert len(data.indices) == data.used == min(n, available)
    assert len(data.heldout_indices) == min(h, available - data.used)
    short = data.used < n or len(data.heldout_indices) < h
    assert bool(shortfalls(data, h)) == short


def test_draws_depend_on_seed_and_task_and_on_nothing_else() -> None:
    first = drawn().indices
    torch.manual_seed(123)
    torch.rand(3)
    assert drawn().indices == first
    assert drawn(seed=1).indices != first
    assert drawn(task="b").indices != first


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert drawn(n=40).indices[:10] == drawn(n=10).indices


def test_batches_hold_every_item_once_in_order() -> None:
    items = [{"image": i} for i in range(20)]
    batches = Batches(items, (3, 1, 4, 15, 9), 2, lambda some: {"x": some}, "a")
    assert len(batches) == 3
    for _ in range(2):  # they can be read again
        read = [item["image"] for batch in batches for item in batch["x"]]
        assert read == [3, 1, 4, 15, 9]


def test_unreadable_item_names_the_task_and_the_item() -> None:
    def broken(items: Any) -> Any:
        raise OSError("truncated")

    with pytest.raises(CalibrationDataError, match=r"\[7\].*task dtd.*truncated"):
        list(Batches(range(9), (7,), 4, broken, "dtd"))


def test_class_token_rows() -> None:
    weights = ClassTokenRows(0.25)(torch.zeros(2, 3, 5), {})
    assert weights.tolist() == [[1, 0.25, 0.25]] * 2


def test_only_the_last_block_weighs_rows_and_not_for_keys_and_values() -> None:
    rules = clip_vision_rows(0.01)
    name = "vision_model.encoder.layers.3."
    for module in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc2", "layer_norm1"):
        assert rules(name + module, 3, 4) == ClassTokenRows(0.01)
        assert rules(name + module, 2, 4) is None
    for module in ("self_attn.k_proj", "self_attn.v_proj"):
        assert rules(name + module, 3, 4) is None
    assert clip_vision_rows(1.0)(name + "mlp.fc1", 3, 4) is None


def test_images_of_any_mode_and_of_any_item_kind_are_prepared_alike(pico: Pico) -> None:
    architecture = ClipVision()
    processor = architecture.load_processor(pico.instance_pool())
    prepare = architecture.prepare_inputs(processor, pico.load_base())
    image = Image.radial_gradient("L")
    pixels = prepare([image, {"image": image}, (image, 3), {"image": image.convert("RGB")}])
    assert pixels["pixel_values"].shape == (4, 3, 16, 16)
    assert all(torch.equal(p, pixels["pixel_values"][0]) for p in pixels["pixel_values"])


def test_a_plain_transform_serves_as_processor() -> None:
    prepare = ClipVision().prepare_inputs(
        lambda image: torch.full((3, 4, 4), float(image)), nn.Identity()
    )
    assert prepare([1, 2])["pixel_values"][:, 0, 0, 0].tolist() == [1, 2]


def image_folder(root: Path, count: int) -> Path:
    root.mkdir()
    for i in range(count):
        Image.new("RGB", (20, 20), (i * 10 % 256, 99, 30)).save(root / f"{i:03}.png")
    return root


@pytest.mark.parametrize(
    "kind", ["unlabeled image folder", "parquet directory", "config", "stream", "object"]
)
def test_calibrates_from_any_kind_of_data_set(pico: Pico, tmp_path: Path, kind: str) -> None:
    pool = pico.instance_pool()
    sources: dict[str, Any] = {
        "unlabeled image folder": str(image_folder(tmp_path / "images", 12)),
        "parquet directory": str(pico.dataset(pico.tasks[0])),
        "config": {
            "_target_": "datasets.load_dataset",
            "path": str(pico.dataset(pico.tasks[0])),
            "split": "test",
        },
        "stream": {
            "_target_": "datasets.load_dataset",
            "path": str(pico.dataset(pico.tasks[0])),
            "split": "train",
            "streaming": True,
        },
        "object": pool.load_train_dataset(pico.tasks[0]),
    }
    pool._train_datasets = {task: sources[kind] for task in pico.tasks}
    FeatCalAlgorithm(
        merger={"_target_": "fusion_bench.method.SimpleAverageAlgorithm"},
        n_samples=8,
        n_heldout=2,
        output_dir=str(tmp_path / "out"),
    ).run(pool)
    report = RunReport.read(tmp_path / "out" / "featcal_report.json")
    assert [data.used for data in report.data] == [8] * len(pico.tasks)
    assert all(data.split == "train" for data in report.data)
