"""Every shipped config composes, and what it names can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from fusion_bench.constants import DEFAULT_CONFIG_PATH
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from places import CONFIG

MAIN_GROUPS = ("method", "modelpool", "taskpool")
# A name that starts with an underscore is a part for other configs, as in FusionBench. Those of
# tables are no options of the command: test_experiments.py composes them.
SHIPPED = sorted(
    file.relative_to(CONFIG).with_suffix("").as_posix()
    for file in CONFIG.rglob("*.yaml")
    if not file.name.startswith("_") and not file.is_relative_to(CONFIG / "table")
)


def compose(option: str) -> DictConfig:
    """Select one config in FusionBench's primary config, as on the command line."""
    group, _, name = option.partition("/")
    if group in MAIN_GROUPS:
        override = f"{group}={name}"
    else:
        # A part of a pool, such as a data set: put it somewhere of its own.
        group, _, name = option.rpartition("/")
        override = f"+{group}@part={name}"
    with hydra.initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        return hydra.compose("fabric_model_fusion", overrides=[override])


def targets(node: object) -> Iterator[str]:
    """All `_target_` below a config node."""
    if isinstance(node, DictConfig):
        for key in node:
            if OmegaConf.is_missing(node, key):
                continue
            if key == "_target_":
                yield node[key]
            else:
                yield from targets(node[key])
    elif isinstance(node, ListConfig):
        for i in range(len(node)):
            if not OmegaConf.is_missing(node, i):
                yield from targets(node[i])


def test_there_are_configs() -> None:
    assert "method/featcal" in SHIPPED


@pytest.mark.parametrize("option", SHIPPED)
def test_config_composes_and_its_targets_import(option: str) -> None:
    cfg = compose(option)
    group = option.partition("/")[0]
    node = cfg[group] if group in MAIN_GROUPS else cfg.part
    OmegaConf.resolve(node)
    found = list(targets(node))
    # Only FusionBench's old-style task pools, which have a `type`, do without.
    assert found or "type" in node
    for target in found:
        assert callable(get_object(target))


@pytest.mark.parametrize("option", SHIPPED)
def test_config_has_a_name_of_its_own(option: str) -> None:
    """FusionBench's directory comes before ours on the search path, so it would win."""
    assert not Path(str(DEFAULT_CONFIG_PATH), f"{option}.yaml").exists()
