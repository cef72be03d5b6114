"""How the models of every embedded benchmark are trained: device, seeds, precision, steps."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator

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


def minimise(
    losses: Iterable[Tensor],
    parameters: Iterable[nn.Parameter],
    steps: int,
    learning_rate: float,
    advance: Advance,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    largest_norm: float = math.inf,
) -> None:
    """Train by AdamW with a linear warm-up, then a cosine to zero.

    Args:
        losses: Computes the loss of a step when it is asked for the next.
        parameters: What is trained.
        steps: Number of losses.
        learning_rate: Its peak.
        advance: Called once a step.
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: As of AdamW.
        largest_norm: Gradients with a larger norm are scaled down to it.
    """
    parameters = list(parameters)
    optimiser = torch.optim.AdamW(
        parameters, lr=learning_rate, weight_decay=weight_decay, fused=True
    )
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    schedule = LambdaLR(optimiser, factor)
    for loss in losses:
        optimiser.zero_grad()
        loss.backward()
        if largest_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters, largest_norm)
        optimiser.step()
        schedule.step()
        advance()


def index_batches(size: int, batch_size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Index batches over shuffled epochs, ``steps`` in all."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(pool) < batch_size:
            pool = torch.cat([pool, torch.randperm(size, generator=generator)])
        yield pool[:batch_size]
        pool = pool[batch_size:]
