"""Runs FusionBench's command line in several directories, in one process. Not a test module.

Starting `fusion_bench` takes seconds, nearly all of them imports. This script does per case what
the command does after its imports: pick the primary config directory for the current directory,
and hand over to Hydra.

Standard input: JSON list of `{"cwd": ..., "args": [...]}`.
Standard output: JSON list of `{"code": ..., "out": ..., "err": ...}`.
"""

import contextlib
import io
import json
import os
import sys

# Python puts this script's directory first: an installed command has no such entry.
sys.path.pop(0)

import hydra  # noqa: E402
from fusion_bench.utils.hydra_utils import get_default_config_path  # noqa: E402


def app(cfg: object) -> None:
    """Stand in for the program: only flags that run nothing are probed."""
    raise AssertionError("the probe is for flags such as --cfg job")


def run(cwd: str, args: list[str]) -> dict[str, object]:
    """Run one command line."""
    os.chdir(cwd)
    sys.argv = ["fusion_bench", *args]
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main = hydra.main(
                config_path=get_default_config_path(),
                config_name="fabric_model_fusion",
                version_base=None,
            )
            main(app)()
        except SystemExit as exit_:
            code = exit_.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    json.dump([run(**case) for case in cases], sys.stdout)
