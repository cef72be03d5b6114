"""What the README, CONTRIBUTING and docs/ name is there: pages, paths, configs, settings."""

from __future__ import annotations

import functools
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fusion_bench.constants import DEFAULT_CONFIG_PATH
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pico import Pico
from places import CONFIG, ROOT

from featcal_fusionbench.sweeps.cli import parse_arguments

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
POOLS = (
    "modelpool=CLIPVisionModelPool/clip-vit-base-patch32_TA8 "
    "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
)
METHODS = sorted(
    file.relative_to(CONFIG / "method").with_suffix("").as_posix()
    for file in (CONFIG / "method").rglob("*.yaml")
    if not file.name.startswith("_")
)
NO_SETTINGS = {"_target_", "_recursive_"}
PLACEHOLDERS = ("…", "<", "*")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """The pieces of code within the text of a page, without those that hold a placeholder."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    return [span for span in found if not any(mark in span for mark in PLACEHOLDERS)]


def commands(program: str) -> list[str]:
    """What a program is called with on all pages, in blocks and in the text, without comments."""
    lines = [line for page in PAGES for line in spans(page)]
    for page in PAGES:
        for block in blocks(page, "bash"):
            lines += block.replace("\\\n", " ").splitlines()
    lines = [line.replace("…", POOLS) for line in lines if line.startswith(f"{program} ")]
    words = (shlex.split(line, comments=True) for line in lines)
    return sorted({shlex.join(called[1:]) for called in words})


@functools.cache
def compose_run(overrides: str) -> DictConfig:
    """The configuration of a FusionBench command."""
    with initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        return compose("fabric_model_fusion", overrides=shlex.split(overrides))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert DOCS and all(f"(docs/{page.name})" in text for page in DOCS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_and_names_are_there(page: Path) -> None:
    tops = [path for path in ROOT.iterdir() if path.name not in {".git", "outputs"}]
    tops = [path for path in tops if path.is_file() or not path.name.startswith(".venv")]
    files = [*tops, *(below for top in tops if top.is_dir() for below in top.rglob("*"))]
    there = [f"/{file.relative_to(ROOT).as_posix()}" for file in files]
    rooms = {path.name for path in (*tops, *(ROOT / "featcal_fusionbench").iterdir())}
    for span in spans(page):
        path = span.removeprefix("./").rstrip("/")
        is_room = span.endswith("/") and path.partition("/")[0] in rooms
        if is_room or re.fullmatch(r"[\w./-]+\.(py|sh|yaml|toml)", span):
            assert any(name.endswith(f"/{path}") for name in there), span
        elif re.fullmatch(r"featcal_fusionbench(\.\w+)+", span):
            assert pkgutil.resolve_name(span), span


@pytest.mark.parametrize("command", commands("fusion_bench"))
def test_commands_compose(command: str) -> None:
    assert "_target_" in compose_run(command).method


def test_configs_that_the_text_names_compose() -> None:
    texts = {span for page in PAGES for span in spans(page)}
    named = [text for text in texts if re.match(r"(method|modelpool|taskpool)=\w", text)]
    assert named
    for text in named:
        assert compose_run(text)


def test_settings_that_the_text_names_are_some() -> None:
    known = {name for settings in documented().values() for name in settings}
    texts = {span for page in PAGES for span in spans(page)}
    named = {match[1] for text in texts if (match := re.match(r"method\.(\w+)", text))}
    assert named and named <= known


@pytest.mark.parametrize("command", commands("featcal-table"))
def test_tables_and_their_options_are_some(command: str) -> None:
    options = parse_arguments(shlex.split(command))
    assert options.list or (CONFIG / "table" / f"{options.table}.yaml").is_file()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_named(method: str) -> None:
    names = {span for page in DOCS for span in spans(page)}
    assert {method, method.rpartition("/")[2]} & names


def documented() -> dict[str, dict[str, Any]]:
    """The defaults on the page of settings, by method."""
    settings: dict[str, dict[str, Any]] = {}
    methods: list[str] = []
    for line in (ROOT / "docs/settings.md").read_text().splitlines():
        if line.startswith("Methods: "):
            methods = re.findall(r"`([^`]+)`", line)
        elif row := re.match(r"\| `(\w+)` \| (.*?) \|", line):
            default = OmegaConf.create(f"value: {row[2].strip('`')}").value
            for method in methods:
                settings.setdefault(method, {})[row[1]] = default
    return settings


@pytest.mark.parametrize("method", documented())
def test_the_page_of_settings_has_the_defaults(method: str) -> None:
    shipped, defaults = compose_run(f"method={method}").method, documented()[method]
    if "merger" in defaults:
        defaults["merger"] = compose_run(f"method={defaults['merger']}").method
    assert defaults == {name: shipped[name] for name in defaults}


def test_the_page_of_settings_is_complete() -> None:
    settings = documented()
    for method in METHODS:
        if "/" not in method:
            shipped = set(compose_run(f"method={method}").method) - NO_SETTINGS
            assert settings[method].keys() == shipped, method


def test_the_example_in_python_runs(
    pico: Pico, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands: its hub ids are directories here, which come first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for folder in ("openai", "tanganke"):
        (in_tmp_path / folder).mkdir()
    clip = "clip-vit-base-patch32"
    (in_tmp_path / "openai" / clip).symlink_to(pico.base)
    for name, task in zip(("gtsrb", "dtd"), pico.tasks, strict=False):
        (in_tmp_path / "tanganke" / f"{clip}_{name}").symlink_to(pico.expert(task))
        (in_tmp_path / "tanganke" / name).symlink_to(pico.dataset(task))
    (example,) = blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert type(names["model"]).__name__ == "CLIPVisionModel"
    assert (in_tmp_path / "out/featcal_report.json").is_file()
