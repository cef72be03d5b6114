"""What a run takes from the process that it runs in: nothing, and it leaves everything as it was.

Left alone are settings of the process that trade precision for speed (float32 matmul precision,
TF32, cudnn's and determinism's flags, threads): they are the user's choice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

__all__ = ["own_surroundings", "seeded"]

_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
# lightning's seed_everything, which mergers call, leaves the seed here for other processes.
_SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@contextmanager
def own_surroundings(seed: int) -> Iterator[None]:
    """Run the block as in a fresh process, whatever modes of torch the caller is in.

    Gradients can be taken, autocast is off, tensors are made in float32 on the CPU, and the global
    random generators start from the seed. Afterwards all is as it was, also after an error.

    Args:
        seed: The seed, ≥ 0.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # ends no_grad too
        for kind in _DEVICE_TYPES:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        # Only where it is needed: it slows down every call of torch.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(seeded(seed))
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the global random generators start from a seed, and be as they were afterwards.

    They are Python's, numpy's and torch's, the latter on the CPU and on all CUDA devices.

    Args:
        seed: The seed, ≥ 0.
    """
    variables = {name: os.environ.get(name) for name in _SEED_VARIABLES}
    python, arrays = random.getstate(), np.random.get_state()
    try:
        # not lightning's isolate_rng: after an error it restores nothing
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # it takes no larger ones
            torch.manual_seed(seed % 2**64)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
