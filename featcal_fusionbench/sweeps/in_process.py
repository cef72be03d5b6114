"""FusionBench's program run in this process, as its command would run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict

from ..compat import apply_transformers_shim
from .compose import compose_program

__all__ = ["run_program"]

_SILENCE = "print_config=false"
"""Given on top of what the printed command says: changes no number."""


def run_program(overrides: Sequence[str], config_dir: Path | None, log_dir: Path) -> None:
    """Run FusionBench's program; it leaves the files that its command would leave.

    Args:
        overrides: Hydra overrides; ``path.log_dir`` among them should be ``log_dir``.
        config_dir: A further directory with configs.
        log_dir: Hydra's output directory of the run.
    """
    apply_transformers_shim()  # before anything imports FusionBench's task pools
    from fusion_bench.utils.instantiate_utils import set_print_function_call

    config = compose_program([*overrides, _SILENCE], config_dir, log_dir)
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        with open_dict(config):
            del config["hydra"]
        OmegaConf.resolve(config)
        # its option of the same name has no effect (0.2.33): a panel for every data set and model
        with set_print_function_call(False):
            instantiate(config).run()
    finally:
        hydra.cfg = before
