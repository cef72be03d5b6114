"""Files that are complete or not there, and what JSON makes of values."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path

import pytest

from featcal_fusionbench.report import (
    ReportError,
    UnwritableDirectoryError,
    atomic_file,
    read_json,
    require_writable,
    write_json,
    write_text,
)
from featcal_fusionbench.report import files as files_module
from featcal_fusionbench.report.codec import dumps


def test_atomic_write_replaces_content_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")
    write_text(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    assert os.listdir(path.parent) == ["a.txt"]


def test_atomic_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "atomic", "")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_while_writing_leaves_the_old_file_alone(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(error), atomic_file(path) as file:
        file.write(b"ne")
        assert len(os.listdir(tmp_path)) == 2  # so the temporary file is in the same directory
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_failing_disk_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_module.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    with pytest.raises(UnwritableDirectoryError, match="No space"):  # it tries a real write
        require_writable(tmp_path, "x")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_require_writable_makes_the_directory_and_leaves_no_trace(tmp_path: Path) -> None:
    assert require_writable(tmp_path / "a" / "b", "x") == tmp_path / "a" / "b"
    assert os.listdir(tmp_path / "a" / "b") == []


def test_require_writable_names_directory_and_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnwritableDirectoryError, match="Set method.report_dir to") as caught:
            require_writable(directory, "method.report_dir")
        assert str(directory) in str(caught.value)


def test_json_is_strict_and_knows_what_to_do_with_unusual_values(tmp_path: Path) -> None:
    value = {
        1: math.nan,
        "up": math.inf,
        "down": -math.inf,
        "path": Path("a/b"),
        "tuple": (1, True, None),
        "empty": [[], {}],
        "bad file name": "\udcff",
    }
    write_json(tmp_path / "a.json", value)

    def refuse(token: str) -> None:
        raise AssertionError(token)

    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse) == {
        "1": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "path": "a/b",
        "tuple": [1, True, None],
        "empty": [[], {}],
        "bad file name": "\udcff",
    }


def test_tokens_that_are_not_json_are_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps([math.nan])
    (tmp_path / "a.json").write_text("[Infinity]")
    with pytest.raises(ReportError, match="a.json is not a complete .*Infinity is not JSON"):
        read_json(tmp_path / "a.json")


def test_json_keeps_a_list_of_numbers_on_one_line(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"indices": list(range(256)), "nested": [[1], [2]]})
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert len(lines) == 7
    assert lines[1].startswith('  "indices": [0, 1, 2') and lines[1].endswith("255],")
