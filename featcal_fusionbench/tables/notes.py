"""What stands below a table: warnings, what is missing, how to read it, how to have it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .checks import place, warnings
from .document import Note
from .layout import TableLayout
from .marks import PARTIAL, Marks
from .results import CellResult
from .summary import CellSummary, cell_key
from .wording import NONE, machine_text

__all__ = ["make_notes"]

_SHORT_HASH = 12


def make_notes(
    cells: Sequence[CellResult],
    summaries: Sequence[CellSummary],
    layout: TableLayout,
    marks: Marks,
) -> tuple[Note, ...]:
    """All notes that have lines.

    Args:
        cells: All results, also those that the table does not show.
        summaries: The places of the table in order.
        layout: The table.
        marks: Footnote marks for labels and sources.
    """
    shown = [cell for summary in summaries for cell in summary.cells]
    command = (layout.command,) if layout.command else ()
    notes = (
        Note("Warnings", tuple(warnings(cells, layout, summaries)), "warning"),
        Note("Missing", tuple(_missing(summaries, layout)), "warning"),
        Note("How to read it", tuple(_legend(summaries, marks))),
        Note("Published sources", tuple(_sources(summaries, layout, marks))),
        Note("Remarks", layout.notes),
        Note("Made", tuple(_made(shown))),
        Note("Command", command, code=True),
        Note("Checkpoints", tuple(_checkpoints(shown)), "record"),
        Note("Command of each cell", tuple(_commands(shown)), "record", code=True),
    )
    return tuple(note for note in notes if note.lines)


def _missing(summaries: Sequence[CellSummary], layout: TableLayout) -> Iterable[str]:
    failures = {
        (cell_key(cell.merger, cell.calibrator, cell.point), cell.seed): cell.failure
        for cell in layout.expected
    }
    for summary in summaries:
        seeds: dict[str, list[str]] = {}
        for seed in summary.missing_seeds:
            reason = failures.get((summary.key, seed)) or "no result yet"
            seeds.setdefault(reason, []).append(str(seed))
        for reason, numbers in seeds.items():
            which = f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            yield f"{place(summary)}, {which}: {reason.rstrip('.')}."


def _legend(summaries: Sequence[CellSummary], marks: Marks) -> Iterable[str]:
    counts = sorted({len(summary.cells) for summary in summaries if summary.cells})
    if counts and counts[-1] > 1:
        yield (
            f"mean ± sample standard deviation over {' or '.join(map(str, counts))} seeds; no ± "
            f"where there is one seed."
        )
    elif counts:
        yield "One seed: no standard deviations."
    yield "base: the model that all experts start from. experts: each on its own task."
    yield "average: mean over tasks, every task counting the same, then over seeds."
    yield (
        "normalised: score / score of the experts for the same task and seed, averaged likewise; "
        "in percent."
    )
    yield (
        "gap closed: (row − merged) / (experts − merged) of averages; merged is the same merger "
        "without a calibrator, and for A → B the model of A calibrated by B."
    )
    yield (
        "seconds: of the cell's own method, without evaluation, and without the merger where the "
        "merged model was at hand; mean over seeds. memory: highest resident memory meanwhile."
    )
    if any(_is_partial(summary) for summary in summaries):
        yield f"{PARTIAL} partial: over fewer tasks than the table has."
    for label, mark in marks.labels.items():
        yield f"{mark} {label}."
    yield f"{NONE} no result, or not known."


def _is_partial(summary: CellSummary) -> bool:
    shares = [summary.average, summary.normalised_average, summary.share]
    return any(share is not None and share.partial for share in shares)


def _sources(summaries: Sequence[CellSummary], layout: TableLayout, marks: Marks) -> Iterable[str]:
    if not marks.sources or not layout.published:
        return
    published = layout.published
    yield (
        f"All of them on {published.tree.value.replace('_', ' ')}, {published.backbone}, "
        f"{published.task_set}. Differences: ours minus published, in points."
    )
    remarks: dict[str, dict[str, None]] = {source: {} for source in marks.sources}
    for summary in summaries:
        for comparison in summary.comparisons:
            if comparison.row.note:
                remark = f" {comparison.row.label}: {comparison.row.note}."
                remarks[comparison.row.source][remark] = None
    for source, mark in marks.sources.items():
        yield f"{mark} {source}.{''.join(remarks[source])}"


def _made(cells: Sequence[CellResult]) -> Iterable[str]:
    if not cells:
        return
    first = min(cell.started for cell in cells).date()
    last = max(cell.finished for cell in cells).date()
    yield f"{first}" if first == last else f"{first} to {last}"
    yield from dict.fromkeys(machine_text(cell.machine) for cell in cells if cell.machine)
    versions: dict[str, dict[str, None]] = {}
    for cell in cells:
        for package, version in cell.versions.items():
            versions.setdefault(package, {})[version] = None
    if versions:
        yield ", ".join(f"{package} {' and '.join(seen)}" for package, seen in versions.items())


def _checkpoints(cells: Sequence[CellResult]) -> Iterable[str]:
    """Base and experts, each with the hashes that were seen."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        for model in cell.models:
            if model.role != "merged":
                name = model.role if model.role == "base" else model.name
                hashes = seen.setdefault((name, model.source), {})
                if model.sha256:
                    hashes[model.sha256[:_SHORT_HASH]] = None
    for (name, source), hashes in seen.items():
        yield f"{name}: {source}" + (f" (sha256 {', '.join(hashes)})" if hashes else "")


def _commands(cells: Sequence[CellResult]) -> Iterable[str]:
    for cell in cells:
        if cell.command:
            yield f"# {cell.title}"
            yield cell.command
