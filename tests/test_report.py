"""The report package: files, run reports, tables, figures, progress."""

from __future__ import annotations

import ast
import errno
import io
import json
import math
import os
import stat
import struct
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import TimeRemainingColumn

import featcal_fusionbench.report as report_package
from featcal_fusionbench.baselines import (
    ProbSurgerySettings,
    RepresentationSurgerySettings,
    SurgeryResult,
    TaskSurgery,
)
from featcal_fusionbench.calibration.results import (
    BlockDrift,
    CalibrationResult,
    ModuleResult,
    PhaseCost,
    SkippedModule,
    TaskDrift,
)
from featcal_fusionbench.calibration.settings import CalibrationSettings
from featcal_fusionbench.report import (
    FeatCalReport,
    Machine,
    MergeReport,
    ModelIdentity,
    PlanEstimate,
    PlanRow,
    ProbSurgeryReport,
    ReportError,
    RepresentationSurgeryReport,
    RichProgress,
    RunReport,
    TaskData,
    UnwritableDirectoryError,
    atomic_file,
    collect_versions,
    compare_drift,
    describe_machine,
    drift_figure,
    mean_final_drift,
    module_table,
    plan_table,
    read_json,
    render_text,
    report_name,
    require_writable,
    scalars,
    summary_table,
    worsened,
    worsening_warning,
    write_figure,
    write_json,
    write_text,
)
from featcal_fusionbench.report import files as files_module
from featcal_fusionbench.report.codec import dumps
from featcal_fusionbench.report.text import (
    common_prefix,
    format_bytes,
    format_change,
    format_duration,
    relative_name,
)

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
LAYERS = "vision_model.encoder.layers"


def drift(task: str, final: float, blocks: int = 0, parent: str = LAYERS) -> TaskDrift:
    shape = [BlockDrift(i, f"{parent}.{i}", 0.1 * (i + 1), 0.1, 0.1 * i) for i in range(blocks)]
    return TaskDrift(task, 16, final, tuple(shape))


def module(name: str, **changes: Any) -> ModuleResult:
    healthy = ModuleResult(name, "linear", 0, (8, 4), 512, 1.5e3, 2e-7, 0.0, 0.031, 0.2)
    return replace(healthy, **changes)


def full_report(**changes: Any) -> FeatCalReport:
    values: dict[str, Any] = dict(
        status="complete",
        settings=CalibrationSettings(include=("mlp",), ridge_lambda=0.25),
        started=START,
        finished=START + timedelta(seconds=312),
        versions={"torch": "2.13.0"},
        machine=Machine(system="Linux", cpu="x", cores=4, threads=2, memory_bytes=None),
        command="fusion_bench method=featcal",
        merger={"name": "task_arithmetic", "scaling_factor": 0.3},
        models=(
            ModelIdentity(role="expert", name="svhn", source="a/b", sha256="00", parameters=7),
        ),
        data=(
            TaskData(
                task="svhn",
                source="d",
                split="train",
                available=900,
                requested=256,
                used=256,
                indices=(5, 3),
            ),
            TaskData(task="dtd", source="d", split="train", available=200, requested=256, used=200),
        ),
        result=CalibrationResult(
            (
                module(f"{LAYERS}.0.mlp.fc1"),
                module(f"{LAYERS}.0.mlp.fc2", calibrated=False, condition=None, note="no tokens"),
            ),
            (SkippedModule("head", "Linear", "outside all blocks"),),
            (PhaseCost("solves", 1.0, 2.0, 2**30),),
        ),
        drift_before=(drift("svhn", 0.5, 3), drift("dtd", 0.4, 3)),
        drift_after=(drift("svhn", 0.2, 3), drift("dtd", 0.6, 3)),
        phases=(
            PhaseCost("models", 12.0, 10.0, 2**31),
            PhaseCost("calibration", 300.0, 490.0, 3 * 2**30, 2**30),
        ),
        outputs={"report": Path("/out/report.json")},
    )
    return FeatCalReport(**(values | changes))


# --- files -----------------------------------------------------------------------------------


def test_atomic_write_replaces_content_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    write_text(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    assert os.listdir(path.parent) == ["a.txt"]


def test_atomic_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "atomic", "")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_while_writing_leaves_the_old_file_alone(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(error), atomic_file(path) as file:
        file.write(b"ne")
        assert len(os.listdir(tmp_path)) == 2  # so the temporary file is in the same directory
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failing_disk_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module.os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_file_reaches_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            files_module.os,
            name,
            lambda *args, _name=name, _original=original: (calls.append(_name), _original(*args)),
        )
    write_text(tmp_path / "a", "x")
    assert calls == ["fsync", "replace"]


def test_require_writable_makes_the_directory_and_leaves_no_trace(tmp_path: Path) -> None:
    assert require_writable(tmp_path / "a" / "b", "x") == tmp_path / "a" / "b"
    assert os.listdir(tmp_path / "a" / "b") == []


def test_require_writable_names_directory_and_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnwritableDirectoryError, match="Set method.report_dir to") as caught:
            require_writable(directory, "method.report_dir")
        assert str(directory) in str(caught.value)


def test_require_writable_tries_a_real_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files_module.os, "replace", read_only)
    with pytest.raises(UnwritableDirectoryError, match="Read-only file system"):
        require_writable(tmp_path, "x")
    assert os.listdir(tmp_path) == []


def test_json_is_strict_and_knows_what_to_do_with_unusual_values(tmp_path: Path) -> None:
    value = {
        1: math.nan,
        "up": math.inf,
        "down": -math.inf,
        "path": Path("a/b"),
        "tuple": (1, True, None),
        "empty": [[], {}],
        "bad file name": "\udcff",
    }
    write_json(tmp_path / "a.json", value)

    def refuse(token: str) -> None:
        raise AssertionError(token)

    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse) == {
        "1": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "path": "a/b",
        "tuple": [1, True, None],
        "empty": [[], {}],
        "bad file name": "\udcff",
    }


def test_tokens_that_are_not_json_are_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps([math.nan])
    (tmp_path / "a.json").write_text("[Infinity]")
    with pytest.raises(ReportError, match="a.json is not a complete .*Infinity is not JSON"):
        read_json(tmp_path / "a.json")


def test_json_keeps_a_list_of_numbers_on_one_line(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"indices": list(range(256)), "nested": [[1], [2]]})
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert len(lines) == 7
    assert lines[1].startswith('  "indices": [0, 1, 2') and lines[1].endswith("255],")


# --- run report ------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False)
SHORT = st.text(max_size=8)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SHORT,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3)
        | st.dictionaries(SHORT, inner, max_size=3)
    ),
    max_leaves=6,
)
COUNTS = st.integers(min_value=0)


def tuples_of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=2).map(tuple)


BLOCKS = st.builds(BlockDrift, COUNTS, SHORT, NUMBERS, NUMBERS, NUMBERS)
DRIFTS = tuples_of(st.builds(TaskDrift, SHORT, COUNTS, NUMBERS, tuples_of(BLOCKS)))
PHASES = tuples_of(
    st.builds(PhaseCost, SHORT, NUMBERS, NUMBERS, COUNTS, st.none() | COUNTS),
)
MODULES = st.builds(
    ModuleResult,
    SHORT,
    st.sampled_from(["linear", "layer_norm", "rms_norm"]),
    st.none() | COUNTS,
    tuples_of(COUNTS),
    COUNTS,
    st.none() | NUMBERS,
    st.none() | NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.booleans(),
    SHORT,
)
TIMES = st.datetimes(timezones=st.just(START.tzinfo))
REPORTS = st.builds(
    FeatCalReport,
    status=st.sampled_from(["complete", "interrupted", "failed", "planned"]),
    settings=st.builds(
        CalibrationSettings,
        ridge_lambda=st.floats(0, 1e9),
        seed=COUNTS,
        include=tuples_of(st.sampled_from(["a|b", "[0-9]+"])),
    ),
    started=TIMES,
    finished=st.none() | TIMES,
    versions=st.dictionaries(SHORT, SHORT, max_size=2),
    machine=st.none()
    | st.builds(
        Machine,
        system=SHORT,
        cpu=SHORT,
        cores=COUNTS,
        threads=COUNTS,
        memory_bytes=st.none() | COUNTS,
        gpus=tuples_of(SHORT),
    ),
    command=SHORT,
    merger=st.dictionaries(SHORT, FREE, max_size=3),
    models=tuples_of(
        st.builds(
            ModelIdentity,
            role=st.sampled_from(["base", "expert", "merged"]),
            name=SHORT,
            source=SHORT,
            sha256=st.none() | SHORT,
            parameters=st.none() | COUNTS,
        )
    ),
    data=tuples_of(
        st.builds(
            TaskData,
            task=SHORT,
            source=SHORT,
            split=SHORT,
            available=st.none() | COUNTS,
            requested=COUNTS,
            used=COUNTS,
            indices=tuples_of(COUNTS),
            heldout_indices=tuples_of(COUNTS),
            note=SHORT,
        )
    ),
    result=st.none()
    | st.builds(
        CalibrationResult,
        tuples_of(MODULES),
        tuples_of(st.builds(SkippedModule, SHORT, SHORT, SHORT)),
        PHASES,
    ),
    drift_before=DRIFTS,
    drift_after=DRIFTS,
    phases=PHASES,
    warnings=tuples_of(SHORT),
    error=SHORT,
    outputs=st.dictionaries(SHORT, SHORT, max_size=2),
)


@given(REPORTS)
@hypothesis_settings(max_examples=40, deadline=None)
def test_any_report_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, report: RunReport
) -> None:
    path = tmp_path_factory.mktemp("report") / "report.json"
    report.write(path)
    assert RunReport.read(path) == report


def test_floats_that_are_no_numbers_come_back_as_floats(tmp_path: Path) -> None:
    result = CalibrationResult((module("a", condition=math.inf, residual=math.nan),))
    full_report(result=result).write(tmp_path / "r.json")
    back = RunReport.read(tmp_path / "r.json").result
    assert back is not None
    assert back.modules[0].condition == math.inf
    assert isinstance(back.modules[0].residual, float) and math.isnan(back.modules[0].residual)


def test_report_file_can_be_read_without_this_package(tmp_path: Path) -> None:
    full_report().write(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert list(content)[:4] == ["format", "format_version", "method", "status"]
    assert content["settings"] == CalibrationSettings(include=("mlp",), ridge_lambda=0.25).as_dict()
    assert content["summary"]["worsened"] == ["dtd"]
    assert content["summary"]["mean_drift_before"] == pytest.approx(0.45)
    assert content["summary"]["wall_seconds"] == 312
    assert content["data"][0]["indices"] == [5, 3]
    assert content["outputs"] == {"report": "/out/report.json"}


def change_format_version(content: dict[str, Any]) -> None:
    content["format_version"] = 99


def change_format(content: dict[str, Any]) -> None:
    content["format"] = "something else"


def make_lambda_negative(content: dict[str, Any]) -> None:
    content["settings"]["ridge_lambda"] = -1


def make_count_a_boolean(content: dict[str, Any]) -> None:
    content["result"]["modules"][1]["rows"] = True


def make_name_a_number(content: dict[str, Any]) -> None:
    content["models"][0]["name"] = 3


def make_status_unknown(content: dict[str, Any]) -> None:
    content["status"] = "fine"


def make_time_unreadable(content: dict[str, Any]) -> None:
    content["started"] = "yesterday"


def remove_started(content: dict[str, Any]) -> None:
    del content["started"]


def add_entry(content: dict[str, Any]) -> None:
    content["data"][0]["colour"] = "red"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (change_format_version, "format version 99.*reads version 2.*or run again"),
        (change_format, "not a FeatCal run report: give the path"),
        (make_lambda_negative, "settings: ridge_lambda=-1.* again"),
        (make_count_a_boolean, r"modules\[1\]\.rows should be a whole number, not True.*run again"),
        (make_name_a_number, r"models\[0\]\.name should be a string, not 3"),
        (make_status_unknown, "status should be one of 'complete'.*not 'fine'"),
        (make_time_unreadable, "started should be an ISO 8601 time, not 'yesterday'"),
        (remove_started, "the report.started is missing"),
        (add_entry, r"data\[0\] has unknown entries: colour"),
    ],
)
def test_damaged_report_is_refused_with_file_and_remedy(
    tmp_path: Path, damage: Any, complaint: str
) -> None:
    path = tmp_path / "r.json"
    full_report().write(path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ReportError, match=complaint) as caught:
        RunReport.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b'{"format": "featcal-run-rep', b"\x80\x04N.", b'{"a": NaN}', b"[1]", b"3"]
)
def test_foreign_or_half_written_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match="r.json is not a"):
        RunReport.read(path)


def test_time_without_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="finished needs a time zone"):
        full_report(finished=datetime(2026, 1, 2))


def test_derived_numbers_of_a_report() -> None:
    report = full_report()
    assert report.mean_drift_after == pytest.approx(0.4)
    counts = (report.modules_calibrated, report.modules_kept, report.modules_skipped)
    assert counts == (1, 1, 1)
    assert (report.wall_seconds, report.cpu_seconds) == (312, 500)
    assert (report.peak_memory_bytes, report.peak_device_bytes) == (3 * 2**30, 2**30)


def test_costs_of_an_interrupted_report_come_from_the_loop() -> None:
    report = full_report(status="interrupted", finished=None, phases=())
    assert (report.wall_seconds, report.cpu_seconds) == (1.0, 2.0)
    empty = replace(report, result=None)
    assert empty.wall_seconds is None and empty.peak_memory_bytes is None


def test_warning_about_worse_tasks_is_added_once() -> None:
    report = full_report(warnings=("first",))
    assert report.all_warnings[0] == "first" and len(report.all_warnings) == 2
    assert replace(report, warnings=report.all_warnings).all_warnings == report.all_warnings


def test_versions_and_machine() -> None:
    versions = collect_versions()
    assert list(versions)[:3] == ["python", "featcal-fusionbench", "fusion-bench"]
    assert versions["torch"][0].isdecimal() and versions["safetensors"] != "not installed"
    machine = describe_machine()
    assert machine.cores >= 1 and machine.threads >= 1 and machine.cpu
    assert machine.memory_bytes is None or machine.memory_bytes > 2**28


# --- drift -----------------------------------------------------------------------------------


def test_worsened_finds_growth_and_nothing_else() -> None:
    before = (drift("up", 0.5), drift("down", 0.5), drift("same", 0.5), drift("gone", 0.5))
    after = (drift("same", 0.5 * (1 + 1e-7)), drift("down", 0.4), drift("up", 0.51))
    assert [change.task for change in worsened(before, after)] == ["up"]
    assert [change.task for change in compare_drift(before, after)] == ["up", "down", "same"]


def test_drift_that_is_no_number_counts_as_worse() -> None:
    assert worsened((drift("a", 0.5),), (drift("a", math.nan),))
    assert worsened((drift("a", 0.0),), (drift("a", 1e-3),))


def test_warning_says_which_tasks_and_what_to_try() -> None:
    before, after = (drift("a", 0.5), drift("b", 0.5)), (drift("a", 0.6), drift("b", 0.1))
    text = worsening_warning(before, after, CalibrationSettings(ridge_lambda=3.0, n_samples=8))
    assert text is not None
    assert "1 of 2 tasks (a 0.5000 to 0.6000)" in text
    assert "ridge_lambda (now 3;" in text and "n_samples, now 8" in text
    assert worsening_warning(before, before, CalibrationSettings()) is None


def test_mean_drift_counts_each_task_once() -> None:
    assert mean_final_drift((drift("a", 0.2), drift("b", 0.6))) == pytest.approx(0.4)
    assert mean_final_drift(()) is None


def test_scalars_have_flat_names_and_leave_out_what_was_not_measured() -> None:
    values = scalars(full_report())
    assert values["featcal/drift_before/svhn"] == 0.5
    assert values["featcal/drift_after/dtd"] == 0.6
    assert values["featcal/seconds"] == 312 and values["featcal/peak_memory_gib"] == 3
    assert values["featcal/tasks_worsened"] == 1 and values["featcal/max_condition"] == 1.5e3
    assert all(type(value) is float for value in values.values())
    planned = scalars(
        FeatCalReport(status="planned", settings=CalibrationSettings(), started=START)
    )
    assert planned == {}


def surgery_report(**changes: Any) -> ProbSurgeryReport:
    full = full_report()
    values: dict[str, Any] = dict(
        settings=ProbSurgerySettings(train_on="test", kl_weight=0.5),
        status="complete",
        started=START,
        labels=("trained on test inputs",),
        data=full.data,
        phases=full.phases,
        result=SurgeryResult(
            (
                TaskSurgery(
                    task="svhn", inputs=256, rows=256, width=512, parameters=9, steps=500,
                    loss_start=0.5, loss_end=0.25, heldout_start=0.6, heldout_end=0.3,
                ),
                TaskSurgery(
                    task="dtd", inputs=200, rows=200, width=512, parameters=9, steps=500,
                    loss_start=0.4, loss_end=0.5,
                ),
            )
        ),
    )  # fmt: skip
    return ProbSurgeryReport(**(values | changes))


def test_every_method_s_report_comes_back_as_its_class(tmp_path: Path) -> None:
    plain = RepresentationSurgeryReport(
        status="failed", started=START, settings=RepresentationSurgerySettings(steps=3)
    )
    merged = MergeReport(status="complete", started=START, merged_model="a/b")
    for report in (full_report(), surgery_report(), plain, merged):
        path = tmp_path / report_name(report.method)
        report.write(path)
        back = RunReport.read(path)
        assert back == report and type(back) is type(report)
        content = json.loads(path.read_text())
        assert content["method"] == report.method
        assert content["settings"] == report.settings.as_dict()
    assert {path.name for path in tmp_path.iterdir()} == {
        "featcal_report.json",
        "merge_only_report.json",
        "prob_surgery_report.json",
        "representation_surgery_report.json",
    }


def test_settings_of_another_method_are_refused(tmp_path: Path) -> None:
    full_report().write(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    for method, complaint in (("prob_surgery", "unknown entries"), ("other", "method should be")):
        content["method"] = method
        (tmp_path / "r.json").write_text(json.dumps(content))
        with pytest.raises(ReportError, match=complaint):
            RunReport.read(tmp_path / "r.json")


def test_scalars_of_surgery_and_of_the_merger_alone() -> None:
    values = scalars(surgery_report())
    assert values["prob_surgery/loss_start/svhn"] == 0.5
    assert values["prob_surgery/loss_end/dtd"] == 0.5
    assert values["prob_surgery/seconds"] == 312
    merged = MergeReport(status="complete", started=START, phases=full_report().phases)
    assert scalars(merged)["merge_only/peak_memory_gib"] == 3


# --- tables ----------------------------------------------------------------------------------


def cells(text: str, first: str) -> list[str]:
    """The cells of the one row that starts with ``first``."""
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [first]]
    return row


def assert_fits(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text and "…" not in text


def test_summary_table_of_surgery() -> None:
    text = render_text(summary_table(surgery_report()))
    assert_fits(text)
    assert cells(text, "svhn") == ["svhn", "256", "0.5000", "0.2500", "0.6000", "0.3000", "-50.0%"]
    assert cells(text, "dtd") == [
        *("dtd", "200", "of", "256"), *("0.4000", "0.5000", "-", "-", "+25.0%", "worse"),
    ]  # fmt: skip
    assert "note: trained on test inputs" in text and "modules:" not in text
    interrupted = render_text(summary_table(surgery_report(status="interrupted", result=None)))
    assert cells(interrupted, "svhn") == ["svhn", "256", *"-----"]


def test_summary_table_of_the_merger_alone() -> None:
    report = MergeReport(status="failed", started=START, error="no memory")
    assert render_text(summary_table(report)) == "merge_only failed\nerror: no memory\n"


def test_summary_table_in_a_log_file() -> None:
    text = render_text(summary_table(full_report()))
    assert_fits(text)
    assert cells(text, "svhn") == ["svhn", "256", "16", "0.5000", "0.2000", "-60.0%"]
    assert cells(text, "dtd") == [
        *("dtd", "200", "of", "256", "16"),
        *("0.4000", "0.6000", "+50.0%", "worse"),
    ]
    assert cells(text, "mean") == ["mean", "0.4500", "0.4000", "-11.1%"]
    assert "modules: 1 calibrated, 1 kept after a failure, 1 skipped by plan" in text
    assert "cost: 0:05:12 elapsed, 0:08:20 CPU, peak memory 3.0 GiB, on the GPU 1.0 GiB" in text
    assert "report: /out/report.json" in text
    assert "warning: Held-out drift grew on 1 of 2 tasks" in text


def test_summary_table_colours_what_got_worse() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    with console.capture() as capture:
        console.print(summary_table(full_report()))
    assert "\x1b[1;31m+50.0% worse" in capture.get()
    assert "\x1b[32m-60.0%" in capture.get().replace(" ", "")


def test_summary_table_of_a_run_that_failed_early() -> None:
    report = full_report(status="failed", error="ForwardError: [boom]", drift_after=(), result=None)
    text = render_text(summary_table(report))
    assert "FeatCal failed" in text and "error: ForwardError: [boom]" in text
    assert cells(text, "svhn")[-3:] == ["0.5000", "-", "-"]
    assert "worse" not in text


def test_summary_table_without_drift_still_shows_the_samples() -> None:
    text = render_text(summary_table(full_report(drift_before=(), drift_after=())))
    assert cells(text, "svhn") == ["svhn", "256", "0", "-", "-", "-"]


def test_names_in_brackets_are_not_taken_for_markup() -> None:
    report = full_report(data=(), drift_before=(drift("glue[red]", 0.5),), drift_after=())
    assert "glue[red]" in render_text(summary_table(report))


def test_module_table() -> None:
    text = render_text(
        module_table(
            CalibrationResult(
                (
                    module("decoder.block.11.layer.1.EncDecAttention.o", damping=1e-4, block=23),
                    module(
                        "decoder.block.11.layer.2.DenseReluDense.wi_0", condition=None, block=23
                    ),
                    module(
                        "lm_head",
                        block=None,
                        calibrated=False,
                        note="no tokens reached it",
                    ),
                )
            )
        )
    )
    assert_fits(text)
    assert cells(text, "decoder.block.11.layer") == ["decoder.block.11.layer"]
    assert cells(text, "1.EncDecAttention.o")[1:] == [
        *("512", "1.5e+03", "2.0e-07", "1.0e-04", "3.10%")
    ]
    assert cells(text, "2.DenseReluDense.wi_0")[2:4] == ["-", "2.0e-07"]
    assert cells(text, "lm_head")[-1] == "kept"
    assert "kept: lm_head: no tokens reached it" in text


def test_module_table_names_each_block_once() -> None:
    names = ("self_attn.q_proj", "mlp.fc1", "mlp.fc2")
    modules = (module(f"{LAYERS}.{i}.{name}", block=i) for i in range(3) for name in names)
    text = render_text(module_table(CalibrationResult(tuple(modules))))
    assert_fits(text)
    assert [line.strip() for line in text.splitlines() if LAYERS in line] == [
        f"{LAYERS}.{i}" for i in range(3)
    ]
    assert text.count("  self_attn.q_proj ") == 3


def clip_rows(blocks: int) -> list[PlanRow]:
    return [
        PlanRow(
            block=f"{LAYERS}.{i}",
            module=f"{LAYERS}.{i}.{name}",
            kind="linear",
            shape=(3072, 768),
            bias=name == "mlp.fc1",
            note="class token" if i == blocks - 1 else "",
        )
        for i in range(blocks)
        for name in ("self_attn.out_proj", "mlp.fc1")
    ]


def test_plan_table_shows_blocks_that_are_alike_once() -> None:
    skipped = [SkippedModule(f"norm{i}", "LayerNorm", "outside all blocks") for i in range(5)]
    estimate = PlanEstimate(seconds=42, memory_bytes=2**31, available_bytes=2**35, flops=2e12,
                            holding="waiting forwards hold little")  # fmt: skip
    text = render_text(plan_table(clip_rows(12), skipped, estimate))
    assert_fits(text)
    assert "24 modules to calibrate, 5 skipped" in text
    assert f"{LAYERS}.0 to 10 (11 blocks alike)" in text
    assert f"\n{LAYERS}.11\n" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(" mlp.fc1")]
    plain = ["mlp.fc1", "linear", "3072", "x", "768", "bias"]
    assert rows == [plain, [*plain, "class", "token"]]
    assert text.count("bias") == 2
    assert "skipped, outside all blocks (5): norm0, norm1, norm2 and 2 more" in text
    assert "estimate: about 42.0 s, peak memory about 2.0 GiB, 32.0 GiB free, 2 TFLOP" in text
    assert "memory: waiting forwards hold little" in text


def test_plan_table_can_list_every_block() -> None:
    text = render_text(plan_table(clip_rows(12), every_block=True))
    assert text.count(" mlp.fc1 ") == 12 and "alike" not in text


def test_plan_table_keeps_apart_what_lies_outside_blocks_or_in_other_stacks() -> None:
    rows = [
        PlanRow("", "pre_norm", "layer_norm", (8,), True),
        PlanRow("encoder.block.0", "encoder.block.0.wi", "linear", (8, 8), False),
        PlanRow("decoder.block.0", "decoder.block.0.wi", "linear", (8, 8), False),
    ]
    text = render_text(plan_table(rows))
    assert "outside all blocks" in text and " pre_norm " in text
    assert "\nencoder.block.0\n" in text and "\ndecoder.block.0\n" in text


def test_how_numbers_and_names_are_written() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 * 2**30, 2**41)] == [
        *("5 B", "1.5 KiB", "3.0 GiB", "2.0 TiB")
    ]
    assert [format_duration(s) for s in (3.14, 59.97, 3725, math.inf)] == [
        *("3.1 s", "0:01:00", "1:02:05", "-")
    ]
    assert [format_change(*pair) for pair in ((2, 1), (1, 1.5), (0, 1), (1, math.nan))] == [
        *("-50.0%", "+50.0%", "-", "-")
    ]
    assert relative_name("a.b.c", "a.b") == "c" and relative_name("a.bc", "a.b") == "a.bc"
    assert common_prefix(["a.b.c", "a.b.d"]) == "a.b" and common_prefix(["a.b"]) == "a"
    assert common_prefix(["a.b", "c.b"]) == "" and common_prefix([]) == ""


# --- figures ---------------------------------------------------------------------------------


def texts(figure: Figure) -> list[str]:
    figure.canvas.draw()
    return [
        text.get_text()
        for axes in figure.axes
        for text in (*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts)
    ]


@pytest.mark.parametrize(
    ("tasks", "blocks", "axes"), [(1, 1, 2), (20, 80, 2), (3, 0, 1), (0, 0, 0)]
)
def test_figures_of_odd_sizes_are_written_as_png(
    tmp_path: Path, tasks: int, blocks: int, axes: int
) -> None:
    before = [drift(f"task{i}", 0.5 + i / 100, blocks) for i in range(tasks)]
    after = [drift(f"task{i}", 0.25 + i / 100, blocks) for i in range(tasks)]
    figure = drift_figure(before, after)
    assert len(figure.axes) == axes
    assert {f"task{i}" for i in range(tasks)} <= set(texts(figure))
    write_figure(tmp_path / "f.png", figure, dpi=100)
    content = (tmp_path / "f.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1200 and height >= 500
    assert os.listdir(tmp_path) == ["f.png"]


def test_figure_draws_means_and_range_over_tasks() -> None:
    def task(name: str, total: float, local: float) -> TaskDrift:
        block = BlockDrift(0, "layers.0", total, local, total - local)
        return TaskDrift(name, 16, total, (block,))

    figure = drift_figure([task("a", 0.2, 0.1), task("b", 0.6, 0.3)])
    left = figure.axes[0]
    assert [np.asarray(line.get_ydata()).tolist() for line in left.lines] == [
        [pytest.approx(0.4)],
        [pytest.approx(0.2)],
    ]
    band = left.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (pytest.approx(0.2), pytest.approx(0.6))


def test_figure_marks_the_boundary_between_encoder_and_decoder() -> None:
    blocks = [
        BlockDrift(i, f"{stack}.block.{i % 3}", 0.1, 0.1, 0.0)
        for i, stack in enumerate(["encoder"] * 3 + ["decoder"] * 3)
    ]
    figure = drift_figure([TaskDrift("a", 16, 0.3, tuple(blocks))])
    left = figure.axes[0]
    assert [text.get_text() for text in left.texts] == ["encoder", "decoder"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["0", "1", "2"] * 2
    boundary = [line for line in left.lines if line.get_linestyle() == ":"]
    assert len(boundary) == 1 and np.asarray(boundary[0].get_xdata()).tolist() == [3, 3]
    single = drift_figure([drift("a", 0.3, 3)]).axes[0]
    assert not single.texts and single.get_xlabel() == "block"


def test_figure_labels_the_change_of_each_task_and_stresses_growth() -> None:
    right = drift_figure(
        [drift("good", 0.5), drift("bad", 0.4)], [drift("good", 0.25), drift("bad", 0.5)]
    ).axes[0]
    assert [label.get_text() for label in right.get_yticklabels()] == ["mean", "bad", "good"]
    labels = {text.get_text(): text.get_fontweight() for text in right.texts}
    assert labels == {"−16.7%": "bold", "+25.0%": "bold", "−50.0%": "normal"}


def test_figure_survives_numbers_that_are_none() -> None:
    blocks = (BlockDrift(0, "l.0", math.inf, math.nan, 0.0), BlockDrift(1, "l.1", 0.2, 0.1, 0.1))
    figure = drift_figure([TaskDrift("a", 1, math.nan, blocks)], [TaskDrift("a", 1, 0.2, blocks)])
    assert "a" in texts(figure)
    assert figure.axes[1].get_xlim() == (0, pytest.approx(0.256))


def test_figure_leaves_matplotlib_as_it_was() -> None:
    defaults = dict(matplotlib.rcParams)
    drift_figure([drift("a", 0.5, 3)])
    assert dict(matplotlib.rcParams) == defaults


# --- progress --------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class BrokenFile(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def log_file(file: io.StringIO | None = None) -> Console:
    return Console(file=file or io.StringIO(), width=80, _environ={"TERM": "xterm"})


def terminal(term: str = "xterm-256color") -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": term})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def step(progress: RichProgress, block: int, name: str = "mlp.fc1", task: str = "svhn") -> None:
    progress.on_step(f"{LAYERS}.{block}", f"{LAYERS}.{block}.{name}", task, 10.0)


def test_log_file_gets_a_line_per_block_and_per_interval() -> None:
    console, clock = log_file(), Clock()
    with RichProgress(console, interval=15, clock=clock) as progress:
        clock.now = 100.0  # loading is not part of the estimate
        progress.on_start(100.0)
        for seconds, block in ((10, 0), (11, 0), (12, 0), (26, 0), (27, 0), (30, 1)):
            clock.now = 100.0 + seconds
            step(progress, block)
        progress.on_module(module("a"))
    text = written(console)
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines() == [
        "featcal: 10%, 10.0 s elapsed, 0:01:30 left, svhn: layers.0 mlp.fc1",
        "featcal: 40%, 26.0 s elapsed, 39.0 s left, svhn: layers.0 mlp.fc1",
        "featcal: 60%, 30.0 s elapsed, 20.0 s left, svhn: layers.1 mlp.fc1",
        "featcal: done, 1 modules in 30.0 s",
    ]


@pytest.mark.parametrize(("done", "said"), [(0, False), (0.9, False), (1.0, True), (50, True)])
def test_time_left_is_told_only_once_there_is_something_to_judge_by(
    done: float, said: bool
) -> None:
    """The first of a thousand steps would tell of days."""
    console, clock = log_file(), Clock()
    with RichProgress(console, clock=clock) as progress:
        progress.on_start(100.0)
        clock.now = 1000.0
        progress.on_step(f"{LAYERS}.0", f"{LAYERS}.0.mlp.fc1", "svhn", done)
    assert (" left," in written(console)) is said
    bar = RichProgress(terminal())._bar
    assert bar is not None
    task: Any = SimpleNamespace(percentage=done, time_remaining=59 * 3600, total=100.0)
    column = bar.columns[-1]
    assert isinstance(column, TimeRemainingColumn)
    assert column.render(task).plain == ("59:00:00" if said else "")


def test_log_lines_are_not_wrapped() -> None:
    console = log_file()
    with RichProgress(console) as progress:
        progress.on_start(100.0)
        step(progress, 0, name="x" * 100)
    assert len(written(console).splitlines()) == 2


def test_step_outside_all_blocks_is_shown() -> None:
    console = log_file()
    with RichProgress(console) as progress:
        progress.on_step("", "visual_projection", "svhn", 0.0)
    assert written(console).startswith("featcal: 0.0 s elapsed, svhn: visual_projection\n")


def test_terminal_gets_a_bar_and_its_cursor_back_after_an_exception() -> None:
    console = terminal()
    with pytest.raises(RuntimeError, match="boom"), RichProgress(console) as progress:
        progress.on_start(20.0)
        step(progress, 3)
        progress.on_module(module("a"))
        raise RuntimeError("boom")
    text = written(console)
    assert "svhn: layers.3 mlp.fc1" in text and " 50%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("featcal: stopped by RuntimeError, 1 modules in 0.0 s\n")
    assert progress.modules == (module("a"),)
    with console.status("free"):  # a second live display is an error while the first one holds on
        pass


def test_dumb_terminal_gets_lines() -> None:
    console = terminal("dumb")
    with RichProgress(console) as progress:
        progress.on_start(20.0)
        step(progress, 3)
    assert "\x1b[?25l" not in written(console) and "featcal: 50%" in written(console)


def test_interruption_keeps_the_modules() -> None:
    progress = RichProgress(log_file())
    with pytest.raises(KeyboardInterrupt), progress:
        progress.on_module(module("a"))
        progress.on_module(module("b"))
        raise KeyboardInterrupt
    assert [done.name for done in progress.modules] == ["a", "b"]


@pytest.mark.parametrize("make", [log_file, terminal])
def test_other_ranks_are_silent_and_still_collect(make: Any) -> None:
    console = make()
    with RichProgress(console, enabled=False) as progress:
        progress.on_start(10.0)
        step(progress, 0)
        progress.on_module(module("a"))
    assert written(console) == ""
    assert progress.modules == (module("a"),)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), ValueError("closed"), BrokenPipeError(), KeyError("style")],
    ids=lambda error: type(error).__name__,
)
def test_display_that_fails_does_not_stop_the_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a broken pipe rich points the real standard output at the null device.
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with RichProgress(log_file(BrokenFile(error))) as progress:
        progress.on_start(10.0)
        step(progress, 0)
        progress.on_module(module("a"))
    assert len(progress.modules) == 1


# --- what the package may know -----------------------------------------------------------------


def test_report_imports_results_and_nothing_about_how_they_came_about() -> None:
    allowed = {"results", "settings", "observer"}
    folder = Path(report_package.__file__).parent
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = ["." * node.level + (node.module or "")]
            else:
                continue
            for name in modules:
                assert name.split(".")[0] not in {"fusion_bench", "transformers"}, path
                assert "pyplot" not in name, path
                if name.startswith(".."):
                    package, _, part = name.removeprefix("..").partition(".")
                    assert package in {"calibration", "baselines"}, (path, name)
                    assert part in allowed, (path, name)
