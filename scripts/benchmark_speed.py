#!/usr/bin/env python
"""Time and memory of a calibration on random models of true shapes.

Prints CPU-seconds by phase and by block, the arithmetic done, its share of a matrix-product peak
measured in the same run, and the peak of memory above the loaded models, as a table and as JSON:

    python scripts/benchmark_speed.py --shape clip-vit-base-patch32 --tasks 8 --n 256 --blocks 3

Weights are random: the arithmetic does not depend on them. Few blocks suffice: interior blocks cost
the same each, the last one differs in its row weights. CPU-seconds of several threads hold what
they spend waiting for each other: on a busy machine measure with --threads 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import CLIPVisionConfig, CLIPVisionModel

from featcal_fusionbench.architectures.clip_vision import clip_vision_rows
from featcal_fusionbench.calibration import (
    CalibrationSettings,
    ModuleResult,
    PhaseClock,
    SilentObserver,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.estimate import estimate_cost
from featcal_fusionbench.report import describe_machine, write_json

SHAPES: dict[str, dict[str, Any]] = {
    "clip-vit-base-patch32": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    "clip-vit-large-patch14": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
}
# The speed of one core in float32 at which the project's targets in CPU-seconds are stated.
REFERENCE_FLOPS = 148e9


class FlopCounter(TorchDispatchMode):
    """Counts the arithmetic of matrix products, convolutions and attention as it is dispatched.

    torch's own counter also follows the module hierarchy, which paused forwards interleave.
    """

    _in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm}
    _uncounted_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = self._in_place.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet == self._uncounted_attention:
            query, key = args[0], args[1]
            self.total += 4 * query.numel() * key.shape[-2]
        elif packet == torch.ops.aten.linalg_cholesky_ex:
            self.total += args[0].shape[-1] ** 3 / 3
        elif packet == torch.ops.aten.cholesky_solve:
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        return out


class BlockTimer(SilentObserver):
    """An observer that charges CPU time to blocks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.process_time()

    def on_start(self, total_flops: float) -> None:
        self._last = time.process_time()

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        self._charge(block.rpartition(".")[2])

    def on_module(self, result: ModuleResult) -> None:
        self._charge(str(result.block))

    def _charge(self, block: str) -> None:
        now = time.process_time()
        self.seconds[block] += now - self._last
        self._last = now


class MemoryWatch:
    """The peak of this process's memory while it is entered, sampled."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self.before = self.peak = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._process.memory_info().rss)


class RandomImages:
    """Batches of random images, made when they are read, the same on each reading."""

    def __init__(self, n: int, batch_size: int, size: int, seed: int) -> None:
        self._sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
        self._size, self._seed = size, seed

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for count in self._sizes:
            shape = (count, 3, self._size, self._size)
            yield {"pixel_values": torch.randn(shape, generator=generator)}


def matmul_rate(dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """FLOP/s of large matrix products, the best of some."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        (a @ b)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * size**3 / best


def perturbed(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """An expert's weights: the base's and some noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value
        + 0.02 * torch.randn(value.shape, generator=generator) * value.std().nan_to_num(0)
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One calibration, measured."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shape = SHAPES[options.shape]
    config = CLIPVisionConfig(**shape, num_hidden_layers=options.blocks)
    merged = cast(nn.Module, CLIPVisionModel(config).eval().requires_grad_(False))
    base = {k: v.clone() for k, v in merged.state_dict().items() if v.is_floating_point()}
    experts = {f"task{i}": perturbed(merged, i) for i in range(options.tasks)}
    data = {
        task: RandomImages(options.n, options.batch_size, shape["image_size"], seed=100 + i)
        for i, task in enumerate(experts)
    }
    merged = merged.to(device)
    settings = CalibrationSettings(
        granularity=options.granularity,
        n_samples=options.n,
        batch_size=options.batch_size,
        forward_dtype=options.forward_dtype,
        statistics_dtype=options.statistics_dtype,
    )
    example = {"pixel_values": torch.randn(1, 3, shape["image_size"], shape["image_size"])}
    plan = build_plan(merged, example, settings, clip_vision_rows(settings.nonclass_row_weight))
    peak_one = matmul_rate(torch.float32, device, threads=1)
    estimate = estimate_cost(
        plan,
        merged,
        settings,
        tasks=options.tasks,
        input_bytes=example["pixel_values"].nbytes,
        flops_per_second=matmul_rate(torch.float32, device, torch.get_num_threads()),
    )
    blocks, clock, flops = BlockTimer(), PhaseClock(device), FlopCounter()
    wall, cpu = time.perf_counter(), time.process_time()
    with MemoryWatch() as memory, flops:
        calibrate(merged, base, experts, data, plan, settings, observer=blocks, clock=clock)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    interior = [v for k, v in blocks.seconds.items() if k not in {"0", str(options.blocks - 1)}]
    per_block = sum(interior) / len(interior) if interior else None
    return {
        "options": vars(options),
        "machine": describe_machine(),
        "torch": torch.__version__,
        "sgemm_flops_one_core": peak_one,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "cpu_seconds_per_interior_block": per_block,
        "same_at_148_gflops": per_block and per_block * peak_one / REFERENCE_FLOPS,
        "cpu_seconds_by_block": dict(blocks.seconds),
        "phases": [vars(cost) for cost in clock.costs()],
        "flops": flops.total,
        "share_of_peak": flops.total / cpu / peak_one if device.type == "cpu" else None,
        "peak_bytes_above_models": memory.peak - memory.before,
        "peak_device_bytes": clock.costs()[0].peak_device_bytes,
        "estimate": vars(estimate),
    }


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    options = result["options"]
    title = (
        f"{options['shape']}, {options['tasks']} tasks, n={options['n']}, "
        f"{options['blocks']} blocks, {options['granularity']}, forwards {options['forward_dtype']}"
    )
    table = Table(title=title, show_header=False)
    gib = 2**30

    def row(label: str, value: str) -> None:
        table.add_row(label, value)

    row("sgemm of one core", f"{result['sgemm_flops_one_core'] / 1e9:.0f} GFLOP/s")
    row("wall / CPU seconds", f"{result['wall_seconds']:.1f} / {result['cpu_seconds']:.1f}")
    for phase in result["phases"]:
        row(f"  {phase['name']}", f"{phase['cpu_seconds']:.1f} CPU-s")
    if result["cpu_seconds_per_interior_block"]:
        row("an interior block", f"{result['cpu_seconds_per_interior_block']:.1f} CPU-s")
        row("  at 148 GFLOP/s", f"{result['same_at_148_gflops']:.1f} CPU-s")
    row("arithmetic", f"{result['flops'] / 1e12:.2f} TFLOP")
    if result["share_of_peak"]:
        row("share of the sgemm peak", f"{result['share_of_peak']:.0%}")
    row("peak above the models", f"{result['peak_bytes_above_models'] / gib:.2f} GiB")
    if result["peak_device_bytes"]:
        row("peak on the device", f"{result['peak_device_bytes'] / gib:.2f} GiB")
    estimate = result["estimate"]
    activations, sums = estimate["activation_bytes"] / gib, estimate["sums_bytes"] / gib
    row("  estimated activations + sums", f"{activations:.2f} + {sums:.2f} GiB")
    row("  estimated seconds", f"{estimate['seconds']:.0f}")
    Console().print(table)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="clip-vit-base-patch32")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--n", type=int, default=256, help="inputs per task")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--granularity", choices=["module", "block"], default="module")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--forward-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--statistics-dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    result = run(options)
    show(result)
    if options.json is not None:
        write_json(options.json, json.loads(json.dumps(result, default=_plain)))


def _plain(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else str(value)


if __name__ == "__main__":
    sys.exit(main())
