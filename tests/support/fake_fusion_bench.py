"""Stands in for the `fusion_bench` command where a test is about the sweep. Not a test module.

It writes down that it ran (a line in `FAKE_LOG`), saves a "model" and a report of scores where the
overrides say so, and fails, sleeps or leaves half a report where `FAKE_FAIL`, `FAKE_SLEEP` or
`FAKE_NONSENSE` is part of its directory.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    """Do what the overrides say."""
    values = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
    directory = Path(values["path.log_dir"])
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{directory}\n")
    print("the fake is at work", flush=True)
    if os.environ.get("FAKE_SLEEP", "\0") in str(directory):
        time.sleep(60)
    if os.environ.get("FAKE_FAIL", "\0") in str(directory):
        print("no luck today")
        return 3
    if merged := values.get("method.merged_model"):
        assert (Path(merged) / "model.safetensors").is_file(), merged
    if save := values.get("merged_model_save_path"):
        Path(save).mkdir(parents=True, exist_ok=True)
        (Path(save) / "model.safetensors").write_bytes(b"weights")
    scores = {task: {"accuracy": 0.5} for task in ("mnist", "svhn", "eurosat")}
    gone = {text.rpartition(".")[2] for text in sys.argv if text.startswith("~taskpool")}
    scores = {task: score for task, score in scores.items() if task not in gone}
    text = json.dumps(scores)
    if os.environ.get("FAKE_NONSENSE", "\0") in str(directory):
        text = text[:20]
    (directory / "program_report.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
