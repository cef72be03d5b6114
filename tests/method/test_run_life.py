"""A run from first to last: seeds, surroundings, signals, outputs, log directories."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from forks import run_forked
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.method import DareTaskArithmetic, TaskArithmeticAlgorithm, WUDIMerging
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from pico import Pico
from rich.console import Console
from torch import nn

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.calibration import CalibrationError
from featcal_fusionbench.errors import OutputError
from featcal_fusionbench.method import base, recorder
from featcal_fusionbench.method.base import WrappingMethod
from featcal_fusionbench.method.surgery import ProbSurgeryAlgorithm, RepresentationSurgeryAlgorithm
from featcal_fusionbench.process import claims, outputs, scratch
from featcal_fusionbench.process.interrupts import Terminated, deferred, terminable
from featcal_fusionbench.process.scratch import scratch_directory
from featcal_fusionbench.process.surroundings import seeded
from featcal_fusionbench.report import RunReport

METHODS: dict[str, Callable[..., WrappingMethod[Any, Any]]] = {
    "merge_only": MergeOnlyAlgorithm,
    "featcal": lambda **kwargs: FeatCalAlgorithm(**{"n_samples": 4, "n_heldout": 0, **kwargs}),
    "representation_surgery": lambda **kwargs: RepresentationSurgeryAlgorithm(
        n_samples=4, n_heldout=0, steps=1, **kwargs
    ),
    "prob_surgery": lambda **kwargs: ProbSurgeryAlgorithm(
        n_samples=4, n_heldout=0, rounds=1, batches_per_round=1, **kwargs
    ),
}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Logs are heard, also where another test's Hydra application has silenced them."""
    caplog.set_level(logging.INFO)
    for module in (base, recorder, scratch):
        monkeypatch.setattr(module.log, "disabled", False)


def dare() -> DareTaskArithmetic:
    return DareTaskArithmetic(0.3, sparsity_ratio=0.5, only_on_linear_weights=False)


def program(**settings: Any) -> SimpleNamespace:
    """What the methods read of FusionBench's program."""
    return SimpleNamespace(**{"seed": None, "taskpool": None, **settings})


def run(name: str, pool: BaseModelPool, _program: Any = None, **kwargs: Any) -> nn.Module:
    kwargs = {"merger": dare(), "output_dir": "out", **kwargs}
    method = METHODS[name](**kwargs)
    method._program = _program
    return method.run(pool)


def merged_digest(name: str, where: str = "out") -> str | None:
    report = RunReport.read(Path(where, f"{name}_report.json"))
    (digest,) = [model.sha256 for model in report.models if model.role == "merged"]
    return digest


def pool_for(name: str, pico: Pico) -> BaseModelPool:
    """Models in memory; the surgeries need a whole CLIP, hence paths."""
    if "surgery" not in name:
        return pico.instance_pool()
    models = {"_pretrained_": str(pico.base)} | {
        task: str(pico.expert(task)) for task in pico.tasks
    }
    data: Any = {task: str(pico.dataset(task)) for task in pico.tasks}
    return CLIPVisionModelPool(
        OmegaConf.create(models), processor=str(pico.base), train_datasets=data
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Untouchable(BaseAlgorithm):
    def run(self, modelpool: Any) -> Any:
        raise AssertionError("the merger was run")


# --- seeds -------------------------------------------------------------------------------------


def test_a_seed_gives_one_merged_model_whichever_method_takes_it(pico: Pico) -> None:
    """Of a merger that draws; the program's seed comes before the method's."""
    found: dict[int, set[str | None]] = {0: set(), 1: set()}
    for name in METHODS:
        pool = pool_for(name, pico)
        cases = [(0, None, 0), (1, None, 1), (0, 1, 1), (1, 0, 0)]
        for own, of_program, counts in cases if name == "merge_only" else cases[:2]:
            torch.rand(own + 3)  # what was drawn before must not matter
            run(name, pool, program(seed=of_program), seed=own)
            found[counts].add(merged_digest(name))
    inner = FeatCalAlgorithm(merger=dare(), n_samples=4, n_heldout=0)
    run("featcal", pico.instance_pool(), merger=inner, seed=1)
    found[0].add(merged_digest("featcal", "out/merger"))
    assert len(found[0]) == len(found[1]) == 1 and found[0] != found[1]


def test_seeded_takes_any_seed() -> None:
    for seed in (0, 2**32 + 5, 2**64 + 5):
        with seeded(seed):
            first = (random.random(), np.random.rand(), torch.rand(1).item())
        with seeded(seed):
            assert first == (random.random(), np.random.rand(), torch.rand(1).item())


def test_a_seed_that_does_nothing_is_named(pico: Pico) -> None:
    pool = pico.instance_pool()
    nested = MergeOnlyAlgorithm(merger=TaskArithmeticAlgorithm(scaling_factor=0.3))
    for kwargs, expected in (
        ({"seed": 1}, []),
        ({"seed": 1, "_program": program(seed=1)}, []),
        ({"seed": 1, "_program": program(seed=2)}, ["draws by seed=2, not by method.seed=1"]),
        ({"seed": 1, "merger": nested}, ["method.seed=1 has no effect"]),
    ):
        run("merge_only", pool, **kwargs)
        warnings = RunReport.read("out/merge_only_report.json").warnings
        assert len(warnings) == len(expected), warnings
        assert all(part in text for part, text in zip(expected, warnings, strict=True))
    with pytest.raises(CalibrationError, match="seed=-1 must be a whole number"):
        MergeOnlyAlgorithm(seed=-1)


class Drawing(BaseAlgorithm):
    """Draws from everywhere, seeds everything anew, and fails if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error

    def run(self, modelpool: Any) -> nn.Module:
        lightning.seed_everything(random.randrange(99), workers=True)
        torch.rand(1), np.random.rand(1)
        torch.set_default_dtype(torch.float64)
        if self._error:
            raise self._error
        return dare().run(modelpool)


def state() -> list[Any]:
    """All that a run could leave changed in its process."""
    variables = [os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")]
    numbers = np.random.get_state()
    return [
        random.getstate(),
        *(part.tolist() if isinstance(part, np.ndarray) else part for part in numbers),
        torch.get_rng_state().tolist(),
        [s.tolist() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        signal.getsignal(signal.SIGTERM),
        sys.stdout,
        *variables,
    ]


@pytest.mark.parametrize("error", [None, RuntimeError("no")], ids=["complete", "failed"])
@pytest.mark.parametrize("name", METHODS)
def test_the_caller_s_state_and_models_are_as_they_were(
    pico: Pico, name: str, error: Exception | None
) -> None:
    pool = pool_for(name, pico)
    models = [m.train() for m in pool._models.values() if isinstance(m, nn.Module)]
    before = state()
    with pytest.raises(RuntimeError, match="no") if error else nullcontext():
        run(name, pool, merger=Drawing(error))
    assert state() == before
    assert all(module.training for model in models for module in model.modules())
    assert all(p.requires_grad for model in models for p in model.parameters())


# --- surroundings ------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["featcal", "representation_surgery"])
def test_modes_of_the_caller_change_nothing(pico: Pico, name: str) -> None:
    pool = pool_for(name, pico)
    merger = WUDIMerging(iter_num=1)  # takes gradients
    plain = weights(run(name, pool, merger=merger))
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        torch.inference_mode(),
        torch.device("meta"),
        default_dtype(torch.float64),
    ):
        model = run(name, pool, merger=merger)
        found = weights(model)
    assert not any(p.is_inference() for p in model.parameters())
    assert all(torch.equal(found[key], plain[key]) for key in plain)


@pytest.mark.parametrize("name", ["merge_only", "featcal"])
def test_models_made_in_inference_mode_are_taken(pico: Pico, name: str) -> None:
    found = []
    for mode in (nullcontext(), torch.inference_mode()):
        pool = pico.instance_pool()
        with mode:  # here, since loading from a file makes ordinary tensors in either case
            for model in pool._models.values():
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        found.append(weights(run(name, pool, merger=WUDIMerging(iter_num=1))))
    plain, inferred = found
    assert all(torch.equal(inferred[key], plain[key]) for key in plain)


# --- what is only to be looked at --------------------------------------------------------------


class Full(io.StringIO):
    """A stream of a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "full")

    def flush(self) -> None:
        self.write("")


class Lost(BaseAlgorithm):
    """Prints, as many mergers do."""

    def run(self, modelpool: Any) -> nn.Module:
        print("merging", flush=True)
        return dare().run(modelpool)


def fails(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "full")


def break_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "write_figure", fails)


def break_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("featcal_fusionbench.report.fig")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def break_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "print", fails)


def break_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())


def break_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning.Fabric, "log_dict", fails)


@pytest.mark.parametrize(
    ("break_it", "warning"),
    [
        (break_figure, "featcal_drift.png could not be made: OSError"),
        (break_matplotlib, "featcal_drift.png could not be made: ModuleNotFoundError"),
        (break_tables, ""),
        (break_streams, ""),
        (break_logger, "The logger did not take the run's numbers"),
    ],
)
def test_what_is_only_to_be_looked_at_ends_no_run(
    pico: Pico,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    warning: str,
) -> None:
    pool = pico.instance_pool()
    with monkeypatch.context() as broken:
        break_it(broken)
        assert isinstance(run("featcal", pool, merger=Lost(), n_heldout=2), nn.Module)
    report = RunReport.read("out/featcal_report.json")
    assert report.status == "complete"
    assert any(warning in text for text in report.warnings) or not warning
    assert Path("out/featcal_drift.png").exists() == ("figure" in report.outputs)


def test_a_report_that_cannot_be_written_costs_no_model(
    pico: Pico, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it hide the error of a run that failed."""
    write = RunReport.write
    monkeypatch.setattr(
        RunReport, "write", lambda self, path: fails() if "out" in str(path) else write(self, path)
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert isinstance(run("merge_only", pico.instance_pool()), nn.Module)
    (kept,) = tmp_path.glob("*_merge_only_report.json")
    assert RunReport.read(kept).status == "complete" and str(kept) in caplog.text
    with pytest.raises(AssertionError, match="the merger was run"):
        run("merge_only", pico.instance_pool(), merger=Untouchable())


# --- signals and scratch -----------------------------------------------------------------------


def test_signals_end_the_block_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    mine: list[int] = []
    kept = signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    try:
        with terminable():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert mine == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        done: list[str] = []
        with pytest.raises(Terminated) as caught, terminable(), terminable():
            with deferred():
                signal.raise_signal(signal.SIGTERM)
                done.append("report")
            done.append("more")
        assert done == ["report"]
        assert caught.value.code == 128 + signal.SIGTERM and str(caught.value) == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        inside: list[Any] = []

        def elsewhere() -> None:
            with terminable(), deferred():
                inside.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert inside == [signal.SIG_DFL]
    finally:
        signal.signal(signal.SIGTERM, kept)
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_while_the_report_is_written_waits_for_it(
    pico: Pico, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunReport.write

    def interrupted(self: RunReport, path: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        write(self, path)

    monkeypatch.setattr(RunReport, "write", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("merge_only", pico.instance_pool())
    finally:
        signal.signal(signal.SIGINT, before)
    assert Path("out/merge_only_report.json").exists()


def test_what_killed_runs_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, other, unlocked = (
        tmp_path / f"{prefix}{'0' * 15}{n}"
        for n, prefix in enumerate((scratch._PREFIX, "featcal-other-", scratch._PREFIX))
    )
    for directory in (dead, other, unlocked):
        (directory / "expert").mkdir(parents=True)
    for directory in (dead, other):
        directory.with_name(directory.name + ".lock").touch()
    with scratch_directory() as first:
        assert not dead.exists() and str(dead) in caplog.text
        assert other.exists() and unlocked.exists()
        (first / "file").touch()
        with scratch_directory() as second:
            assert first != second and (first / "file").exists()
        assert oct(first.stat().st_mode & 0o777) == "0o700"
    kept = {other.name, f"{other.name}.lock", unlocked.name}
    assert {path.name for path in tmp_path.iterdir()} == kept
    monkeypatch.setattr(os, "getuid", lambda: -1)  # another user's
    dead.mkdir()
    dead.with_name(dead.name + ".lock").touch()
    with scratch_directory():
        assert dead.exists()


# Runs of the command, each in a fork. SIGINT
# arrives while modules are calibrated, the others before the merger runs.
FORKS = """
import json, os, signal, sys
sys.path[:] = [p for p in sys.path if p]
from fusion_bench.scripts.cli import _hydra_main
from fusion_bench.method import TaskArithmeticAlgorithm
import featcal_fusionbench.method.featcal
from featcal_fusionbench.method import recorder
from featcal_fusionbench.report import RichProgress
recorder.write_figure = lambda path, figure: path.touch()
run, done = TaskArithmeticAlgorithm.run, RichProgress.on_module
def start(name, overrides):
    number = getattr(signal, name, None)
    # ignored where the tests run in the background, or under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    def merge(self, pool):
        if number not in (None, signal.SIGINT):
            os.kill(os.getpid(), number)
        return run(self, pool)
    def on_module(self, result):
        done(self, result)
        if number == signal.SIGINT and self._modules == 5:
            os.kill(os.getpid(), number)
    TaskArithmeticAlgorithm.run, RichProgress.on_module = merge, on_module
    sys.argv = ["fusion_bench", *sys.argv[2:], *overrides]
    _hydra_main()
for name, overrides in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        start(name, overrides)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("featcal")]
    print("ENDED", json.dumps([name, status, len(left)]), flush=True)
"""
ENDS = {"SIGKILL": -9, "SIGTERM": 128 + 15, "SIGHUP": 128 + 1, "SIGINT": -2, "multirun": 0}


@pytest.fixture(scope="module")
def commands(pico: Pico, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the runs wrote, and of each its exit status and what it left to be removed."""
    cwd = tmp_path_factory.mktemp("commands")
    (cwd / "tmp").mkdir()
    save = "merged_model_save_path='{log_dir}/model'"
    runs: list[Any] = [
        (name, [f"path.log_dir=outputs/{name}", save, "taskpool=dummy"]) for name in list(ENDS)[:4]
    ]
    runs.append(("multirun", ["method.ridge_lambda=0.05,0.5,5", save, "--multirun"]))
    overrides = pico.overrides("method=featcal", "method.n_samples=4", "method.n_heldout=0")
    finished = run_forked(
        *(FORKS, json.dumps(runs), "--config-dir", str(pico.config_dir), *overrides),
        cwd=cwd,
        env={"TMPDIR": str(cwd / "tmp"), "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("ENDED")]
    ended = [json.loads(line.removeprefix("ENDED")) for line in lines]
    statuses = {name: status for name, status, _ in ended}
    # seen with either status, on one and the same release of Python: by the signal, and 1
    assert statuses.pop("SIGINT") in (ENDS["SIGINT"], 1), finished.stdout[-3000:]
    assert statuses == {k: v for k, v in ENDS.items() if k != "SIGINT"}, finished.stdout[-3000:]
    return cwd, ended


@pytest.mark.cli
@pytest.mark.slow
def test_a_signal_leaves_a_report_and_an_empty_temporary_directory(
    commands: tuple[Path, list[Any]],
) -> None:
    """And what SIGKILL leaves, the next run removes."""
    cwd, ended = commands
    assert [left for _, _, left in ended] == [2, 0, 0, 0, 0]  # a directory and its lock
    for name, error in (("SIGTERM", "Terminated: SIGTERM"), ("SIGHUP", "Terminated: SIGHUP"),
                        ("SIGINT", "KeyboardInterrupt")):  # fmt: skip
        report = RunReport.read(cwd / "outputs" / name / "featcal_report.json")
        assert report.status == "interrupted" and (report.error or "").startswith(error)
        assert report.data and not (cwd / "outputs" / name / "model").exists()
        modules = report.result.modules if report.result else []
        assert len(modules) == (5 if name == "SIGINT" else 0)


# --- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"merged_model_save_path": "file"}, ["merged_model_save_path=file", "file is a file"]),
        ({"merged_model_save_path": "file/a/b"}, ["merged_model_save_path", "file is a file"]),
        ({"merged_model_save_path": "/proc/a/b"}, ["merged_model_save_path=/proc/a/b", "/proc"]),
        (
            {"merged_model_save_path": "adapter"},
            ["merged_model_save_path=adapter holds an adapter"],
        ),
        ({"merged_model_save_path": "dangling/a"}, ["merged_model_save_path", "dangling"]),
        ({"report_save_path": "report.json", "taskpool": 1}, ["./report.json", "no directory"]),
        ({"report_save_path": "file/r.json", "taskpool": 1}, ["report_save_path", "is a file"]),
        ({"report_save_path": "./folder", "taskpool": 1}, ["report_save_path", "a directory"]),
        ({"merged_model_save_path": "{log_dir}/{name}"}, ["merged_model_save_path", "braces"]),
    ],
)
def test_paths_that_cannot_be_written_are_named_before_anything_is_loaded(
    pico: Pico,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    words: list[str],
) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").touch()
    monkeypatch.setattr(WrappingMethod, "log_dir", str(tmp_path / "log"))
    monkeypatch.setattr(claims, "claim_log_dir", lambda user: None)
    monkeypatch.setattr("featcal_fusionbench.method.base.claim_log_dir", lambda user: None)
    pool = pico.instance_pool()
    monkeypatch.setattr(pool, "load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(OutputError) as caught:
        run("featcal", pool, program(**settings), merger=Untouchable())
    assert all(word in str(caught.value) for word in words)


def test_a_path_that_can_be_written_is_left_as_it_was(pico: Pico, tmp_path: Path) -> None:
    run("merge_only", pico.instance_pool(), program(merged_model_save_path="a/b/model"))
    assert not Path("a").exists()
    with pytest.raises(OutputError, match="is a directory: give the path of a file"):
        outputs.require_savable("out", "merged_model_save_path", is_directory=False)


def test_a_processor_that_cannot_be_saved_costs_no_model(
    pico: Pico, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.CLIPProcessor.save_pretrained", fails)
    save = program(merged_model_save_path="a/model")
    assert isinstance(run("featcal", pico.instance_pool(), save), nn.Module)
    assert "The processor could not be saved to a/model" in caplog.text


def test_too_little_room_for_the_model_is_found_before_merging(
    pico: Pico, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.nbytes for tensor in pico.load_base().state_dict().values())
    for free, error in ((size - 1, OutputError), (2 * size, AssertionError)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(outputs.shutil, "disk_usage", lambda path, usage=usage: usage)
        for name in ("merge_only", "featcal", "representation_surgery"):
            save = program(merged_model_save_path="a/model")
            with pytest.raises(error, match="merged_model_save_path=a/model|the merger was run"):
                run(name, pool_for(name, pico), save, merger=Untouchable())


# --- log directories ---------------------------------------------------------------------------


def test_whose_directory_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who took it before; a claim that is refused changes nothing."""
    file = tmp_path / "log/claim.json"
    now = time.time()
    here = claims._Run(claims.platform.node(), os.getpid(), claims._PROCESS, now, None, None)
    sweep = replace(here, sweep="sweep", job=0)
    elsewhere = replace(here, host="other", process="other")
    cases: list[tuple[Any, tuple[str | None, int | None], bool]] = [
        (None, (None, None), True),
        ("cut o", (None, None), True),
        (here, (None, None), True),  # run again from Python
        (sweep, ("sweep", 0), True),
        (sweep, ("sweep", 1), False),
        (replace(sweep, host="other", claimed=0), ("sweep", 1), False),
        (replace(sweep, host="other", claimed=0), ("sweep", 0), True),  # queued again
        (replace(sweep, host="other", claimed=0), ("later", 1), True),
        (replace(elsewhere, claimed=now), (None, None), False),  # started in the same second
        (replace(elsewhere, claimed=0), (None, None), True),  # run again, later
        (replace(here, pid=os.getppid(), claimed=now), (None, None), False),
        (replace(here, pid=2**22 + 1, claimed=0), (None, None), True),  # has ended
    ]
    file.parent.mkdir()
    for owner, me, expected in cases:
        monkeypatch.setattr(claims, "_multirun", lambda me=me: me)
        before = owner if isinstance(owner, str) else json.dumps(asdict(owner)) if owner else ""
        file.write_text(before)
        assert claims._claim(file, "path.log_dir") is expected, (owner, me)
        assert (file.read_text() == before) is not expected
    alive = replace(here, pid=os.getppid(), claimed=now)
    monkeypatch.setattr(claims.psutil.Process, "create_time", lambda self: now + 10)
    assert not alive.is_alive  # its number was given to a later process


def job(pico: Pico, number: int, *overrides: str) -> dict[str, Any]:
    """Run a job of a multirun in this process, all jobs with one log directory."""
    return pico.run_program(
        "method=merge_only",
        "path.log_dir=outputs/log",
        "hydra.mode=MULTIRUN",
        f"hydra.job.num={number}",
        "hydra.sweep.dir=sweep",
        *overrides,
    )


def test_every_job_of_a_multirun_keeps_its_own_log_directory(pico: Pico, in_tmp_path: Path) -> None:
    """All that FusionBench writes goes there too; running a job again replaces its own."""
    for number in (0, 1, 1):
        scale = f"method.merger.scaling_factor=0.{number + 1}"
        job(pico, number, scale, "merged_model_save_path='{log_dir}/model'")
    models = []
    for directory in (Path("outputs/log"), Path("outputs/log-2")):
        report = RunReport.read(directory / "merge_only_report.json")
        models.append((directory / "model/model.safetensors").read_bytes())
        assert (directory / "program_report.json").exists()
        assert any(directory.glob("events*")) and (directory / "hydra_output").exists()
        moved = [text for text in report.warnings if "is another run's" in text]
        assert len(moved) == (directory.name == "log-2")
    assert models[0] != models[1] and not Path("outputs/log-3").exists()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("method.output_dir", "mine"),
        ("merged_model_save_path", "mine/model"),
        ("report_save_path", "mine/report.json"),
        ("method.merger.output_dir", "mine"),
    ],
)
def test_a_path_that_two_jobs_share_is_refused_by_name(
    pico: Pico, in_tmp_path: Path, setting: str, value: str
) -> None:
    overrides = [f"{setting}={value}"]
    if setting != "report_save_path":
        overrides.append("taskpool=dummy")
    if setting == "method.merger.output_dir":
        overrides.append("method@method.merger=merge_only")
    job(pico, 0, *overrides)
    written = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    assert written
    with pytest.raises(OutputError) as caught:
        job(pico, 1, *overrides)
    assert f"{setting}={value}" in str(caught.value) and "runtime.output_dir" in str(caught.value)
    assert written == {path: path.read_bytes() for path in written}
    if setting != "method.output_dir":  # there not even a report is written
        assert RunReport.read("outputs/log-2/merge_only_report.json").phases == ()


def test_a_log_that_cannot_be_moved_is_refused_with_the_remedy(
    pico: Pico, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(pico, 0)
    before = Path("outputs/log/merge_only_report.json").read_bytes()
    monkeypatch.setattr(claims, "_move", lambda loggers, root: None)  # as of other loggers
    with pytest.raises(OutputError, match=r"path.log_dir=.*hydra:runtime.output_dir"):
        job(pico, 1)
    assert Path("outputs/log/merge_only_report.json").read_bytes() == before


@pytest.mark.cli
@pytest.mark.slow
def test_a_real_multirun_keeps_every_report_and_model(commands: tuple[Path, list[Any]]) -> None:
    logs = commands[0] / "outputs/fabric_model_fusion"
    reports = [RunReport.read(path) for path in logs.rglob("featcal_report.json")]
    ridges = [report.settings.as_dict()["ridge_lambda"] for report in reports]
    assert sorted(ridges) == [0.05, 0.5, 5.0]
    models = {path.read_bytes() for path in logs.rglob("model/model.safetensors")}
    assert len(models) == len(list(logs.rglob("program_report.json"))) == 3
