"""Runs what is pending of a table, stage by stage, through Hydra's multirun."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .cells import Cell, Plan
from .directory import Identity, State, Status, SweepDirectory
from .errors import SweepError

__all__ = ["program", "run_pending", "to_run"]


def to_run(
    plans: Sequence[Plan], statuses: Mapping[Cell, Status], *, retry_failed: bool
) -> list[Plan]:
    """The cells that a sweep would run, in order; those that failed only on demand.

    What a failed cell blocks runs as well where that one is tried again.
    """
    wanted = {State.PENDING, State.STALE}
    if retry_failed:
        wanted |= {State.FAILED, State.BLOCKED}
    return [plan for plan in plans if statuses[plan.cell].state in wanted]


def run_pending(
    plans: Sequence[Plan],
    directory: SweepDirectory,
    identity: Identity,
    launcher: Sequence[str],
    *,
    environments: Mapping[int, Mapping[str, str]] | None = None,
    retry_failed: bool = False,
) -> dict[Cell, Status]:
    """Run the pending cells; needed cells come before those that need them.

    The directory must be claimed. The first cell of all runs alone: what all runs would download or
    prepare at the same time (the hub's cache, tokenised data sets) is then there.

    Args:
        plans: All planned cells, in an order in which needed cells come first.
        directory: Where they lie.
        identity: What they share.
        launcher: Overrides that choose Hydra's launcher and set it.
        environments: Environment variables by seed.
        retry_failed: Whether cells that failed before are tried again.

    Returns:
        The states after all.

    Raises:
        SweepError: A launcher failed by itself.
    """
    statuses = directory.statuses(plans, identity.table)
    pending = {plan.cell for plan in to_run(plans, statuses, retry_failed=retry_failed)}
    for batch in _batches([plan for plan in plans if plan.cell in pending], statuses):
        ready = [plan for plan in batch if _ready(plan, directory, identity)]
        for plan in ready:
            environment = (environments or {}).get(plan.cell.seed, {})
            directory.write_job(plan, identity, program(), environment)
        if ready:
            _multirun([plan.cell.id for plan in ready], directory.path, launcher)
    return directory.statuses(plans, identity.table)


def program() -> list[str]:
    """FusionBench's command of this environment."""
    beside = Path(sys.executable).with_name("fusion_bench")
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "fusion_bench.scripts.cli"]


def _batches(pending: Sequence[Plan], statuses: Mapping[Cell, Status]) -> list[list[Plan]]:
    """By stage; before all others the first cell, if nothing has been done yet."""
    stages = sorted({plan.stage for plan in pending})
    batches = [[plan for plan in pending if plan.stage == stage] for stage in stages]
    fresh = not any(status.state is State.DONE for status in statuses.values())
    if fresh and batches and len(batches[0]) > 1:
        first, *others = batches[0]
        batches[:1] = [[first], others]
    return batches


def _ready(plan: Plan, directory: SweepDirectory, identity: Identity) -> bool:
    """Whether what a cell needs is there by now."""
    if plan.needs is None:
        return True
    return directory.is_done(plan.needs, identity.table)


def _multirun(cells: Sequence[str], sweep: Path, launcher: Sequence[str]) -> None:
    """Start Hydra's multirun over cells, in this process."""
    from . import job

    arguments = [
        "--multirun",
        *launcher,
        f"sweep='{sweep}'",
        "cell=" + ",".join(f"'{cell}'" for cell in cells),
        f"hydra.sweep.dir='{sweep / 'launcher'}'",
        "hydra.sweep.subdir=${hydra.job.num}",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        # the cells' own lines are the log; a launcher's would tell of jobs by their numbers
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
    ]
    with _command_line(["featcal-table", *arguments]):
        try:
            job.main()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise SweepError(
                    "Hydra could not run the cells; its message stands above. Settings of the "
                    "launcher are given as hydra.launcher.<name>=<value>."
                ) from error


@contextmanager
def _command_line(arguments: list[str]):
    """Give Hydra a command line: its applications know no other way in."""
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before
