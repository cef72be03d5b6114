"""Published results: what they are, and how they are looked up."""

from __future__ import annotations

import pytest

from featcal_fusionbench.tables.published import (
    PublishedNumberError,
    PublishedRow,
    _load,
    look_up,
)

B32 = ("clip-vit-base-patch32", "TA8")


def every_row() -> list[PublishedRow]:
    return [
        row
        for task_sets in _load().values()
        for rows in task_sets.values()
        for row in rows.values()
    ]


@pytest.mark.parametrize(
    ("label", "average"),
    [
        ("TA (FeatCal paper, no calibration)", 0.675),
        ("TA + Surgery (FeatCal paper)", 0.770),
        ("TA + ProbSurgery (FeatCal paper)", 0.788),
        ("TA + FeatCal (paper, n=256)", 0.855),
        ("TA + FeatCal (paper, n=8)", 0.829),
    ],
)
def test_the_papers_headline(label: str, average: float) -> None:
    row = look_up(*B32, label)
    assert row.average == pytest.approx(average)
    assert "2605.13030" in row.source or "FeatCal" in row.source


def test_a_row_task_by_task() -> None:
    row = look_up(*B32, "Task Arithmetic (lambda=0.3)")
    assert row.scores["eurosat"] == pytest.approx(0.767)
    assert list(row.scores) == list(row.tasks)


def test_every_row_is_whole() -> None:
    for row in every_row():
        assert row.source
        assert row.scores or row.average is not None
        assert set(row.scores) <= set(row.tasks)


def test_averages_are_those_of_their_rows() -> None:
    """Within rounding; what differs by more says so in its note."""
    for row in every_row():
        if row.average is not None and len(row.scores) == len(row.tasks):
            mean = sum(row.scores.values()) / len(row.tasks)
            says_so = "not the mean of the row" in row.note
            assert says_so != (abs(mean - row.average) < 0.0016), (row, mean)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            ("clip-vit-base-patch23", "TA8", "RegMean"),
            "No published backbone 'clip-vit-base-patch23' in the package. "
            "Did you mean clip-vit-base-patch32",
        ),
        ((B32[0], "TALL8", "RegMean"), "No published set of tasks 'TALL8'"),
        ((B32[0], "xyz", "RegMean"), "Known: TA8, TALL14, TALL20"),
        (
            (*B32, "Task Arithmetic"),
            r"No published label 'Task Arithmetic' in .*Did you mean .*\(lambda=0.3\)",
        ),
    ],
)
def test_what_is_unknown_suggests_near_names(key: tuple[str, ...], message: str) -> None:
    with pytest.raises(PublishedNumberError, match=message):
        look_up(*key)
