from __future__ import annotations

import ctypes
import platform

import psutil
import pytest
import torch

from featcal_fusionbench.calibration import host_memory

MIB = 2**20


@pytest.fixture(autouse=True)
def forget_the_library() -> None:
    host_memory._malloc_trim.cache_clear()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_holes_between_held_tensors_go_back_to_the_system() -> None:
    # glibc takes tensors from its heap once it has seen a larger one freed
    large = torch.ones(5 * MIB)
    del large
    tensors = [torch.ones(MIB // 8) for _ in range(600)]  # 300 MiB
    held = tensors[::2]
    del tensors
    before = psutil.Process().memory_info().rss
    host_memory.give_back_freed_memory()
    assert before - psutil.Process().memory_info().rss > 100 * MIB
    assert all(tensor.sum() == MIB // 8 for tensor in held)


@pytest.mark.parametrize("library", [OSError("no such library"), object()])
def test_another_c_library_is_left_alone(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> object:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    host_memory.give_back_freed_memory()
