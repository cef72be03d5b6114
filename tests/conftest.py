"""Fixtures shared by all tests, and the environment that they run in."""

from __future__ import annotations

import atexit
import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# huggingface_hub and datasets read these once, when they are imported, which conftest precedes.
# Tests run without a network, and leave nothing in the user's data set cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="featcal-datasets-")
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

import fusion_bench.scripts.cli  # noqa: E402, F401  (what a fork of this process shall have)
import pytest  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from forks import start_forks  # noqa: E402
from pico import Pico, build_pico  # noqa: E402
from pico_t5 import PicoT5, build_pico_t5  # noqa: E402
from quick import datasets_once, without_workers  # noqa: E402

from featcal_fusionbench.compat import apply_transformers_shim  # noqa: E402
from featcal_fusionbench.method import featcal, preparation, recorder  # noqa: E402, F401
from featcal_fusionbench.sweeps import compose  # noqa: E402

# Configs are composed hundreds of times: OmegaConf takes the loader that it finds under this name.
yaml.SafeLoader = yaml.CSafeLoader  # pyright: ignore


def composed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what was composed, by overrides and by the content of the user's configs."""
    known: dict[Any, Any] = {}

    def composed(
        primary: str | None, overrides: Any, config_dir: Path | None, with_hydra: bool = False
    ) -> Any:
        if with_hydra or Path("config").exists():
            return function(primary, overrides, config_dir, with_hydra)
        files = sorted(Path(config_dir or os.devnull).rglob("*.yaml"))
        content = tuple((f.relative_to(config_dir or f), f.read_text()) for f in files)
        key = (primary, tuple(overrides), config_dir is None, content)
        if key not in known:
            known[key] = function(primary, overrides, config_dir)
        return copy.deepcopy(known[key])

    return composed


def pytest_sessionstart() -> None:
    """Programs are forked of what this process is now, before any test has changed it.

    Measuring the machine's speed takes longer than calibrating a pico model: once is enough.
    """
    torch.set_num_threads(1)  # models of a few thousand weights are slower on two
    preparation.measure_matmul_rate = functools.cache(preparation.measure_matmul_rate)
    preparation.measure_matmul_rate(torch.device("cpu"))
    compose._compose = composed_once(compose._compose)
    without_workers()
    datasets_once()
    start_forks()


@pytest.fixture(scope="session", autouse=True)
def transformers_shim() -> None:
    """Let every test import FusionBench's CLIP modules, whichever test comes first."""
    apply_transformers_shim()


@pytest.fixture(scope="session", autouse=True)
def figures_of_runs_are_not_drawn() -> Iterator[None]:
    """It takes as long as a run. Forked commands draw theirs, and so does whoever looks at one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "write_figure", lambda path, figure: Path(path).touch())
        yield


@pytest.fixture(scope="session")
def pico(tmp_path_factory: pytest.TempPathFactory) -> Pico:
    """The pico CLIP family on disk, made once. Treat it as read-only."""
    return build_pico(tmp_path_factory.mktemp("pico"))


@pytest.fixture(scope="session")
def built_pico_t5(tmp_path_factory: pytest.TempPathFactory) -> PicoT5:
    """The pico T5 family on disk, made once in some ten seconds. Treat it as read-only."""
    return build_pico_t5(tmp_path_factory.mktemp("pico_t5"))


@pytest.fixture
def pico_t5(built_pico_t5: PicoT5, monkeypatch: pytest.MonkeyPatch) -> Iterator[PicoT5]:
    """The pico T5 family, with its root, where `./glue` lies, as the current directory."""
    monkeypatch.chdir(built_pico_t5.root)
    yield built_pico_t5
    # not `outputs/cache`: FusionBench's tokenised GLUE, the same for all
    shutil.rmtree(built_pico_t5.root / "outputs/fabric_model_fusion", ignore_errors=True)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run every test in a directory of its own: methods write `outputs/` below the current."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
