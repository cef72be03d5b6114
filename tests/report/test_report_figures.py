"""The picture of feature drift."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from reports import drift

from featcal_fusionbench.calibration.results import BlockDrift, TaskDrift
from featcal_fusionbench.report import write_figure
from featcal_fusionbench.report.figures import drift_figure


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
