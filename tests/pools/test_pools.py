"""Weights by name: where they are read from and what is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pico import Pico
from safetensors.torch import save_file
from torch import Tensor

from featcal_fusionbench.calibration import WeightsError
from featcal_fusionbench.errors import ModelPoolError
from featcal_fusionbench.pools.checkpoints import (
    SafetensorsWeights,
    open_checkpoint,
    read_header,
)
from featcal_fusionbench.pools.models import check_weights
from featcal_fusionbench.pools.opening import OpenedModel, Opener, floating_tensors


def equal(found: object, expected: dict[str, Tensor]) -> bool:
    assert found is not None
    return all(torch.equal(found[name], value) for name, value in expected.items())  # type: ignore[index]


def opened(pool: Any, name: str, scratch: Path) -> OpenedModel:
    opener = Opener(pool, scratch)
    opener.open_base()
    return opener.open(pool._models[name], name)


def test_instances_are_read_in_place(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    found = opened(pool, pico.tasks[0], tmp_path)
    model = pool.load_model(pico.tasks[0])
    name = next(iter(floating_tensors(model)))
    assert found.weights[name].data_ptr() == model.state_dict()[name].data_ptr()
    assert "CLIPVisionModel" in found.source and not list(tmp_path.iterdir())


@pytest.mark.parametrize("as_config", [False, True])
def test_checkpoints_are_read_in_place(pico: Pico, tmp_path: Path, as_config: bool) -> None:
    pool = pico.instance_pool()
    path = str(pico.expert(pico.tasks[0]))
    entry = {
        "_target_": "transformers.CLIPVisionModel.from_pretrained",
        "pretrained_model_name_or_path": path,
    }
    pool._models[pico.tasks[0]] = OmegaConf.create(entry) if as_config else path
    found = opened(pool, pico.tasks[0], tmp_path)
    assert isinstance(found.weights, SafetensorsWeights) and found.source == path
    assert not list(tmp_path.iterdir())  # nothing was laid down
    assert equal(found.weights, floating_tensors(pico.load_expert(pico.tasks[0])))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_files_are_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.zeros(1000)}, path)
    weights = SafetensorsWeights(read_header(path))
    assert str(path) not in Path("/proc/self/maps").read_text()
    first = weights["a"]
    assert str(path) in Path("/proc/self/maps").read_text()  # what is read lies in the file
    assert float(first.sum()) == 1000
    del first
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_every_kind_of_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    stored = {
        "one": torch.tensor(2.5),
        "none": torch.ones(0, 3),
        "half": torch.arange(15.0).reshape(3, 5).to(torch.bfloat16),
        "double": torch.arange(6.0).reshape(1, 2, 3).double(),
        "count": torch.arange(3),
    }
    save_file(stored, path)
    found = SafetensorsWeights(read_header(path))
    assert found.keys() == stored.keys() and equal(found, stored)
    assert all(found[name].dtype == value.dtype for name, value in stored.items())
    with torch.device("meta"):  # the caller's default does not matter
        assert found["half"].device.type == "cpu"


@pytest.mark.parametrize("size", [500, 1000, 1001])
def test_a_file_that_is_written_anew_is_not_read_as_the_old_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    weights = SafetensorsWeights(read_header(path))
    save_file({"a": torch.zeros(size)}, path)
    with pytest.raises(ModelPoolError, match="weights.safetensors was written anew"):
        weights["a"]


def test_a_whole_clip_serves_as_base(pico: Pico) -> None:
    base = floating_tensors(pico.load_base())
    found = open_checkpoint(str(pico.base), base, name="base")
    assert found is not None and equal(found.weights, base)
    assert "text_model" in found.left_out


def test_what_the_pool_assembles_is_laid_down(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pico.instance_pool()
    expert = pico.load_expert(pico.tasks[0])
    pool._models[pico.tasks[0]] = {"_target_": "somewhere.make_model", "rank": 4}
    monkeypatch.setattr(pool, "load_model", lambda name: expert)
    found = opened(pool, pico.tasks[0], tmp_path)
    assert "somewhere.make_model" in found.source
    assert [path.name for path in tmp_path.iterdir()] == [f"{pico.tasks[0]}.safetensors"]
    assert equal(found.weights, floating_tensors(expert))


def test_sharded_checkpoints_are_read(pico: Pico, tmp_path: Path) -> None:
    tensors = floating_tensors(pico.load_base())
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key].clone() for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = open_checkpoint(str(tmp_path), tensors, name="svhn")
    assert found is not None and equal(found.weights, tensors)


def test_another_architecture_is_no_match(pico: Pico, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelPoolError, match="'svhn' .* another architecture"):
        open_checkpoint(str(tmp_path), floating_tensors(pico.load_base()), name="svhn")
    missing = open_checkpoint(str(tmp_path / "missing"), {"weight": torch.ones(2)}, name="svhn")
    assert missing is None


def test_all_that_is_wrong_stands_in_one_message() -> None:
    reference = {name: torch.ones(2, 2) for name in ("a", "b", "c", "d")}
    weights = {
        "a": torch.full((2, 2), torch.nan),
        "b": torch.ones(3, 2),
        "c": torch.ones(2, 2, device="meta"),
        "d": torch.ones(2, 2),
    }
    with pytest.raises(WeightsError) as caught:
        check_weights("expert", "svhn", weights, "somewhere", reference)
    message = str(caught.value)
    for part in ("svhn", "somewhere", "b (3, 2) for (2, 2)", "meta", "NaN or Inf: a"):
        assert part in message


def test_digest_tells_weights_apart_and_ignores_where_they_lie(pico: Pico) -> None:
    reference = floating_tensors(pico.load_base())
    task, other = pico.tasks[:2]

    def digest(weights: object) -> str | None:
        return check_weights("expert", "x", weights, "s", reference).identity.sha256  # type: ignore[arg-type]

    stored = open_checkpoint(str(pico.expert(task)), reference, name="x")
    on_disk = stored and stored.weights
    assert digest(on_disk) == digest(floating_tensors(pico.load_expert(task)))
    assert digest(on_disk) != digest(floating_tensors(pico.load_expert(other)))
