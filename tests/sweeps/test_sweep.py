"""The sweep: what is run, resumed, retried, refused. Most runs are those of a stand-in command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from cells import collect
from filelock import FileLock
from forks import run_forked
from hydra.core.hydra_config import HydraConfig
from pico import Pico
from places import ROOT, SUPPORT

from featcal_fusionbench.sweeps import sweep as sweep_module
from featcal_fusionbench.sweeps.cli import main
from featcal_fusionbench.sweeps.errors import SweepError
from featcal_fusionbench.sweeps.preflight import (
    Kind,
    Place,
    Source,
    check_sources,
    require_all,
)

FAKE = [sys.executable, str(SUPPORT / "fake_fusion_bench.py")]
TABLE = """
defaults: [_clip, _self_]
title: A table for tests
pools: [modelpool=pico, taskpool=pico]
overrides: [fabric.accelerator=cpu, print_config=false]
rows: [task_arithmetic, regmean, task_arithmetic_featcal]
columns: [none, featcal]
cost: {parameters: 3.0e+4, tokens: 5, test_inputs: 40}
"""
ALL = [
    "base/none/seed0/run",
    "experts/none/seed0/run-mnist",
    "experts/none/seed0/run-svhn",
    "experts/none/seed0/run-eurosat",
    "task_arithmetic/none/seed0/run",
    "regmean/none/seed0/run",
    "task_arithmetic/featcal/seed0/run",
    "regmean/featcal/seed0/run",
    "task_arithmetic_featcal/featcal/seed0/run",
]


ARGUMENTS = ["pico", "--config-dir", "conf", "--size", "smoke", "--output", "out"]


@pytest.fixture
def conf(pico: Pico, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small table on the pico family, in the current directory's `conf`."""
    for group in ("modelpool", "taskpool"):
        target = in_tmp_path / "conf" / group / "pico.yaml"
        target.parent.mkdir(parents=True)
        target.write_text((pico.config_dir / group / "pico.yaml").read_text())
    (in_tmp_path / "conf/table").mkdir()
    (in_tmp_path / "conf/table/pico.yaml").write_text(TABLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def table(conf: None, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that run that table, each run one of the stand-in."""
    monkeypatch.setattr(sweep_module, "program", lambda: FAKE)
    # text and figures of made-up scores would take most of the time
    monkeypatch.setattr(sweep_module.Sweep, "write_table", lambda *_: None)
    monkeypatch.setenv("FAKE_LOG", str(in_tmp_path / "fake.log"))
    return ARGUMENTS


def ran(since: int = 0) -> list[str]:
    """Which runs the stand-in was started for, in order."""
    log = Path("fake.log")
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.partition("/out/cells/")[2] for line in lines][since:]


def test_every_cell_is_run_once_and_a_second_sweep_runs_nothing(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(table) == 0
    assert ran() == ALL
    cells = {(c.merger, c.calibrator): c for c in collect("out")}
    assert len(cells) == 7 and all(set(c.scores) == set(c.tasks) for c in cells.values())
    experts = cells["experts", "none"]
    assert list(experts.scores) == ["mnist", "svhn", "eurosat"]
    assert experts.command.count("fusion_bench") == 3
    assert cells["task_arithmetic", "featcal"].command.startswith("fusion_bench --config-dir ")
    assert main(table) == 0
    assert ran() == ALL
    assert "7 done" in capsys.readouterr().out


def test_a_failed_cell_is_listed_and_blocks_what_starts_from_it_until_it_is_retried(
    table: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "task_arithmetic/none")
    assert main(table) == 1
    out = capsys.readouterr().out
    assert "failed: task_arithmetic/none/seed0: exit status 3" in out
    assert "blocked: task_arithmetic/featcal/seed0" in out
    assert "blocked: task_arithmetic_featcal/featcal/seed0" in out
    assert "4 done, 1 failed, 2 blocked" in out
    failure = json.loads(Path("out/cells/task_arithmetic/none/seed0/failure.json").read_text())
    assert failure["tail"][-1] == "no luck today" and Path(failure["log"]).is_file()

    monkeypatch.delenv("FAKE_FAIL")
    before = len(ran())
    assert main(table) == 1  # not by itself
    assert not ran(before)
    assert main([*table, "--retry-failed"]) == 0
    assert ran(before) == [run for run in ALL if run.startswith("task_arithmetic")]
    assert not Path("out/cells/task_arithmetic/none/seed0/failure.json").exists()


def test_a_run_that_leaves_nonsense_fails_and_the_others_go_on(
    table: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_NONSENSE", "base/none")
    assert main([*table, "--only", "merger=base,regmean,calibrator=none"]) == 1
    out = capsys.readouterr().out
    assert "failed: base/none/seed0: what the runs left cannot be read" in out
    assert "1 done, 1 failed" in out


def test_a_cell_whose_recipe_has_changed_is_run_again(table: list[str]) -> None:
    only = [*table, "--only", "merger=task_arithmetic,calibrator=none"]
    assert main(only) == 0
    text = Path("conf/table/pico.yaml").read_text()
    changed = text + "mergers: {task_arithmetic: {settings: {scaling_factor: 0.4}}}\n"
    Path("conf/table/pico.yaml").write_text(changed)
    assert main(only) == 0
    assert ran() == ["task_arithmetic/none/seed0/run"] * 2
    (cell,) = collect("out")
    assert "scaling_factor=0.4" in cell.command


def test_a_saved_model_that_is_gone_is_made_again(table: list[str]) -> None:
    only = [*table, "--only", "merger=task_arithmetic,calibrator=featcal"]
    assert main([*table, "--only", "merger=task_arithmetic,calibrator=none"]) == 0
    Path("out/models/task_arithmetic/none/seed0/model.safetensors").unlink()
    assert main(only) == 0
    assert ran(1) == ["task_arithmetic/none/seed0/run", "task_arithmetic/featcal/seed0/run"]


def test_some_tasks_make_partial_cells(table: list[str]) -> None:
    only = ["--only", "merger=task_arithmetic,experts,calibrator=none", "--tasks", "mnist,svhn"]
    assert main([*table, *only]) == 0
    cells = collect("out")
    assert all(list(cell.scores) == ["mnist", "svhn"] for cell in cells)
    assert all(cell.tasks == ("mnist", "svhn", "eurosat") for cell in cells)


# --- killed, and started again ---

# A sweep that goes on when the program that has started it ends.
DRIVER = f"""
import os, sys
if child := os.fork():
    print(child)
    raise SystemExit(0)
from featcal_fusionbench.sweeps import sweep
sweep.program = lambda: {FAKE!r}
from featcal_fusionbench.sweeps.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not happen in time"
        time.sleep(0.05)


@pytest.mark.cli
@pytest.mark.slow
def test_a_sweep_that_is_killed_redoes_the_cell_it_was_in_and_no_other(
    table: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_forked(DRIVER, *table, cwd=Path.cwd(), env={"FAKE_SLEEP": "task_arithmetic/none"})
    process = int(started.stdout)
    sleeper = Path("out/cells/task_arithmetic/none/seed0/process.json")
    wait_for(sleeper.exists)
    # meanwhile no other sweep may work there
    assert main(table) == 2
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not is_alive(process))
    orphan = json.loads(sleeper.read_text())["pid"]
    assert Path(f"/proc/{orphan}").exists() or sys.platform != "linux"

    before = ran()
    assert before == ALL[:5]
    assert main(table) == 0
    assert ran(len(before)) == ALL[4:]
    wait_for(lambda: not is_alive(orphan))  # it was ended, not left to write into the same place


def is_alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- refused before any work ---


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    assert not ran()
    return capsys.readouterr().err


def test_a_held_directory_is_refused(table: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*table, "--only", "merger=base"]) == 0
    Path("fake.log").unlink()
    with FileLock("out/sweep.lock"):
        assert "another sweep is at work" in refused(table, capsys)


@pytest.mark.parametrize("other", [["--size", "full"], ["--tasks", "mnist"], ["seed=3"]])
def test_a_directory_of_another_sweep_is_refused(
    table: list[str], other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*table, "--only", "merger=base"]) == 0
    Path("fake.log").unlink()
    assert "holds another sweep (pico, size smoke)" in refused([*table, *other], capsys)


def test_a_directory_that_holds_other_things_is_refused(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").touch()
    assert "holds no sweep" in refused(table, capsys)


def test_results_that_cannot_be_read_are_named_together(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*table, "--only", "merger=base,regmean,calibrator=none"]) == 0
    Path("fake.log").unlink()
    half, foreign = (Path(f"out/cells/{row}/none/seed0/cell.json") for row in ("base", "regmean"))
    half.write_text(half.read_text()[:100])
    foreign.write_text('{"format": "something else"}')
    message = refused(table, capsys)
    assert str(half) in message and "not a complete JSON file" in message
    assert str(foreign) in message and "is not the result of a table's cell" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launcher", "ray"], "pip install hydra-ray-launcher"),
        (["--jobs", "2"], "the launcher local has no such setting"),
        (["--only", "merger=regmeen"], "Did you mean regmean"),
        (["modelpool.modelz=3"], "cannot be composed"),
    ],
)
def test_wrong_arguments_are_refused(
    table: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ray" in arguments and find_spec("ray"):
        pytest.skip("it is installed here")
    assert message in refused([*table, *arguments], capsys)


def test_all_that_is_missing_is_named_before_any_work(
    table: list[str], capsys: pytest.CaptureFixture[str], pico: Pico
) -> None:
    message = refused(
        [
            *table,
            "modelpool.models.svhn=someone/expert",
            "modelpool.models.mnist=/no/such/place",
            "modelpool.train_datasets.mnist.path=someone/data",
        ],
        capsys,
    )
    assert "3 models or data sets are missing" in message
    assert "model someone/expert: not in the hub's cache" in message
    assert "HF_HUB_OFFLINE is set. Set modelpool.models.svhn=PATH-OR-ID" in message
    assert "model /no/such/place: there is no such file" in message
    assert "Set modelpool.train_datasets.mnist.path=PATH-OR-ID" in message
    # given elsewhere, all is well
    assert main([*table, f"modelpool.models.svhn={pico.expert('svhn')}"]) == 0


def test_dry_run_lists_cells_cost_and_sources_and_runs_nothing(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*table, "--only", "merger=task_arithmetic,calibrator=none"]) == 0
    count = len(ran())
    capsys.readouterr()
    assert main([*table, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert len(ran()) == count
    done = next(line for line in out.splitlines() if "task_arithmetic/none/seed0" in line)
    assert "done" in done and "≈" not in done
    waiting = next(line for line in out.splitlines() if "regmean/none/seed0" in line)
    assert "pending" in waiting and "≈" in waiting
    assert "1 done, 6 pending" in out and "0 to download; 0 missing" in out
    assert "≈ was not measured" in out


# --- what is in the caches ---


def test_the_hubs_cache_and_the_data_sets_cache_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config
    from huggingface_hub import constants

    hub, data = tmp_path / "hub", tmp_path / "datasets"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", data)
    snapshot = hub / "models--some--expert/snapshots/abc"
    snapshot.mkdir(parents=True)
    (hub / "models--some--expert/refs").mkdir()
    (hub / "models--some--expert/refs/main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    prepared = data / "some___images/default/0.0.0/fff"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text('{"splits": {"train": {}, "contrast": {}}}')

    def place(kind: Kind, id_: str, split: str = "") -> Place:
        (found,) = check_sources([Source(kind, id_, split=split, setting="modelpool.x")])
        return found.place

    monkeypatch.setattr(
        "featcal_fusionbench.sweeps.preflight.try_to_load_from_cache",
        lambda repo, name: str(snapshot / name) if (snapshot / name).exists() else None,
    )
    assert place(Kind.MODEL, "some/expert") is Place.MISSING  # a configuration without weights
    assert place(Kind.PROCESSOR, "some/expert") is Place.CACHED
    (snapshot / "model.safetensors").touch()
    assert place(Kind.MODEL, "some/expert") is Place.CACHED
    assert place(Kind.DATASET, "some/images", "contrast") is Place.CACHED
    assert place(Kind.DATASET, "some/images", "train[:10]") is Place.CACHED
    assert place(Kind.DATASET, "some/images", "motion_blur") is Place.MISSING
    assert place(Kind.DATASET, "some/others") is Place.MISSING
    assert check_sources([Source(Kind.UNKNOWN, "some.loader")]) == []


def test_the_hub_is_asked_once_per_repository_and_not_after_it_was_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from featcal_fusionbench.sweeps import preflight

    asked: list[str] = []

    def model_info(self: object, repository: str, **_: object) -> object:
        asked.append(repository)
        if repository == "a/away":
            raise ConnectionError("no route")
        sizes = {"model.safetensors": 100 * 2**20, "pytorch_model.bin": 99 * 2**20, "x.json": 5}
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        )

    monkeypatch.setattr(preflight.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(preflight.HfApi, "model_info", model_info)
    found = check_sources(
        Source(Kind.MODEL, name, setting=f"modelpool.models.{index}")
        for index, name in enumerate(["a/there", "a/there", "a/away", "a/third"])
    )
    assert asked == ["a/there", "a/away"]
    assert [item.place for item in found] == [Place.HUB, Place.MISSING, Place.MISSING]
    assert found[0].bytes == 100 * 2**20 + 5
    assert found[0].settings == ("modelpool.models.0", "modelpool.models.1")
    with pytest.raises(SweepError, match="2 models or data sets .*(?s:.*)ConnectionError"):
        require_all(found)


# --- launchers ---


@pytest.mark.parametrize(
    ("launcher", "jobs"), [("joblib", ["--jobs", "2"]), ("submitit_local", [])]
)
@pytest.mark.slow
def test_other_launchers_run_the_same_cells(
    table: list[str], launcher: str, jobs: list[str]
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    only = ["--only", "merger=task_arithmetic,base"]
    assert main([*table, *only, "--launcher", launcher, *jobs]) == 0
    assert sorted(ran()) == [
        "base/none/seed0/run",
        "task_arithmetic/featcal/seed0/run",
        "task_arithmetic/none/seed0/run",
    ]
    assert len(collect("out")) == 3


def test_parallel_cells_get_a_gpu_each(
    table: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from featcal_fusionbench.sweeps.directory import Job
    from featcal_fusionbench.sweeps.job import _device

    assert main([*table, "--only", "merger=base"]) == 0
    job = Job.read(Path("out/cells/base/none/seed0/job.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with _device(tmp_path, job) as first, _device(tmp_path, job) as second:
        assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"3", "5"}
    with _device(tmp_path, job) as again:
        assert again["CUDA_VISIBLE_DEVICES"] == "3"
    (run,) = job.plan.runs
    several = replace(run, others=(*run.others, "fabric.devices=2"))
    plan = replace(job.plan, runs=(several,))
    with _device(tmp_path, replace(job, plan=plan)) as left_alone:
        assert left_alone == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with _device(tmp_path, job) as alone:
        assert alone == {}


def test_cells_run_in_this_process_where_that_is_asked_for(
    conf: None,
    pico: Pico,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sweep_module, "program", lambda: pytest.fail("a program was looked for"))
    monkeypatch.setattr(sweep_module.Sweep, "write_table", lambda *_: None)
    only = ["--only", "merger=base", "--launcher", "in_process"]
    before = HydraConfig.instance().cfg
    assert main([*ARGUMENTS, *only]) == 0
    assert HydraConfig.instance().cfg is before
    (cell,) = collect("out")
    assert tuple(cell.scores) == pico.tasks and cell.seconds is not None
    assert f"  {cell.command} path.log_dir=" in capsys.readouterr().out


# --- the real command ---


@pytest.mark.cli
@pytest.mark.slow
def test_a_row_through_the_real_command(conf: None, pico: Pico) -> None:
    """Merge and save, calibrate what was saved; the printed command gives the same scores."""
    only = ["--only", "merger=task_arithmetic,calibrator=none", "--launcher", "in_process"]
    assert main([*ARGUMENTS, *only]) == 0  # a program less to start
    assert main([*ARGUMENTS, "--only", "merger=task_arithmetic,calibrator=featcal"]) == 0
    text = Path("out/table.md").read_text()
    assert "Task Arithmetic" in text and "FeatCal" in text
    assert {"table.tex", "table.csv", "table.png"} <= {path.name for path in Path("out").iterdir()}
    merged, calibrated = collect("out")
    if merged.calibrator == "featcal":
        merged, calibrated = calibrated, merged
    assert merged.seconds is not None and calibrated.seconds is not None
    assert calibrated.peak_memory_bytes is not None and calibrated.machine is not None
    assert {model.role for model in calibrated.models} == {"base", "expert", "merged"}
    source = next(model.source for model in calibrated.models if model.role == "merged")
    assert Path(source) == Path("out/models/task_arithmetic/none/seed0").absolute()
    assert tuple(calibrated.scores) == pico.tasks and calibrated.metrics["mnist"] == "accuracy"
    assert calibrated.scores != merged.scores

    program, flag, directory, *overrides = shlex.split(calibrated.command)
    assert (program, flag, directory) == (
        "fusion_bench",
        "--config-dir",
        str(Path("conf").absolute()),
    )
    own = {*pico.overrides(), "print_config=false"}
    report = pico.run_program(*(text for text in overrides if text not in own))["report"]
    assert {task: report[task]["accuracy"] for task in pico.tasks} == calibrated.scores


@pytest.mark.cli
@pytest.mark.slow
def test_the_script_of_a_checkout_is_the_command(in_tmp_path: Path) -> None:
    script = ROOT / "scripts/reproduce_table.py"
    finished = subprocess.run(
        [sys.executable, str(script), "embedded_image", "--list"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert "task_arithmetic " in finished.stdout and "featcal " in finished.stdout
