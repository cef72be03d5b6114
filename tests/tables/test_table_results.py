"""Cells and their results as files."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cells import cell, models
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal_fusionbench.report import ReportError
from featcal_fusionbench.tables.results import Cell, CellResult


def test_a_place_is_that_of_all_seeds_and_of_no_other_cell() -> None:
    result = cell("ta", "featcal", point={"n": 8, "corruption": "blur"}, seed=3)
    assert result.cell == Cell("ta", "featcal", 3, (("corruption", "blur"), ("n", 8)))
    assert result.cell.place == "ta × featcal, corruption=blur, n=8"
    assert result.cell.id == "ta/featcal/corruption=blur/n=8/seed3"
    assert (
        Cell("ta", "featcal", 0, (("n", 8),)).place == Cell("ta", "featcal", 1, (("n", 8.0),)).place
    )
    assert cell("base").cell.place == "base"


def test_a_cell_equals_what_is_read_back(tmp_path: Path) -> None:
    written = cell(
        "ta",
        "featcal",
        {"a": 0.25, "b": -0.5},
        metrics={"a": "accuracy", "b": "spearman_rho"},
        point={"n_samples": 8, "corruption": "blur"},
        models=models(base="00", a="11", merged="22"),
        labels=("trained on test inputs",),
        peak_device_bytes=None,
    )
    written.write(tmp_path / "cell.json")
    assert CellResult.read(tmp_path / "cell.json", "table") == written


@settings(deadline=None, max_examples=25)
@given(score=st.floats(0, 1), seconds=st.none() | st.floats(0, 1e9), seed=st.integers(0, 9))
def test_numbers_keep_all_their_digits(
    tmp_path_factory: pytest.TempPathFactory, score: float, seconds: float | None, seed: int
) -> None:
    path = tmp_path_factory.mktemp("cell") / "cell.json"
    written = cell("ta", scores={"a": score}, seconds=seconds, seed=seed)
    written.write(path)
    assert CellResult.read(path) == written


def test_an_undefined_score_survives(tmp_path: Path) -> None:
    cell("ta", scores={"a": 0.5, "b": math.nan}).write(tmp_path / "cell.json")
    read = CellResult.read(tmp_path / "cell.json")
    assert math.isnan(read.scores["b"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": {"c": 0.5}}, "scores has tasks that are none: c"),
        ({"scores": {"a": 1.5}}, "score of a should lie between 0.0 and 1"),
        ({"scores": {"a": -0.1}}, "score of a should lie between 0.0 and 1"),
        ({"scores": {"a": 0.5}, "metrics": {}}, "metrics does not say what the score of a is"),
        ({"merger": "base", "calibrator": "featcal"}, "The row base has no calibrator"),
        ({"merger": ""}, "merger is empty"),
        ({"tasks": ("a", "a")}, "distinct names"),
        ({"tasks": ()}, "distinct names"),
        ({"point": {"n": math.inf}}, "point.n should be a finite number or a name"),
        ({"point": {"n": [1]}}, "point.n should be a finite number or a name"),
        ({"seconds": -1.0}, "seconds should be finite and not negative"),
        ({"started": datetime(2026, 1, 1)}, "started needs a time zone"),
    ],
)
def test_what_cannot_be_a_cell_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"merger": "ta", "calibrator": "none", "scores": {"a": 0.5}, **changes}
    with pytest.raises(ValueError, match=message):
        cell(given.pop("merger"), given.pop("calibrator"), given.pop("scores"), **given)


def test_spearman_may_be_negative_and_accuracy_may_not() -> None:
    assert cell("ta", scores={"a": -1.0}, metrics={"a": "spearman_rho"}).scores["a"] == -1


def written(path: Path, **changes: Any) -> Path:
    """A cell's file with changed entries."""
    cell("ta").write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not the result of a table's cell"),
        ({"format_version": 2}, r"format version 2, and this .* reads version 1"),
        ({"scores": {"a": "high"}}, r"is damaged: the cell.scores.a should be a number"),
        ({"scores": {"a": 2}}, "is damaged: .*between 0.0 and 1"),
        ({"size": "tiny"}, "is damaged: the cell.size should be one of 'full', 'smoke'"),
        ({"surplus": 1}, "is damaged: .*unknown entries: surplus"),
    ],
)
def test_other_files_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = written(tmp_path / "cell.json", **changes)
    with pytest.raises(ReportError, match=message) as error:
        CellResult.read(path)
    assert str(path) in str(error.value)


def test_a_cell_of_another_table_is_refused(tmp_path: Path) -> None:
    cell("ta").write(tmp_path / "cell.json")
    with pytest.raises(ReportError, match="belongs to the table table, not to other"):
        CellResult.read(tmp_path / "cell.json", "other")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_off_file_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "cell.json"
    cell("ta").write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ReportError, match="cell.json is not a complete JSON file"):
        CellResult.read(path)
