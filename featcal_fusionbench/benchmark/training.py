"""What training is made of in every embedded benchmark: device, seeds, precision, schedule."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

Advance = Callable[[], object]
"""Called once a step, to move a progress bar."""


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@functools.cache
def low_precision_pays() -> bool:
    """Whether bfloat16 GEMMs are clearly faster than float32 ones here.

    They are on GPUs and on CPUs with native bfloat16; elsewhere they are emulated and slower. CPU
    flags are not public in torch, hence a measurement (a few milliseconds, best of five).
    """

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(512, 512, dtype=dtype, device=device())
        best = math.inf
        for _ in range(6):
            start = time.perf_counter()
            (matrix @ matrix).sum().item()
            best = min(best, time.perf_counter() - start)
        return best

    return device().type == "cuda" or seconds(torch.float32) > 1.5 * seconds(torch.bfloat16)


def mixed_precision() -> torch.autocast:
    """bfloat16 autocast where it pays; weights, norms and losses stay in float32."""
    return torch.autocast(device().type, torch.bfloat16, enabled=low_precision_pays())


def optimiser_and_schedule(
    parameters: list[nn.Parameter], steps: int, learning_rate: float, warmup: float, decay: float
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW with a linear warm-up, then a cosine to zero."""
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=decay, fused=True)
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    return optimiser, LambdaLR(optimiser, factor)


def index_batches(size: int, batch_size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Index batches over shuffled epochs, ``steps`` in all."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(pool) < batch_size:
            pool = torch.cat([pool, torch.randperm(size, generator=generator)])
        yield pool[:batch_size]
        pool = pool[batch_size:]
