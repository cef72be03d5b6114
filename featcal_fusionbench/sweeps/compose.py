"""FusionBench's configuration as its command would compose it, without running or importing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.featcal_searchpath import fusion_bench_configs, own_configs

from .command_line import override
from .errors import ExperimentError

__all__ = [
    "compose_config",
    "compose_group",
    "compose_method",
    "compose_program",
    "config_roots",
    "plain",
]

PRIMARY = "fabric_model_fusion"
"""Primary configuration of the ``fusion_bench`` command."""


def config_roots(config_dir: Path | None = None) -> list[Path]:
    """Directories in which FusionBench's command finds configs, first come, first served.

    Args:
        config_dir: One that the user adds, as with Hydra's ``--config-dir``.
    """
    own = [config_dir] if config_dir else []
    local = Path("config").absolute()
    roots = [*own, *([local] if local.is_dir() else []), own_configs(), fusion_bench_configs()]
    return list(dict.fromkeys(root for root in roots if root is not None))


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """Compose FusionBench's program configuration.

    Args:
        overrides: As on the command line of ``fusion_bench``.
        config_dir: A further directory with configs.

    Raises:
        ExperimentError: An override names something that does not exist; Hydra's message follows.
    """
    return _compose(PRIMARY, overrides, config_dir)


def compose_method(overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """Compose a method alone, which is quicker, from its overrides for FusionBench's command.

    Args:
        overrides: ``method=…`` and what else sets the method.
        config_dir: A further directory with configs.

    Returns:
        The method's configuration.

    Raises:
        ExperimentError: As of ``compose_config``.
    """
    added = [f"+{text}" if text.startswith("method=") else text for text in overrides]
    return _compose(None, added, config_dir).method


def compose_group(group: str, name: str, config_dir: Path | None = None) -> DictConfig:
    """Compose one file of a config group by itself.

    Raises:
        ExperimentError: As of ``compose_config``.
    """
    return _compose(None, [f"+{group}={name}"], config_dir)[group]


def compose_program(overrides: Sequence[str], config_dir: Path | None, log_dir: Path) -> DictConfig:
    """Compose FusionBench's program configuration as its command would at the start of a run.

    Args:
        overrides: As on the command line.
        config_dir: A further directory with configs.
        log_dir: What Hydra is to take for the run's output directory.

    Returns:
        The configuration, with Hydra's own below ``hydra``.

    Raises:
        ExperimentError: As of ``compose_config``.
    """
    # the command line sets the output directory as it starts; composing alone does not
    runtime = override("hydra.runtime.output_dir", log_dir)
    return _compose(PRIMARY, [*overrides, runtime], config_dir, with_hydra=True)


def _compose(
    primary: str | None,
    overrides: Sequence[str],
    config_dir: Path | None,
    with_hydra: bool = False,
) -> DictConfig:
    root = fusion_bench_configs()
    if root is None:
        raise ExperimentError("FusionBench is not installed: pip install fusion-bench.")
    others = ",".join(f"'file://{other}'" for other in config_roots(config_dir) if other != root)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(root), version_base=None):
            return compose(
                primary,
                overrides=[f"hydra.searchpath=[{others}]", *overrides],
                return_hydra_config=with_hydra,
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise ExperimentError(
            f"FusionBench's configuration cannot be composed with {' '.join(overrides)}: {error}"
        ) from error
    finally:
        GlobalHydra.instance().hydra = outer


def plain(node: Any, *, resolve: bool) -> dict[str, Any]:
    """A composed node as a dict.

    Args:
        node: A mapping of a composed configuration.
        resolve: Whether interpolations are resolved, or left as they stand.
    """
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=resolve))
