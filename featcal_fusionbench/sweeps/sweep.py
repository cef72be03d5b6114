"""A table as it is run: planned, checked, then cell by cell, stage by stage."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..tables.results import Cell
from ..tables.write import WrittenTable, write_tables
from .builds import environment_of, make_builds
from .cells import Plan, Planner, Selection
from .command_line import environment_variables
from .compose import compose_config, compose_method
from .directory import Identity, Job, State, Status, SweepDirectory
from .errors import SweepError
from .experiment import Experiment
from .layout import layout_of
from .pools import Pools
from .preflight import Found, Place, check_sources, require_all, sources_of

__all__ = ["Sweep", "program", "to_run"]


@dataclass(frozen=True)
class Sweep:
    """A table, and the directory that its cells lie in.

    Attributes:
        experiment: The table.
        identity: What all its numbers share.
        directory: Where its cells lie.
        pools: Its composed pools.
        config_dir: A further directory with configs.
    """

    experiment: Experiment
    identity: Identity
    directory: SweepDirectory
    pools: Pools
    config_dir: Path | None = None

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        identity: Identity,
        output: Path,
        config_dir: Path | None = None,
    ) -> Sweep:
        """Look at a directory and compose the pools; nothing is written.

        Raises:
            ExperimentError: The pools cannot be composed, or name no tasks.
            PublishedNumberError: There is no such published value beside the table.
            SweepError: The directory is not this sweep's.
        """
        directory = SweepDirectory(output.absolute())
        directory.check(identity)
        overrides = [*experiment.pools, *experiment.overrides, *identity.overrides]
        pools = Pools.of(compose_config(overrides, config_dir), experiment.expert)
        if (published := experiment.published_values) is not None:
            published.resolve()  # wrong labels are found now, not after the last cell
        return cls(experiment, identity, directory, pools, config_dir)

    def plan(self, selection: Selection) -> list[Plan]:
        """Plan what is wanted and what that needs; see ``Planner``."""
        return Planner(
            experiment=self.experiment,
            size=self.identity.size,
            selection=selection,
            pools=self.pools,
            models=self.directory.models,
            extra=self.identity.overrides,
            config_dir=self.config_dir,
        ).plans()

    def statuses(self, plans: Sequence[Plan]) -> dict[Cell, Status]:
        """State of planned cells.

        Raises:
            SweepError: Results cannot be read; all of them are named.
        """
        return self.directory.statuses(plans, self.experiment.name)

    def sources(self, waiting: Sequence[Plan]) -> list[Found]:
        """What runs will read. That all their configurations compose is seen on the way."""
        methods: set[tuple[str, ...]] = set()
        others: dict[tuple[str, ...], int] = {}
        for plan in waiting:
            run = plan.runs[0]  # those of the experts differ in what is left out alone
            if run.task is None:
                methods.add(tuple(t for t in run.method if not _names_seed_or_model(t)))
            # each seed has a build of its own
            build = () if self.experiment.build is None else (f"seed={plan.cell.seed}",)
            kept = tuple(text for text in run.others if not _names_seed_or_model(text))
            others.setdefault((*kept, *build), plan.cell.seed)
        for method in sorted(methods):
            compose_method(method, self.config_dir)
        sources = []
        for overrides, seed in others.items():
            with environment_variables(environment_of(self.experiment.build, seed)):
                sources += sources_of(compose_config(overrides, self.config_dir))
        return check_sources(sources)

    def run(
        self,
        plans: Sequence[Plan],
        launcher: Sequence[str] | None,
        *,
        retry_failed: bool = False,
    ) -> dict[Cell, Status]:
        """Run the cells that wait to be run; needed cells come before those that need them.

        Before that, all that they will read is looked for, and what is missing of an embedded
        benchmark is built. The first cell of all runs alone: what all runs would download or
        prepare at the same time (the hub's cache, tokenised data sets) is then there.

        Args:
            plans: All planned cells, in an order in which needed cells come first.
            launcher: Overrides that choose Hydra's launcher and set it; None: all runs in this
                process, one after the other.
            retry_failed: Whether cells that failed before are tried again.

        Returns:
            The states after all.

        Raises:
            SweepError: The directory is another sweep's or held by one, something is missing, or a
                launcher failed by itself.
        """
        table = self.experiment.name
        with self.directory.claim(self.identity):
            statuses = self.statuses(plans)
            waiting = to_run(plans, statuses, retry_failed=retry_failed)
            self._require_sources(waiting)
            self.directory.begin(self.identity)
            for batch in _batches(waiting, statuses):
                ready = [p for p in batch if not p.needs or self.directory.is_done(p.needs, table)]
                for plan in ready:
                    self.directory.write_job(self._job(plan, [] if launcher is None else program()))
                _launch([plan.cell.id for plan in ready], self.directory.path, launcher)
        return self.statuses(plans)

    def write_table(self, statuses: Mapping[Cell, Status], command: str) -> WrittenTable | None:
        """Write the table of all cells that are done into the sweep's directory.

        Args:
            statuses: State of the cells that belong into it.
            command: The command that makes it.

        Returns:
            What was written; None where no cell is done.
        """
        results = [s.result for s in statuses.values() if s.state is State.DONE and s.result]
        if not results:
            return None
        layout = layout_of(self.experiment, self.pools, statuses, command)
        return write_tables(results, layout, self.directory.path)

    def _require_sources(self, waiting: Sequence[Plan]) -> None:
        found = self.sources(waiting)
        if self.experiment.build and any(item.place is Place.MISSING for item in found):
            make_builds(self.experiment.build, sorted({plan.cell.seed for plan in waiting}))
            found = self.sources(waiting)
        require_all(found)

    def _job(self, plan: Plan, command: Sequence[str]) -> Job:
        return Job(
            table=self.experiment.name,
            size=self.identity.size,
            plan=plan,
            program=tuple(command),
            environment=environment_of(self.experiment.build, plan.cell.seed),
            directory=str(Path.cwd()),
        )


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


def _launch(cells: Sequence[str], sweep: Path, launcher: Sequence[str] | None) -> None:
    """Make cells in this process, one after the other, or start Hydra's multirun over them."""
    from . import job

    if launcher is None:
        for cell in cells:
            job.run_cell(sweep, cell)
    if launcher is None or not cells:
        return
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
    # Hydra's applications read the command line and nothing else
    before, sys.argv = sys.argv, ["featcal-table", *arguments]
    try:
        job.main()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise SweepError(
                "Hydra could not run the cells; its message stands above. Settings of the "
                "launcher are given as hydra.launcher.<name>=<value>."
            ) from error
    finally:
        sys.argv = before


def _names_seed_or_model(text: str) -> bool:
    key = text.partition("=")[0]
    return key == "seed" or key.endswith((".seed", ".merged_model"))
