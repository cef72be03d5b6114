"""The reports of runs: what their files hold, and what the terminal shows."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reports import START, drift, full_report, module, render_text
from tiny import Block, MaskRows, toy_inputs
from torch import Tensor, nn

from featcal_fusionbench.baselines import (
    ProbSurgerySettings,
    RepresentationSurgerySettings,
    SurgeryResult,
    TaskSurgery,
)
from featcal_fusionbench.calibration import (
    CalibrationResult,
    CalibrationSettings,
    RowRule,
    RowRules,
    TaskDrift,
    build_plan,
    uniform_rows,
)
from featcal_fusionbench.calibration.estimate import Estimate, Fit
from featcal_fusionbench.method.featcal_report import FeatCalReport
from featcal_fusionbench.method.merge_only_report import MergeReport
from featcal_fusionbench.method.surgery_report import ProbSurgeryReport, RepresentationSurgeryReport
from featcal_fusionbench.report import (
    ReportError,
    RunReport,
    collect_versions,
    describe_machine,
    report_name,
    summary_table,
)
from featcal_fusionbench.report.drift import compare_drift
from featcal_fusionbench.report.plan import plan_table
from featcal_fusionbench.report.text import (
    format_bytes,
    format_change,
    format_duration,
    relative_name,
)
from featcal_fusionbench.settings import MethodSettings

# --- files of reports ------------------------------------------------------------------------

SHORT = st.text(max_size=8)
COUNTS = st.integers(min_value=0)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SHORT,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3)
        | st.dictionaries(SHORT, inner, max_size=3)
    ),
    max_leaves=6,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    Any: FREE,
    bool: st.booleans(),
    datetime: st.datetimes(timezones=st.just(START.tzinfo)),
    float: st.floats(allow_nan=False),
    int: COUNTS,
    str: SHORT,
    type(None): st.none(),
}
SETTINGS: dict[Any, st.SearchStrategy[Any]] = {
    CalibrationSettings: st.builds(
        CalibrationSettings,
        ridge_lambda=st.floats(0, 1e9),
        seed=COUNTS,
        include=st.sampled_from([(), ("a|b", "[0-9]+")]),
        input_column=st.sampled_from([None, "img", {"mnist": "img"}]),
    ),
    MethodSettings: st.builds(MethodSettings, seed=COUNTS),
    ProbSurgerySettings: st.builds(ProbSurgerySettings, kl_weight=st.floats(0, 1)),
    RepresentationSurgerySettings: st.builds(RepresentationSurgerySettings, seed=COUNTS),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type; of a dataclass with all of its fields."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in SETTINGS:
        return SETTINGS[kind]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind) if field.name != "format_version"]
        return st.builds(kind, **{name: values_of(hints[name]) for name in names})
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(SHORT, values_of(args[1]), max_size=2)
    return st.one_of(map(values_of, args)) if args else SCALARS[kind]


KINDS: list[type[RunReport]] = [
    FeatCalReport,
    MergeReport,
    ProbSurgeryReport,
    RepresentationSurgeryReport,
]


@given(st.one_of(map(values_of, KINDS)))
@hypothesis_settings(max_examples=40, deadline=None)
def test_any_report_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, report: RunReport
) -> None:
    path = tmp_path_factory.mktemp("report") / report_name(report.method)
    report.write(path)
    back = RunReport.read(path)
    assert back == report and type(back) is type(report)


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
    assert content["settings"] == full_report().settings.as_dict()
    assert content["summary"]["worsened"] == ["dtd"]
    assert content["summary"]["mean_drift_before"] == pytest.approx(0.45)
    assert content["summary"]["wall_seconds"] == 312
    assert content["data"][0]["indices"] == [5, 3]
    assert content["outputs"] == {"report": "/out/report.json"}


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("format_version", 99, "format version 99.*reads version 4.*or run again"),
        ("format", "something else", "not a FeatCal run report: give the path"),
        ("settings.ridge_lambda", -1, "settings: ridge_lambda=-1.* again"),
        ("result.modules.1.rows", True, r"modules\[1\]\.rows should be a whole number, not True"),
        ("models.0.name", 3, r"models\[0\]\.name should be a string, not 3"),
        ("status", "fine", "status should be one of 'complete'.*not 'fine'.*run again"),
        ("started", "yesterday", "started should be an ISO 8601 time, not 'yesterday'"),
        ("started", None, "the report.started is missing"),
        ("data.0.colour", "red", r"data\[0\] has unknown entries: colour"),
        ("method", "prob_surgery", "unknown entries"),
        ("method", "other", "method should be one of merge_only.*not 'other'.*run again"),
    ],
)
def test_damaged_report_is_refused_with_file_and_remedy(
    tmp_path: Path, place: str, value: Any, complaint: str
) -> None:
    path = tmp_path / "r.json"
    full_report().write(path)
    content = inner = json.loads(path.read_text())
    *above, key = place.split(".")
    for step in above:
        inner = inner[int(step) if isinstance(inner, list) else step]
    inner[key] = value
    if value is None:
        del inner[key]
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


def worsened(before: tuple[TaskDrift, ...], after: tuple[TaskDrift, ...]) -> list[str]:
    report = full_report(drift_before=before, drift_after=after)
    return [change.task for change in report.worsened]


def test_worsened_finds_growth_and_nothing_else() -> None:
    before = (drift("up", 0.5), drift("down", 0.5), drift("same", 0.5), drift("gone", 0.5))
    after = (drift("same", 0.5 * (1 + 1e-7)), drift("down", 0.4), drift("up", 0.51))
    assert worsened(before, after) == ["up"]
    assert [change.task for change in compare_drift(before, after)] == ["up", "down", "same"]


def test_drift_that_is_no_number_counts_as_worse() -> None:
    assert worsened((drift("a", 0.5),), (drift("a", math.nan),))
    assert worsened((drift("a", 0.0),), (drift("a", 1e-3),))


def test_warning_says_which_tasks_and_what_to_try() -> None:
    (text,) = full_report().all_warnings
    assert "1 of 2 tasks (dtd 0.4000 to 0.6000)" in text
    assert "ridge_lambda (now 0.25;" in text and "n_samples, now 8" in text
    assert full_report(drift_after=()).all_warnings == ()


def test_scalars_have_flat_names_and_leave_out_what_was_not_measured() -> None:
    values = full_report().scalars()
    assert values["featcal/drift_before/svhn"] == 0.5
    assert values["featcal/drift_after/dtd"] == 0.6
    assert values["featcal/seconds"] == 312 and values["featcal/peak_memory_gib"] == 3
    assert values["featcal/tasks_worsened"] == 1 and values["featcal/max_condition"] == 1.5e3
    assert all(type(value) is float for value in values.values())
    planned = FeatCalReport(status="planned", settings=CalibrationSettings(), started=START)
    assert planned.scalars() == {}


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


def test_scalars_of_surgery_and_of_the_merger_alone() -> None:
    values = surgery_report().scalars()
    assert values["prob_surgery/loss_start/svhn"] == 0.5
    assert values["prob_surgery/loss_end/dtd"] == 0.5
    assert values["prob_surgery/seconds"] == 312
    merged = MergeReport(status="complete", started=START, phases=full_report().phases)
    assert merged.scalars()["merge_only/peak_memory_gib"] == 3


# --- tables ----------------------------------------------------------------------------------


def cells(text: str, first: str) -> list[str]:
    """The cells of the one row that starts with ``first``."""
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [first]]
    return row


def assert_fits(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_summary_table_of_surgery() -> None:
    text = render_text(summary_table(surgery_report()))
    assert_fits(text)
    assert cells(text, "svhn") == ["svhn", "256", "0.5000", "0.2500", "0.6000", "0.3000", "-50.0%"]
    assert cells(text, "dtd") == [
        *("dtd", "200", "of", "256"), *("0.4000", "0.5000", "-", "-", "+25.0%", "worse"),
    ]  # fmt: skip
    assert "note: trained on test inputs" in text
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


def test_summary_table_of_a_run_that_failed_early() -> None:
    before = (drift("svhn", 0.5), drift("glue[red]", 0.4))
    report = full_report(
        status="failed", error="ForwardError: [boom]", drift_before=before, drift_after=()
    )
    text = render_text(summary_table(report))
    assert "FeatCal failed" in text and "error: ForwardError: [boom]" in text
    assert cells(text, "svhn")[-3:] == ["0.5000", "-", "-"]
    assert "glue[red]" in text  # which is rich's markup
    assert "worse" not in text


def test_summary_table_without_drift_still_shows_the_samples() -> None:
    text = render_text(summary_table(full_report(drift_before=(), drift_after=())))
    assert cells(text, "svhn") == ["svhn", "256", "0", "-", "-", "-"]


class Stack(nn.Module):
    """A norm, and below each of some parents a row of blocks."""

    def __init__(self, **blocks: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(6)
        for parent, count in blocks.items():
            self.add_module(parent, nn.ModuleList(Block(6, 10) for _ in range(count)))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.pre_norm(x)
        for parent in list(self.children())[1:]:
            assert isinstance(parent, nn.ModuleList)
            for block in parent:
                x = block(x, attention_mask)
        return x


def fit(model: nn.Module, row_rules: RowRules = uniform_rows, **settings: Any) -> Fit:
    plan = build_plan(model, toy_inputs(1, "a"), CalibrationSettings(**settings), row_rules)
    estimate = Estimate(
        flops=2e12, seconds=42, activation_bytes=2**31, working_bytes=0, sums_bytes=0, model_bytes=0
    )
    return Fit(plan, estimate, 2**35, "waiting forwards hold little", "")


def test_plan_table_shows_blocks_that_are_alike_once() -> None:
    def last_is_masked(name: str, block: int | None, blocks: int) -> RowRule | None:
        return MaskRows("mask") if block == 11 and name.endswith(".gate") else None

    text = render_text(plan_table(fit(Stack(blocks=12), last_is_masked)))
    assert_fits(text)
    assert "108 modules to calibrate, 1 skipped" in text
    assert "blocks.0 to 10 (11 blocks alike)" in text and "\nblocks.11\n" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(" gate ")]
    plain = ["gate", "linear", "10", "x", "6", "bias"]
    assert rows == [plain, [*plain, "MaskRows(key='mask')"]]
    assert "skipped, outside all blocks (1): pre_norm\n" in text
    assert "estimate: about 42.0 s, peak memory about 2.0 GiB, 32.0 GiB free, 2 TFLOP" in text
    assert "memory: waiting forwards hold little" in text


def test_plan_table_names_a_few_of_the_modules_that_are_skipped() -> None:
    text = render_text(plan_table(fit(Stack(blocks=5), exclude="norm1")), width=200)
    assert "(5): blocks.0.norm1, blocks.1.norm1, blocks.2.norm1 and 2 more" in text


def test_plan_table_keeps_apart_what_lies_outside_blocks_or_in_other_stacks() -> None:
    text = render_text(plan_table(fit(Stack(encoder=1, decoder=1), include=["pre_norm", "gate"])))
    assert "outside all blocks" in text and " pre_norm " in text
    assert "\nencoder.0\n" in text and "\ndecoder.0\n" in text


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
