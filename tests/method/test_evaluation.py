"""A task pool that would evaluate with parts of another CLIP is refused before the long work."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pico import Pico
from torch import nn
from transformers import CLIPConfig, CLIPModel

from featcal_fusionbench.errors import TaskPoolError
from featcal_fusionbench.method.taskpool_check import check_task_pool

METHODS = ("merge_only", "featcal", "representation_surgery", "prob_surgery")


@pytest.fixture(scope="module")
def other(pico: Pico, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP with the widths of the pico base and smaller patches, as ViT-B/16 beside B/32."""
    directory = tmp_path_factory.mktemp("other") / "base"
    shutil.copytree(pico.base, directory)
    config = CLIPConfig.from_pretrained(pico.base)
    config.vision_config.patch_size //= 2
    config.save_pretrained(directory)
    CLIPModel(config).save_pretrained(directory)
    return directory


def task_pool(name: str, target: str = "transformers.CLIPModel.from_pretrained") -> Any:
    clip = {"_target_": target, "pretrained_model_name_or_path": name}
    return SimpleNamespace(_clip_model=clip)


@pytest.mark.parametrize("method", METHODS)
def test_methods_refuse_the_task_pool_of_another_clip(pico: Pico, other: Path, method: str) -> None:
    with pytest.raises(TaskPoolError, match=r"patch_size.*taskpool\.base_model"):
        pico.run_program(
            f"method={method}",
            "method.merger._target_=test_bad_input.Untouchable",
            f"taskpool.base_model={other}",
        )


def test_its_own_clip_is_taken_by_path_config_or_object(pico: Pico, other: Path) -> None:
    base = pico.load_base()
    check_task_pool(task_pool(str(pico.base)), base)
    check_task_pool(SimpleNamespace(_clip_model=str(pico.base)), base)
    check_task_pool(SimpleNamespace(_clip_model=CLIPModel.from_pretrained(pico.base)), base)
    with pytest.raises(TaskPoolError, match="patch_size"):
        check_task_pool(SimpleNamespace(_clip_model=str(other)), base)
    with pytest.raises(TaskPoolError, match="patch_size"):
        check_task_pool(SimpleNamespace(_clip_model=CLIPModel.from_pretrained(other)), base)


@pytest.mark.parametrize("content", [None, "{not json"])
def test_a_clip_that_cannot_be_read_is_named(
    pico: Pico, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TaskPoolError, match="taskpool.base_model") as caught:
        check_task_pool(task_pool(str(tmp_path)), pico.load_base())
    assert str(tmp_path) in str(caught.value)


def test_what_it_cannot_judge_is_let_pass(pico: Pico, other: Path) -> None:
    base = pico.load_base()
    check_task_pool(None, base)
    check_task_pool(SimpleNamespace(), base)  # no CLIP task pool
    check_task_pool(task_pool(str(other), target="my.own.loader"), base)
    check_task_pool(SimpleNamespace(_clip_model=nn.Linear(2, 2)), base)
    check_task_pool(task_pool(str(other)), nn.Linear(2, 2))  # no CLIP model pool
