"""The table on the terminal and the figure."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from featcal_fusionbench.benchmark.results import EXPERTS, MERGED, Summary
from featcal_fusionbench.benchmark.suite import Suite
from featcal_fusionbench.report import write_figure


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def render_table(suite: Suite, summaries: list[Summary], seeds: list[int]) -> Table:
    """Accuracy per task and average in percent, the share of the gap closed, the time."""
    tasks = list(summaries[0].accuracies)
    count = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    table = Table(
        title=f"{suite.title}: {suite.measure} ({count})",
        caption="gap closed = (row - Task Arithmetic) / (experts - Task Arithmetic); "
        "experts: each on its own task",
    )
    table.add_column("", no_wrap=True)
    for task in tasks:
        table.add_column(task, justify="right")
    table.add_column("average", justify="right", style="bold")
    table.add_column("gap closed", justify="right")
    table.add_column("seconds", justify="right", style="dim")
    for summary in summaries:
        average = _percent(summary.average)
        if summary.deviation is not None:
            average += f" ± {_percent(summary.deviation)}"
        shown = summary.share is not None and summary.row not in ("base", EXPERTS, MERGED)
        table.add_row(
            suite.rows[summary.row].title,
            *(_percent(summary.accuracies[task]) for task in tasks),
            average,
            f"{_percent(summary.share)} %" if shown and summary.share is not None else "",
            "kept" if summary.seconds is None else f"{summary.seconds:.0f}",
            style="bold cyan" if summary.row == "featcal-module" else "",
        )
    return table


def save_figure(suite: Suite, summaries: list[Summary], path: Path) -> None:
    """Bars per task and for the average; the experts are the marks the bars should reach."""
    # the object interface: no global backend is chosen, no display is needed
    from matplotlib.figure import Figure

    by_row = {summary.row: summary for summary in summaries}
    bars = [summary for summary in summaries if summary.row != EXPERTS]
    groups = ["average", *summaries[0].accuracies]
    # the average stands apart from the tasks
    centres = [0.0] + [1.35 + index for index in range(len(groups) - 1)]
    width = 0.8 / max(1, len(bars))

    def values(summary: Summary) -> list[float]:
        return [100 * v for v in (summary.average, *summary.accuracies.values())]

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for index, summary in enumerate(bars):
        offset = (index - (len(bars) - 1) / 2) * width
        heights = values(summary)
        axes.bar(
            [centre + offset for centre in centres],
            heights,
            width * 0.92,
            color=suite.rows[summary.row].colour,
            label=suite.rows[summary.row].title,
            zorder=2,
        )
        axes.annotate(
            f"{heights[0]:.0f}",
            (centres[0] + offset, heights[0]),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    if EXPERTS in by_row:
        for index, (centre, height) in enumerate(
            zip(centres, values(by_row[EXPERTS]), strict=True)
        ):
            axes.hlines(
                height,
                centre - 0.43,
                centre + 0.43,
                color="#b5322a",
                linewidth=2,
                # matplotlib leaves names with an underscore out of the legend
                label="experts" if index == 0 else "_",
                zorder=3,
            )
    axes.set_xticks(centres, groups, fontsize=10)
    axes.get_xticklabels()[0].set_fontweight("bold")
    axes.set_ylabel(suite.measure)
    axes.set_ylim(0, 104)
    axes.yaxis.grid(True, color="#e6e6e6", zorder=0)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shares = [
        f"{suite.rows[summary.row].title}: {100 * summary.share:.0f} %"
        for summary in bars
        if summary.share is not None and summary.row not in ("base", MERGED)
    ]
    title = suite.figure_title
    if shares:
        title += "\nshare of the gap to the experts closed: " + ",  ".join(shares)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(summaries), frameon=False, fontsize=9)
    write_figure(path, figure, dpi=160)
