"""Results of cells that never ran, for tests of tables."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from featcal_fusionbench.report import Machine, ModelIdentity
from featcal_fusionbench.tables.layout import TableLayout
from featcal_fusionbench.tables.results import CELL_FILE, NO_CALIBRATOR, Cell, CellResult

STARTED = datetime(2026, 11, 29, 10, tzinfo=timezone.utc)
FINISHED = datetime(2026, 11, 30, 10, tzinfo=timezone.utc)
MACHINE = Machine(
    system="Linux 6 x86_64", cpu="AMD EPYC", cores=2, threads=1, memory_bytes=24 << 30
)


def layout(
    tasks: tuple[str, ...] = ("a", "b"),
    rows: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> TableLayout:
    """A table of two mergers and two calibrators."""
    return TableLayout(
        name="table",
        title="A table",
        tasks=tasks,
        rows=rows or {"ta": "Task Arithmetic", "ties": "TIES"},
        columns=columns or {NO_CALIBRATOR: "none", "featcal": "FeatCal"},
        **{"command": "featcal-table table", **kwargs},
    )


def cell(
    merger: str,
    calibrator: str = NO_CALIBRATOR,
    scores: Mapping[str, float] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> CellResult:
    """One cell of ``layout()``; its tasks are those of the scores unless they are given."""
    scores = {"a": 0.5, "b": 0.7} if scores is None else dict(scores)
    tasks = kwargs.pop("tasks", ("a", "b"))
    given: dict[str, Any] = {
        "table": "table",
        "size": "full",
        "metrics": {task: "accuracy" for task in tasks},
        "started": STARTED,
        "finished": FINISHED,
        "seconds": 10.0,
        "peak_memory_bytes": 1 << 30,
        "machine": MACHINE,
        "versions": {"torch": "2.13.0"},
        "command": f"fusion_bench method={merger} seed={seed}",
    }
    return CellResult(
        merger=merger,
        calibrator=calibrator,
        seed=seed,
        tasks=tasks,
        scores=scores,
        **{**given, **kwargs},
    )


def models(**sha256: str) -> tuple[ModelIdentity, ...]:
    """A base, experts and a merged model by their hashes: ``base``, ``merged`` or a task."""
    return tuple(
        ModelIdentity(
            role=name if name in ("base", "merged") else "expert",
            name=name,
            source=f"hub/{name}",
            sha256=value,
        )
        for name, value in sha256.items()
    )


def expected(*places: tuple[str, str, int], failure: str = "") -> dict[Cell, str]:
    """Cells that were to be run."""
    return {Cell(*place): failure for place in places}


def collect(directory: str | Path) -> list[CellResult]:
    """All results below a sweep's directory, sorted by path."""
    return [CellResult.read(path) for path in sorted(Path(directory).rglob(CELL_FILE))]
