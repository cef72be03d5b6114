"""A table in every format, read back, and the files of one call."""

from __future__ import annotations

import io
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cells import cell, expected, layout, models
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import render_text

from featcal_fusionbench.tables.checks import TableError
from featcal_fusionbench.tables.document import Document, Entry, Grid, Note
from featcal_fusionbench.tables.frame import tidy_csv, tidy_frame
from featcal_fusionbench.tables.latex import latex
from featcal_fusionbench.tables.layout import PublishedValue, PublishedValues, TableLayout
from featcal_fusionbench.tables.markdown import markdown
from featcal_fusionbench.tables.published import PublishedNumberError, look_up
from featcal_fusionbench.tables.results import CellResult
from featcal_fusionbench.tables.terminal import terminal
from featcal_fusionbench.tables.text import number_text, percent
from featcal_fusionbench.tables.write import lay_out, write_tables

TA8 = look_up("clip-vit-base-patch32", "TA8", "Pre-trained").tasks
TALL20 = look_up("clip-vit-base-patch32", "TALL20", "Pre-trained").tasks


def whole_layout(**kwargs: Any) -> TableLayout:
    return layout(
        tasks=TA8,
        published=PublishedValues(
            backbone="clip-vit-base-patch32",
            task_set="TA8",
            values=(
                PublishedValue(merger="ta", label="Task Arithmetic (lambda=0.3)"),
                PublishedValue(merger="ta", label="TA (FeatCal paper, no calibration)"),
                PublishedValue(
                    merger="ta", calibrator="featcal", label="TA + FeatCal (paper, n=256)"
                ),
            ),
        ),
        **kwargs,
    )


def whole(seeds: tuple[int, ...] = (0, 1)) -> list[CellResult]:
    """All cells of ``whole_layout``, with all that a cell may have."""

    def make(merger: str, calibrator: str, score: float, seed: int) -> CellResult:
        return cell(
            merger,
            calibrator,
            {task: score + 0.01 * seed + 0.002 * at for at, task in enumerate(TA8)},
            seed,
            tasks=TA8,
            models=models(base="0123456789abcdef", sun397="fedcba9876543210"),
            labels=("trained on test inputs",) if merger == "ties" else (),
        )

    scores = {
        ("base", "none"): 0.4,
        ("experts", "none"): 0.9,
        ("ta", "none"): 0.6,
        ("ta", "featcal"): 0.8,
        ("ties", "none"): 0.65,
        ("ties", "featcal"): 0.825,
    }
    return [make(m, c, score, seed) for (m, c), score in scores.items() for seed in seeds]


def make_document(results: list[CellResult], table: TableLayout) -> Document:
    document, _, _ = lay_out(results, table)
    return document


def grid_of(document: Document, name: str) -> Grid:
    (found,) = [grid for grid in document.grids if grid.name == name]
    return found


def texts(grid: Grid) -> list[list[str]]:
    """The header and all rows, without deviations and marks."""
    rows = grid.entries.map(lambda entry: entry.text).to_numpy().tolist()
    return [list(grid.entries.columns), *rows]


def entry(grid: Grid, merger: str, column: str, calibrator: str = "") -> Entry:
    """What stands in the row of a merger, or of a merger and a calibrator."""
    names = grid.entries.map(lambda entry: entry.text)
    own = names["merger"] == merger
    own &= names["calibrator"] == calibrator if calibrator else True
    (found,) = grid.entries[own][column]
    return found


def notes_of(document: Document) -> dict[str, tuple[str, ...]]:
    return {note.heading: note.lines for note in document.notes}


# Content


def test_the_overview_by_hand() -> None:
    cells = [
        cell("base", scores={"a": 0.1, "b": 0.1}),
        cell("experts", scores={"a": 0.8, "b": 1.0}, seconds=None),
        cell("ta", scores={"a": 0.4, "b": 0.5}, seconds=2.345, peak_memory_bytes=3 << 29),
        cell("ta", "featcal", {"a": 0.6, "b": 0.75}, seconds=61.5, peak_device_bytes=1 << 30),
    ]
    overview = grid_of(make_document(cells[::-1], layout()), "overview")
    assert texts(overview) == [
        [
            *("merger", "calibrator", "seeds", "average", "normalised", "gap closed"),
            *("seconds", "memory", "device memory"),
        ],
        ["base", "", "1", "10.0", "11.2", "", "10", "1.0 GiB", "–"],
        ["experts", "", "1", "90.0", "100.0", "", "–", "1.0 GiB", "–"],
        ["Task Arithmetic", "none", "1", "45.0", "50.0", "", "2.3", "1.5 GiB", "–"],
        ["Task Arithmetic", "FeatCal", "1", "67.5", "75.0", "50 %", "62", "1.0 GiB", "1.0 GiB"],
    ]
    assert list(overview.rules) == [2]


def test_deviations_and_the_best_of_a_row() -> None:
    matrix = grid_of(make_document(whole(), whole_layout()), "averages")
    assert list(matrix.entries.columns) == ["merger", "none", "FeatCal"]
    assert entry(matrix, "Task Arithmetic", "none") == Entry("61.2", "0.7")
    assert entry(matrix, "Task Arithmetic", "FeatCal") == Entry("81.2", "0.7", bold=True)
    assert entry(matrix, "experts", "none") == Entry("91.2", "0.7")
    assert entry(matrix, "experts", "FeatCal") == Entry()


def test_what_cannot_be_told_apart_as_printed_is_equally_good() -> None:
    cells = [cell("ta", scores={"a": 0.5}), cell("ta", "featcal", {"a": 0.5001})]
    matrix = grid_of(make_document(cells, layout()), "averages")
    assert entry(matrix, "Task Arithmetic", "none").bold
    assert entry(matrix, "Task Arithmetic", "FeatCal").bold


def test_a_partial_average_is_marked_everywhere_and_beats_nothing() -> None:
    partial = {task: 0.99 for task in TA8[1:]}
    cells = [
        replace(c, scores=partial) if (c.merger, c.calibrator) == ("ta", "featcal") else c
        for c in whole((0,))
    ]
    document = make_document(cells, whole_layout())
    found = [entry(grid_of(document, "averages"), "Task Arithmetic", "FeatCal")]
    for name in ("overview", "scores"):
        found.append(entry(grid_of(document, name), "Task Arithmetic", "average", "FeatCal"))
    assert found == [Entry("99.0", marks="*")] * 3
    overview = grid_of(document, "overview")
    assert entry(overview, "Task Arithmetic", "gap closed", "FeatCal").marks == "*"
    assert entry(overview, "Task Arithmetic", "published", "FeatCal").text == "85.5"
    assert entry(overview, "Task Arithmetic", "difference", "FeatCal").text == "–"
    assert "without sun397: ta × featcal" in " ".join(notes_of(document)["Warnings"])
    assert "* partial: over fewer tasks than the table has." in notes_of(document)["How to read it"]


def test_labels_are_marked_and_told_in_every_format() -> None:
    cells = [replace(c, labels=("a remark",)) if c.merger == "ta" else c for c in whole()]
    document = make_document(cells, whole_layout())
    matrix = grid_of(document, "averages")
    assert entry(matrix, "TIES", "FeatCal").marks == "†"
    assert entry(matrix, "Task Arithmetic", "FeatCal").marks == "‡"
    assert entry(matrix, "experts", "none").marks == ""
    legend = notes_of(document)["How to read it"]
    assert {"† trained on test inputs.", "‡ a remark."} <= set(legend)
    for text in (markdown(document), latex(document), render_text(terminal(document), 130)):
        assert "trained on test inputs" in text


def test_missing_cells_are_dashes_and_listed_with_reasons() -> None:
    wanted = expected(("ties", "featcal", 1), failure="OutOfMemoryError: 3 GiB.")
    wanted |= expected(("ties", "featcal", 0), ("ties", "featcal", 2), ("ta", "none", 5))
    cells = [c for c in whole() if (c.merger, c.calibrator) != ("ties", "featcal")]
    document = make_document(cells, whole_layout(expected=wanted))
    assert notes_of(document)["Missing"] == (
        "ta × none, seed 5: no result yet.",
        "ties × featcal, seeds 0, 2: no result yet.",
        "ties × featcal, seed 1: OutOfMemoryError: 3 GiB.",
    )
    last = texts(grid_of(document, "overview"))[-1]
    assert last[:6] == ["TIES", "FeatCal", "0 of 3", "–", "–", "–"]
    assert texts(grid_of(document, "averages"))[-1] == ["TIES", "66.2", "–"]
    assert set(texts(grid_of(document, "scores"))[-1][2:]) == {"–"}


def test_published_values_stand_beside_with_source_and_difference() -> None:
    document = make_document(whole((0,)), whole_layout())
    grid = grid_of(document, "published")
    header, *rows = texts(grid)
    assert header == ["merger", "calibrator", "published as", *TA8, "average"]
    at = header.index("eurosat")
    assert [[*row[:3], row[at], row[-1]] for row in rows] == [
        [
            *("Task Arithmetic", "none", "Task Arithmetic (lambda=0.3)"),
            *("76.7 (−16.1)", "68.0 (−7.3)"),
        ],
        ["Task Arithmetic", "none", "TA (FeatCal paper, no calibration)", "–", "67.5 (−6.8)"],
        ["Task Arithmetic", "FeatCal", "TA + FeatCal (paper, n=256)", "–", "85.5 (−4.8)"],
    ]
    overview = grid_of(document, "overview")
    assert entry(overview, "Task Arithmetic", "published", "none") == Entry("68.0", marks="[1]")
    assert entry(overview, "Task Arithmetic", "difference", "none").text == "−7.3"
    assert entry(overview, "TIES", "published", "none") == Entry()
    sources = notes_of(document)["Published sources"]
    assert "fusionbench checkpoints, clip-vit-base-patch32, TA8" in sources[0]
    marks = list(dict.fromkeys(label.marks for label in grid.entries["published as"]))
    assert marks == ["[1]", "[2]", "[3]"]
    assert [line[:4] for line in sources[1:]] == [f"{mark} " for mark in marks]
    assert "FusionBench documentation" in sources[1]


def test_a_published_remark_stands_with_its_source() -> None:
    tasks = look_up("flan-t5-base", "GLUE8_full", "Pre-trained").tasks
    label = "TA 0.3 + FeatCal (third-party port, 5 seeds)"
    values = (PublishedValue(merger="ta", label=label),)
    published = PublishedValues(backbone="flan-t5-base", task_set="GLUE8_full", values=values)
    cells = [cell("ta", scores=dict.fromkeys(tasks, 0.5), tasks=tasks)]
    document = make_document(cells, layout(tasks=tasks, published=published))
    assert f". {label}: mean of 5 seeds" in notes_of(document)["Published sources"][1]


def test_a_chain_shows_what_it_starts_from_as_its_merged_model() -> None:
    rows = {"ta": "Task Arithmetic", "chain": "TA → FeatCal"}
    columns = {"none": "merged", "surgery": "Surgery", "featcal": "FeatCal"}
    table = layout(rows=rows, columns=columns, starts={"chain": ("ta", "featcal")})
    cells = [
        cell("ta", scores={"a": 0.3, "b": 0.4}),
        cell("ta", "featcal", {"a": 0.5, "b": 0.6}),
        cell("chain", "surgery"),
    ]
    assert texts(grid_of(make_document(cells, table), "averages"))[1:] == [
        ["Task Arithmetic", "35.0", "", "55.0"],
        ["TA → FeatCal", "55.0", "60.0", ""],
    ]


def test_notes_tell_how_a_table_was_made() -> None:
    notes = notes_of(make_document(whole(), whole_layout(notes=("α: the paper's",))))
    assert notes["Command"] == ("featcal-table table",)
    assert "fusion_bench method=ta seed=1" in notes["Command of each cell"]
    assert "base: hub/base (sha256 0123456789ab)" in notes["Checkpoints"]
    assert "sun397: hub/sun397 (sha256 fedcba987654)" in notes["Checkpoints"]
    assert notes["Made"][0] == "2026-11-29 to 2026-11-30"
    assert "AMD EPYC, 2 cores, 1 threads of torch, 24.0 GiB" in notes["Made"][1]
    assert "torch 2.13.0" in notes["Made"][2]
    assert notes["Remarks"] == ("α: the paper's",)


def test_twenty_tasks_are_divided() -> None:
    cells = [cell("ta", scores=dict.fromkeys(TALL20, 0.5), tasks=TALL20)]
    document = make_document(cells, layout(tasks=TALL20))
    headers = [list(grid_of(document, f"scores-{part}").entries.columns) for part in (1, 2)]
    names = ["merger", "calibrator"]
    assert headers == [[*names, *TALL20[:10]], [*names, *TALL20[10:], "average"]]


def test_rho_is_named() -> None:
    metrics = {"a": "accuracy", "b": "spearman_rho"}
    document = make_document([cell("ta", scores={"a": 0.5, "b": -0.25}, metrics=metrics)], layout())
    scores = grid_of(document, "scores")
    assert scores.caption == "Accuracy in percent; b: 100 × Spearman's ρ."
    assert entry(scores, "Task Arithmetic", "b").text == "−25.0"


def test_a_curve_has_a_grid_of_its_own() -> None:
    cells = [
        *whole((0,)),
        *(
            cell("ta", "featcal", dict.fromkeys(TA8, score), tasks=TA8, point={"n_samples": n})
            for n, score in ((16, 0.8), (2, 0.7))
        ),
    ]
    document = make_document(cells, whole_layout(curves={"n_samples": "inputs"}))
    curve = grid_of(document, "curve-n_samples")
    assert texts(curve) == [
        ["merger", "calibrator", "2", "16"],
        ["Task Arithmetic", "FeatCal", "70.0", "80.0"],
    ]
    assert entry(curve, "Task Arithmetic", "16").bold
    overview = grid_of(document, "overview-n_samples")
    assert overview.title == "Averages, share of the gap closed, cost by inputs"
    assert [row[2] for row in texts(overview)] == ["inputs", "2", "16"]


def test_a_smoke_run_says_so_in_every_title() -> None:
    document = make_document([replace(c, size="smoke") for c in whole()], whole_layout())
    assert document.title == "A table (smoke size)"
    assert "published" not in {grid.name for grid in document.grids}


def test_swept_values_keep_their_digits() -> None:
    assert number_text(1e-5) == "1e-05"
    assert number_text(256) == "256"
    assert number_text(0.123456789) == "0.123456789"
    assert number_text("blur") == "blur"


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        (0.8547, False, "85.5"),
        (-0.004, True, "−0.4"),
        (0.004, True, "+0.4"),
        (0.0, True, "0.0"),
        (-0.0004, True, "0.0"),
        (1.0, False, "100.0"),
        (math.nan, False, "–"),
    ],
)
def test_percent(value: float, signed: bool, text: str) -> None:
    assert percent(value, signed) == text


# Formats


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of every table; the line of dashes is left out."""
    tables = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert all(set(text.strip()) <= set("-:") for text in lines[1])
        tables.append([[text.strip() for text in line] for line in (lines[0], *lines[2:])])
    return tables


def test_markdown_has_all_rows_and_columns() -> None:
    document = make_document(whole(), whole_layout())
    found = markdown_tables(markdown(document))
    for table, grid in zip(found, document.grids, strict=True):
        assert [len(row) for row in table] == [grid.entries.shape[1]] * (1 + len(grid.entries))
    assert ["TIES", "66.2 ± 0.7<sup>†</sup>", "**83.7 ± 0.7**<sup>†</sup>"] in found[0]


EVIL = r"a|b_c*d`e<f>g[h]i\j~k#l&m{n}$o%p^q" + '"r"'


def evil(text: str) -> Document:
    entries = pd.DataFrame([[Entry(text), Entry(text, "1.0", marks="[1]*", bold=True)]])
    grid = Grid(
        name="a grid",
        title=text,
        entries=entries.set_axis([text, "x"], axis="columns"),
        text_columns=1,
        caption=text,
    )
    notes = (Note("Warnings", (text,), "warning"), Note("C", (text,), "record"))
    return Document(name="a_b", title=text, grids=(grid,), notes=notes)


@settings(deadline=None, max_examples=25)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1))
def test_no_text_breaks_a_markdown_table(text: str) -> None:
    (table,) = markdown_tables(markdown(evil(text)))
    assert [len(row) for row in table] == [2, 2]


def test_markdown_escapes_what_it_would_take_for_its_own() -> None:
    text = markdown(evil(EVIL))
    for character in "|_*`<>[]~#&":
        assert not re.search(rf"(?<!\\)b?{re.escape(character)}c_?d", text)
    assert r"a\|b\_c\*d\`e\<f\>g\[h\]i\\j\~k\#l\&m\{n\}" in text
    assert "± 1.0**" in text


def tabular_rows(text: str) -> list[tuple[str, list[list[str]]]]:
    """Column specification and rows of every tabular."""
    found = []
    for spec, body in re.findall(
        r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}", text, flags=re.DOTALL
    ):
        assert body.startswith("\\toprule\n")
        assert body.endswith("\\bottomrule\n")
        lines = [line for line in body.splitlines() if not re.fullmatch(r"\\\w+rule", line)]
        assert all(line.endswith(r" \\") for line in lines)
        found.append((spec, [re.split(r"(?<!\\)&", line) for line in lines]))
    return found


def test_latex_rows_have_the_columns_that_are_declared() -> None:
    document = make_document(whole(), whole_layout())
    tabulars = tabular_rows(latex(document))
    for (spec, rows), grid in zip(tabulars, document.grids, strict=True):
        numbers = grid.entries.shape[1] - grid.text_columns
        assert spec == "l" * grid.text_columns + "r" * numbers
        assert [len(row) for row in rows] == [len(spec)] * (1 + len(grid.entries))
    assert latex(document).count("\\midrule") == sum(1 + len(grid.rules) for grid in document.grids)


def balanced(text: str) -> bool:
    """Whether braces, environments and dollars close, comments and escapes left out."""
    text = re.sub(r"(?<!\\)%.*", "", text)
    text = text.replace("\\\\", "")
    text = re.sub(r"\\[{}$&%#_]", "", text)
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    begun = re.findall(r"\\begin\{(\w+\*?)\}", text)
    ended = re.findall(r"\\end\{(\w+\*?)\}", text)
    return depth == 0 and sorted(begun) == sorted(ended) and text.count("$") % 2 == 0


@settings(deadline=None, max_examples=25)
@given(text=st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1))
def test_no_text_breaks_latex(text: str) -> None:
    written = latex(evil(text))
    assert balanced(written)
    ((spec, rows),) = tabular_rows(written)
    assert spec == "lr"
    assert [len(row) for row in rows] == [2, 2]


def test_latex_escapes() -> None:
    written = latex(evil(EVIL))
    assert r"b\_c*d`e$<$f$>$g[h]i\textbackslash{}j\textasciitilde{}k\#l\&m\{n\}\$o\%p" in written
    assert r"\textasciicircum{}q''r''" in written
    assert r"{\scriptsize$\pm$ 1.0}\textsuperscript{{}[1]*}" in written
    assert r"\label{tab:a-b-a-grid}" in written
    assert r"{\scriptsize$\pm$" in latex(make_document(whole(), whole_layout()))


def test_latex_shows_warnings_and_keeps_records_as_comments() -> None:
    written = latex(evil("text"))
    shown = re.sub(r"^%.*$", "", written, flags=re.MULTILINE)
    assert r"\textbf{Warnings.} text" in shown
    assert "textbf{C.}" not in shown
    assert "\n% C\n% text\n" in written


def test_csv_equals_its_input() -> None:
    cells = [
        *whole(),
        cell(
            "ta",
            "featcal",
            {"sun397": 1 / 3, "dtd": math.nan},
            9,
            tasks=TA8,
            metrics={"sun397": "accuracy", "dtd": "spearman_rho"},
            point={"n_samples": 8},
            seconds=None,
            peak_memory_bytes=(1 << 53) + 1,
            command="fusion_bench 'a=\"b, c\"'",
        ),
    ]
    # as text, so that no reader's rounding hides a writer's
    frame = pd.read_csv(io.StringIO(tidy_csv(tidy_frame(cells, whole_layout()))), dtype=str).fillna(
        ""
    )
    keys = ["merger", "calibrator", "point.n_samples", "seed", "task"]
    assert not frame.duplicated(keys).any()
    assert len(frame) == sum(len(c.scores) for c in cells)
    read = frame.set_index(keys)
    for c in cells:
        n = f"{c.point['n_samples']:.1f}" if c.point else ""
        for task, score in c.scores.items():
            line = read.loc[(c.merger, c.calibrator, n, str(c.seed), task)]
            assert line["score"] == ("" if math.isnan(score) else repr(score))
            assert line["metric"] == c.metrics[task]
            assert line["peak_memory_bytes"] == str(c.peak_memory_bytes)
            assert line["command"] == c.command
            assert line["seconds"] == ("" if c.seconds is None else repr(c.seconds))
    assert set(frame[frame.merger == "experts"]["normalised"]) == {"1.0"}


def test_csv_stands_in_the_tables_order_whatever_the_cells() -> None:
    backwards = [cell("old", tasks=TA8, scores={"dtd": 0.5}), *whole()[::-1]]
    lines = tidy_csv(tidy_frame(backwards, whole_layout())).splitlines()
    assert lines[:-1] == tidy_csv(tidy_frame(whole(), whole_layout())).splitlines()
    assert lines[-1].startswith("table,full,old,none,0,dtd,accuracy,0.5,")


def test_the_terminal_shows_every_number_at_any_width() -> None:
    document = make_document(whole(), whole_layout())
    text = render_text(terminal(document), 130)
    assert "81.2 ± 0.7" in text
    assert "featcal-table table" in text
    assert "fusion_bench method=ta" not in text  # in the files
    assert "Expert-normalised" not in text
    narrow = render_text(terminal(document), 80)
    assert "…" not in narrow
    assert "Deviations stand in the written files" in narrow


# Files


def test_one_call_writes_all_files(tmp_path: Path) -> None:
    cells = [
        *whole((0,)),
        *(
            cell("ta", "featcal", dict.fromkeys(TA8, 0.7), tasks=TA8, point={"ridge_lambda": x})
            for x in (0.01, 1.0)
        ),
    ]
    written = write_tables(cells, whole_layout(), tmp_path / "out")
    names = {path.name for path in written.files}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"table.md", "table.tex", "table.csv"} | {
        f"{name}.{suffix}"
        for name in ("table", "table-tasks", "curve-ridge_lambda")
        for suffix in ("png", "pdf")
    }
    assert (tmp_path / "out" / "table.md").read_text() == markdown(written.document)
    for path in written.files:
        start = {".png": b"\x89PNG", ".pdf": b"%PDF"}.get(path.suffix, b"")
        assert path.read_bytes().startswith(start)


def test_nothing_is_written_of_what_cannot_be_one_table(tmp_path: Path) -> None:
    published = PublishedValues(
        backbone="clip-vit-base-patch32",
        task_set="TA8",
        values=(PublishedValue(merger="ta", label="RegMaen"),),
    )
    with pytest.raises(PublishedNumberError, match="Did you mean RegMean"):
        write_tables([cell("ta")], layout(published=published), tmp_path / "out")
    with pytest.raises(TableError):
        write_tables([cell("ta"), cell("ta", size="smoke", seed=1)], layout(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def has_tex() -> bool:
    """Whether LaTeX is there with the packages that a document names for its preamble."""
    if not shutil.which("pdflatex") or not shutil.which("kpsewhich"):
        return False
    files = ["adjustbox.sty", "booktabs.sty"]
    found = subprocess.run(["kpsewhich", *files], capture_output=True, text=True)
    return len(found.stdout.split()) == len(files)


@pytest.mark.skipif(not has_tex(), reason="no pdflatex with adjustbox and booktabs")
@pytest.mark.parametrize("document", ["whole", "evil"])
def test_latex_compiles(document: str, tmp_path: Path) -> None:
    documents = {
        "whole": make_document(whole(), whole_layout()),
        "evil": evil(EVIL + "±×−–—…†‡§¶‖·≈αελμρσω→≤≥"),
    }
    text = latex(documents[document])
    (packages,) = re.findall(r"% In the preamble: (.*)", text)
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    (tmp_path / "main.tex").write_text(
        f"\\documentclass[twocolumn]{{article}}{packages}"
        "\\begin{document}\\input{table}\\end{document}"
    )
    finished = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "main.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert finished.returncode == 0, finished.stdout
    assert "Missing character" not in finished.stdout
    assert (tmp_path / "main.pdf").stat().st_size > 10_000
