"""The package as users get it: wheel, sdist, editable install, and the search path plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from pico import Pico
from places import ROOT, SUPPORT

from hydra_plugins.featcal_searchpath import (
    FeatCalSearchPathPlugin,
    fusion_bench_configs,
    own_configs,
)

PROBE = SUPPORT / "compose_probe.py"
TA8 = "modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA8"


def run(*command: object, **kwargs: Any) -> str:
    """Run a command; on failure show what it printed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **kwargs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", dist, cwd=ROOT)
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    return Built(wheel, sdist)


def make_venv(path: Path, *install: object) -> Path:
    """Make an environment that borrows this one's libraries and has our package installed.

    The borrowed directories come last and are added as plain paths: an editable install in this
    environment has its own `.pth` file, which is not read there, so what is found is the new one.

    Returns:
        Its interpreter.
    """
    venv.create(path, symlinks=True, with_pip=False)
    python = path / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")[:-1])
    outer = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    (site / "zz_outer.pth").write_text("\n".join(outer))
    # Its build backend is the borrowed one, and the version that this environment may hold is
    # not to be taken for the new one.
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--quiet"]
    run(python, "-m", "pip", "install", *flags, *install)
    return python


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = [built.wheel] if request.param == "wheel" else ["--editable", ROOT]
    return make_venv(tmp_path_factory.mktemp(request.param) / "venv", *target)


def test_wheel_holds_package_plugin_and_configs_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {
        "featcal_fusionbench",
        "hydra_plugins",
        f"{built.wheel.name.split('-py3')[0]}.dist-info",
    }
    assert "featcal_fusionbench/py.typed" in names
    assert "featcal_fusionbench/tables/published.yaml" in names
    shipped = {
        f"featcal_fusionbench/config/{file.relative_to(ROOT / 'config').as_posix()}"
        for file in (ROOT / "config").rglob("*.yaml")
    }
    assert shipped
    assert shipped <= set(names)
    # Hydra's plugins of all packages share this namespace: an __init__.py would hide the others.
    assert "hydra_plugins/__init__.py" not in names


def test_sdist_can_rebuild_and_test_itself(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = {"pyproject.toml", "LICENSE", "README.md", "tests/conftest.py", ".ci/run"}
    tracked |= {"scripts/test.sh", "scripts/constraints-oldest.txt", "config/method/featcal.yaml"}
    for folder in ("scripts", "tests"):
        tracked |= {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*.py")}
    tracked |= {f"docs/{page.name}" for page in (ROOT / "docs").iterdir()}
    assert tracked <= names


@pytest.mark.slow
@pytest.mark.cli
def test_configs_are_reachable_from_everywhere(installed: Path, tmp_path: Path) -> None:
    """Each case is a directory from which FusionBench starts another primary config directory."""
    plain, empty, project = (tmp_path / name for name in ("plain", "empty", "project"))
    plain.mkdir()
    (empty / "config").mkdir(parents=True)
    (project / "config" / "method").mkdir(parents=True)
    (project / "config" / "method" / "mine.yaml").write_text("marker: mine\n")
    cwds = {"plain": plain, "repository": ROOT, "empty config": empty, "project": project}

    ours = ["method=featcal", "--cfg", "job"]
    theirs = ["method=wudi/wudi", TA8, "--cfg", "job"]
    cases = {(name, "ours"): (cwd, ours) for name, cwd in cwds.items()}
    cases |= {(name, "theirs"): (cwd, theirs) for name, cwd in cwds.items()}
    cases["project", "own"] = (project, ["method=mine", "--cfg", "job"])
    results = probe(installed, cases)

    for (name, kind), result in results.items():
        assert result["code"] == 0, f"{name}, {kind}: {result['err']}"
        cfg = OmegaConf.create(result["out"])
        if kind == "ours":
            assert cfg.method._target_.startswith("featcal_fusionbench."), name
        elif kind == "theirs":
            assert cfg.method._target_ == "fusion_bench.method.WUDIMerging", name
            assert len(cfg.modelpool.models) == 9, name
        else:
            assert cfg.method.marker == "mine"


@pytest.mark.slow
@pytest.mark.cli
def test_a_users_config_of_the_same_name_wins(installed: Path, tmp_path: Path) -> None:
    method = tmp_path / "config" / "method"
    method.mkdir(parents=True)
    (method / "featcal.yaml").write_text("marker: the user's\n")
    (tmp_path / "config" / "fabric_model_fusion.yaml").write_text(
        "defaults: [method: dummy, _self_]\nown_primary: true\n"
    )
    cases = {"own": (tmp_path, ["method=featcal", "--cfg", "job"])}
    result = probe(installed, cases)["own"]
    assert result["code"] == 0, result["err"]
    cfg = OmegaConf.create(result["out"])
    assert cfg.method == {"marker": "the user's"}
    assert cfg.own_primary


@pytest.mark.slow
@pytest.mark.cli
def test_featcal_runs_end_to_end_from_any_directory(
    installed: Path, pico: Pico, tmp_path: Path
) -> None:
    (tmp_path / "config").mkdir()  # the hardest place: FusionBench takes it for its own
    finished = pico.run_cli(
        "method=featcal", "method.n_samples=8", "method.n_heldout=2", cwd=tmp_path, python=installed
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    (report,) = (tmp_path / "outputs").rglob("featcal_report.json")
    assert json.loads(report.read_text())["status"] == "complete"
    package = run(installed, "-c", "import featcal_fusionbench as f; print(f.__file__)").strip()
    is_editable = Path(package).is_relative_to(ROOT)
    assert is_editable or Path(package).is_relative_to(installed.parents[1])


def probe(python: Path, cases: dict[Any, tuple[Path, list[str]]]) -> dict[Any, dict[str, Any]]:
    """Run command lines of `fusion_bench`, each in its directory."""
    request = [{"cwd": str(cwd), "args": args} for cwd, args in cases.values()]
    answer = run(python, PROBE, input=json.dumps(request))
    return dict(zip(cases, json.loads(answer.splitlines()[-1]), strict=True))


FOREIGN_APP = """
import json, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

@hydra.main(config_path="conf", config_name="main", version_base=None)
def app(cfg):
    plugins = Plugins.instance().discover(SearchPathPlugin)
    print(json.dumps({
        "plugins": [plugin.__name__ for plugin in plugins],
        "sources": [source.path for source in HydraConfig.get().runtime.config_sources],
        "heavy": sorted({"torch", "transformers", "fusion_bench"} & set(sys.modules)),
        "method": cfg.method.name,
    }))

app()
"""


@pytest.mark.cli
def test_other_hydra_apps_are_left_alone(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "main.yaml").write_text("defaults: [method: theirs]\n")
    (tmp_path / "conf" / "method" / "theirs.yaml").write_text("name: theirs\n")
    script = tmp_path / "app.py"
    script.write_text(FOREIGN_APP)

    seen = json.loads(run(installed, script, cwd=tmp_path))
    assert "FeatCalSearchPathPlugin" in seen["plugins"]
    assert seen["method"] == "theirs"
    assert seen["heavy"] == []
    assert [path for path in seen["sources"] if path] == ["hydra.conf", str(tmp_path / "conf")]

    done = subprocess.run(
        [installed, script, "method=featcal"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Could not find 'method/featcal'" in done.stderr


@pytest.mark.cli
def test_importing_the_package_is_light(installed: Path) -> None:
    code = (
        "import sys, featcal_fusionbench as f; print(f.__version__);"
        "print([m for m in ('torch', 'transformers', 'fusion_bench', 'hydra') if m in sys.modules])"
    )
    version, heavy = run(installed, "-c", code).splitlines()
    assert version == "0.1.0"
    assert heavy == "[]"


@pytest.mark.cli
def test_published_values_are_found(installed: Path, tmp_path: Path) -> None:
    code = (
        "from featcal_fusionbench.tables.published import labels;"
        "print('RegMean' in labels('clip-vit-base-patch32', 'TA8'))"
    )
    assert run(installed, "-c", code, cwd=tmp_path) == "True\n"


def search_path(main: str) -> list[str]:
    """The search path that the plugin makes of a primary directory."""
    path = ConfigSearchPathImpl()
    path.append("main", main)
    FeatCalSearchPathPlugin().manipulate_search_path(path)
    return [element.path for element in path.get_path()]


def test_plugin_is_discovered() -> None:
    # By name: Hydra executes plugin modules anew, which makes a second class.
    found = Plugins.instance().discover(SearchPathPlugin)
    assert FeatCalSearchPathPlugin.__qualname__ in [plugin.__qualname__ for plugin in found]


def test_plugin_acts_where_fusion_bench_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = str(own_configs()), str(fusion_bench_configs())
    monkeypatch.setitem(sys.modules, "fusion_bench", object())
    assert search_path("/home/config") == ["/home/config", ours, theirs]
    # From the repository's root our own directory is the primary one already.
    assert search_path(ours) == [ours, theirs]

    monkeypatch.delitem(sys.modules, "fusion_bench")
    assert search_path("/home/config") == ["/home/config"]
    # Hydra's compose API on FusionBench's configs, which needs no import of FusionBench.
    assert search_path(theirs) == [theirs, ours]
