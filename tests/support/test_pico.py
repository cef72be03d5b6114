"""The pico CLIP family is what the end-to-end tests take it for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pico import Pico
from safetensors import safe_open


def test_experts_lie_on_disk_as_the_published_ones_do(pico: Pico) -> None:
    for task in pico.tasks:
        with safe_open(pico.expert(task) / "model.safetensors", "pt") as file:
            assert all(key.startswith("vision_model.") for key in file.keys())
    loaded = pico.load_expert("mnist").state_dict()
    base = pico.load_base().state_dict()
    # A release that does not know the prefix would load random weights, with only a warning.
    for name, value in base.items():
        if value.is_floating_point():
            change = (loaded[name] - value).norm() / value.norm()
            assert 0 < change < 0.5, name


@pytest.mark.slow
def test_experts_are_perfect_and_averaging_is_not(pico: Pico, in_tmp_path: Path) -> None:
    averaged = pico.run_program("method=simple_average")["report"]
    for task in pico.tasks:
        alone = pico.run_program(
            "method=dummy", f"modelpool.models._pretrained_={pico.expert(task)}"
        )
        assert alone["report"][task]["accuracy"] == 1
        assert 0.3 < averaged[task]["accuracy"] < 1


def test_instance_pool_hands_out_its_own_models(pico: Pico) -> None:
    pool = pico.instance_pool()
    assert pool.model_names == list(pico.tasks)
    assert pool.load_model("mnist") is pool.load_model("mnist")
    held, loaded = pool.load_model("svhn").state_dict(), pico.load_expert("svhn").state_dict()
    assert all(torch.equal(held[name], loaded[name]) for name in loaded)
    assert set(pool.load_train_dataset("mnist").column_names) == {"image", "label"}


@pytest.mark.slow
@pytest.mark.cli
def test_command_runs_on_it(pico: Pico, tmp_path: Path) -> None:
    done = pico.run_cli("method=dummy", "taskpool=dummy", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert str(pico.base) in done.stdout
