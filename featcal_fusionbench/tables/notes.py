"""What stands below a table: warnings, what is missing, how to read it, how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .checks import warnings
from .document import Note
from .grids import PARTIAL
from .layout import TableLayout
from .results import CellResult
from .summary import Summary
from .text import NONE, machine_text

__all__ = ["make_notes"]

_SHORT_HASH = 12


def make_notes(summary: Summary, layout: TableLayout) -> tuple[Note, ...]:
    """All notes that have lines."""
    command = (layout.command,) if layout.command else ()
    notes = (
        Note("Warnings", tuple(warnings(summary, layout)), "warning"),
        Note("Missing", tuple(_missing(summary)), "warning"),
        Note("How to read it", tuple(_legend(summary))),
        Note("Published sources", tuple(_sources(summary, layout))),
        Note("Remarks", layout.notes),
        Note("Made", tuple(_made(summary.results))),
        Note("Command", command, code=True),
        Note("Checkpoints", tuple(_checkpoints(summary.results)), "record"),
        Note("Command of each cell", tuple(_commands(summary.results)), "record", code=True),
    )
    return tuple(note for note in notes if note.lines)


def _missing(summary: Summary) -> Iterable[str]:
    for place, missing in summary.places["missing"].items():
        seeds: dict[str, list[str]] = {}
        for seed, reason in missing.items():
            seeds.setdefault(reason or "no result yet", []).append(str(seed))
        for reason, numbers in seeds.items():
            which = f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            yield f"{place}, {which}: {reason.rstrip('.')}."


def _legend(summary: Summary) -> Iterable[str]:
    places = summary.places
    counts = sorted(set(places["seeds"]) - {0})
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
    if places[["score_partial", "normalised_partial", "share_partial"]].any(axis=None):
        yield f"{PARTIAL} partial: over fewer tasks than the table has."
    for label, mark in summary.marks.items():
        yield f"{mark} {label}."
    yield f"{NONE} no result, or not known."


def _sources(summary: Summary, layout: TableLayout) -> Iterable[str]:
    published = summary.published
    if published.empty or not layout.published:
        return
    yield (
        f"All of them on fusionbench checkpoints, {layout.published.backbone}, "
        f"{layout.published.task_set}. Differences: ours minus published, in points."
    )
    for (mark, source), rows in published.groupby(["mark", "source"], sort=False):
        noted = rows[rows["note"] != ""].drop_duplicates("label")
        remarks = noted["label"].str.cat(noted["note"], sep=": ")
        yield f"{mark} {source}." + "".join(f" {remark}." for remark in remarks)


def _made(results: Sequence[CellResult]) -> Iterable[str]:
    if not results:
        return
    first = min(result.started for result in results).date()
    last = max(result.finished for result in results).date()
    yield f"{first}" if first == last else f"{first} to {last}"
    yield from dict.fromkeys(machine_text(r.machine) for r in results if r.machine)
    versions: dict[str, dict[str, None]] = {}
    for result in results:
        for package, version in result.versions.items():
            versions.setdefault(package, {})[version] = None
    if versions:
        yield ", ".join(f"{package} {' and '.join(seen)}" for package, seen in versions.items())


def _checkpoints(results: Sequence[CellResult]) -> Iterable[str]:
    """Base and experts, each with the hashes that were seen."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for model in (model for result in results for model in result.models):
        if model.role != "merged":
            name = model.role if model.role == "base" else model.name
            hashes = seen.setdefault((name, model.source), {})
            if model.sha256:
                hashes[model.sha256[:_SHORT_HASH]] = None
    for (name, source), hashes in seen.items():
        yield f"{name}: {source}" + (f" (sha256 {', '.join(hashes)})" if hashes else "")


def _commands(results: Sequence[CellResult]) -> Iterable[str]:
    for result in results:
        if result.command:
            yield f"# {result.title}"
            yield result.command
