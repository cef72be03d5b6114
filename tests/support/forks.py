"""Programs as forks of one process that has imported FusionBench: its start takes most of a run.

That process is itself a fork of pytest's, made before any test: it has what was imported by then.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from places import ROOT

_SECONDS = 600
_pipes: tuple[Any, Any] | None = None


def start_forks() -> None:
    """Make the process that programs are forks of; it ends with this one."""
    global _pipes
    read_jobs, write_jobs = os.pipe()
    read_answers, write_answers = os.pipe()
    if os.fork() == 0:
        os.close(write_jobs)
        os.close(read_answers)
        _serve(os.fdopen(read_jobs), os.fdopen(write_answers, "w"))
    os.close(read_jobs)
    os.close(write_answers)
    _pipes = os.fdopen(write_jobs, "w"), os.fdopen(read_answers)


def run_forked(
    code: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -c CODE ARGUMENTS`` would, stdout and stderr in one text.

    Variables that libraries read when they are imported have no effect: ``HF_HOME``, for one.

    Args:
        code: The program.
        arguments: Its arguments, in ``sys.argv``.
        cwd: Directory to run in.
        env: Variables to set.
    """
    assert _pipes is not None
    jobs, answers = _pipes
    variables = {**os.environ, **(env or {})}
    with tempfile.NamedTemporaryFile("r") as output:
        jobs.write(json.dumps([output.name, code, arguments, str(cwd), variables]) + "\n")
        jobs.flush()
        status = int(answers.readline())
        return subprocess.CompletedProcess(arguments, status, output.read())


def _serve(jobs: Any, answers: Any) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    for line in jobs:
        child = os.fork()
        if child == 0:
            os.close(answers.fileno())
            _run(*json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()
    os._exit(0)


def _run(
    output: str, code: str, arguments: list[str], cwd: str, variables: dict[str, str]
) -> NoReturn:
    """Become the program: its streams, directory, variables and path, and Python's own ending."""
    atexit._clear()
    tempfile.tempdir = None  # of the variables below
    for name, flags, streams in (
        (os.devnull, os.O_RDONLY, [0]), (output, os.O_WRONLY | os.O_TRUNC, [1, 2])
    ):  # fmt: skip
        opened = os.open(name, flags)
        for stream in streams:
            os.dup2(opened, stream)
    # not pytest's
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(_SECONDS)  # ends it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    # what an installed command sees: neither the current directory nor what is for tests alone
    own = [str(ROOT / "tests"), str(ROOT / "scripts")]
    sys.path[:] = [p for p in sys.path if p and not p.startswith(tuple(own))]
    sys.argv = ["fusion_bench", *arguments]
    status: Any = 1
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
