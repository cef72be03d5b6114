#!/usr/bin/env python
r"""Time and memory of a calibration on random models of true shapes.

Prints CPU-seconds by phase and by block, the arithmetic done, its share of a matrix-product peak
measured in the same run, and the peak of memory beside the estimate, as a table and as JSON:

    python scripts/benchmark_speed.py --shape clip-vit-base-patch32 --tasks 8 --n 256 --blocks 3

Weights are random: the arithmetic does not depend on them. The experts are safetensors files in the
temporary directory, read as in a real run. Few blocks suffice: interior blocks cost the same each,
the last one differs in its row weights. CPU-seconds of several threads hold what they spend waiting
for each other: on a busy machine measure with --threads 1.

The time of the whole model is extrapolated: the blocks measured, and for each one left out another
interior block of its stack. Peak memory above the models does not depend on the number of blocks.
The peak of the whole process does, by the base and the merged model; --first keeps models of all
blocks in memory and calibrates the first few:

    python scripts/benchmark_speed.py --shape clip-vit-large-patch14 --tasks 20 --n 256 \
        --blocks 24 --first 2 --hold-activations never --threads 1

    python scripts/benchmark_speed.py --shape flan-t5-base --tasks 8 --n 256 --blocks 2

is an encoder and a decoder of two blocks each, on inputs of 128 tokens and answers of 4. What is
left out there: the experts' answers, which take about one more forward, and most of the vocabulary,
which is not calibrated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from random_models import shapes
from random_models.weights import departure, fill, save_weights
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from featcal_fusionbench.architectures import Architecture
from featcal_fusionbench.architectures.clip_vision import ClipVision
from featcal_fusionbench.architectures.t5 import T5
from featcal_fusionbench.calibration import (
    CalibrationSettings,
    ModuleResult,
    PhaseClock,
    Plan,
    SilentObserver,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.estimate import fit_to_memory
from featcal_fusionbench.calibration.trace import find_blocks
from featcal_fusionbench.pools.checkpoints import SafetensorsWeights, read_header
from featcal_fusionbench.report import describe_machine, write_json

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A published model's shape.

    Attributes:
        depths: Number of its blocks, by stack in forward order.
        make: Makes a random model with so many blocks per stack.
        draw: Draws so many random inputs.
        architecture: Row weights, and what paused forwards may release.
    """

    depths: tuple[int, ...]
    make: Callable[[int], Any]
    draw: Callable[[int, torch.Generator], Inputs]
    architecture: Architecture


def _clip(shape: shapes.ClipShape) -> Shape:
    def make(blocks: int) -> Any:
        return replace(shape, vision=replace(shape.vision, layers=blocks)).vision_model()

    def draw(count: int, generator: torch.Generator) -> Inputs:
        size = shape.image_size
        return {"pixel_values": torch.randn(count, 3, size, size, generator=generator)}

    return Shape((shape.vision.layers,), make, draw, ClipVision())


def _t5(shape: shapes.T5Shape, tokens: int = 128, answer: int = 4) -> Shape:
    vocabulary = 1024

    def make(blocks: int) -> Any:
        return replace(shape, layers=blocks, vocabulary=vocabulary).model("cpu")

    def draw(count: int, generator: torch.Generator) -> Inputs:
        ids, read = (
            torch.randint(2, vocabulary, (count, length), generator=generator)
            for length in (tokens, answer)
        )
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "decoder_input_ids": read,
            "decoder_attention_mask": torch.ones_like(read),
            "use_cache": False,
        }

    return Shape((shape.layers, shape.layers), make, draw, T5())


SHAPES = {
    name.rpartition("/")[2]: _clip(shape) if isinstance(shape, shapes.ClipShape) else _t5(shape)
    for name, shape in shapes.SHAPES["true"].items()
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

    def __init__(self, plan: Plan) -> None:
        self.seconds: dict[int, float] = defaultdict(float)
        self._index = {block.name: block.index for block in plan.blocks}
        self._last = time.process_time()

    def on_start(self, total_flops: float) -> None:
        self._last = time.process_time()

    def on_step(self, block: str, module: str, task: str, flops: float) -> None:
        self._charge(self._index[block])

    def on_module(self, result: ModuleResult) -> None:
        assert result.block is not None, "only blocks are calibrated here"
        self._charge(result.block)

    def _charge(self, block: int) -> None:
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


class RandomBatches:
    """Batches of random inputs, made when they are read, the same on each reading."""

    def __init__(self, shape: Shape, n: int, batch_size: int, seed: int) -> None:
        self._sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
        self._shape, self._seed = shape, seed

    def __iter__(self) -> Iterator[Inputs]:
        generator = torch.Generator().manual_seed(self._seed)
        for count in self._sizes:
            yield self._shape.draw(count, generator)


def whole_model(seconds: Mapping[int, float], shape: Shape, blocks: int, first: int) -> float:
    """Extrapolate CPU-seconds of the first blocks of each stack to the published model."""
    total = 0.0
    for stack, depth in enumerate(shape.depths):
        measured = [seconds[stack * blocks + i] for i in range(first)]
        interior = measured[1:-1] or measured
        total += sum(measured) + (depth - first) * sum(interior) / len(interior)
    return total


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


def lay_down_expert(
    base: Mapping[str, Tensor], unread: Sequence[str], path: Path
) -> SafetensorsWeights:
    """Write an expert, some way off the base, without the blocks that nothing will read."""
    skipped = tuple(f"{block}." for block in unread)
    tensors = {
        name: departure(name, value, path.stem)
        for name, value in base.items()
        if not name.startswith(skipped)
    }
    save_weights(path, tensors, torch.float32)
    return SafetensorsWeights(read_header(path))


def available_memory(device: torch.device) -> int:
    """Free bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One calibration, measured; the experts' files go into the directory."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    shape = SHAPES[options.shape]
    merged = fill(shape.make(options.blocks)).requires_grad_(False)
    base = {k: v.clone() for k, v in merged.state_dict().items() if v.is_floating_point()}
    blocks = find_blocks(merged)
    first = options.first or options.blocks
    chosen = [name for name in blocks if int(name.rpartition(".")[2]) < first]
    unread = [name for name in blocks if name not in chosen] if len(shape.depths) == 1 else []
    experts = {
        f"task{i}": lay_down_expert(base, unread, directory / f"task{i}.safetensors")
        for i in range(options.tasks)
    }
    data = {
        task: RandomBatches(shape, options.n, options.batch_size, seed=100 + i)
        for i, task in enumerate(experts)
    }
    merged = merged.to(device)
    settings = CalibrationSettings(
        granularity=options.granularity,
        include=tuple(rf"^{name}\..*{options.modules}" for name in chosen),
        hold_activations=options.hold_activations,
        n_samples=options.n,
        batch_size=options.batch_size,
        forward_dtype=options.forward_dtype,
        statistics_dtype=options.statistics_dtype,
    )
    example = shape.draw(1, torch.Generator().manual_seed(0))
    rules = shape.architecture.row_rules()
    releasable = shape.architecture.releasable(merged)
    peak_one = matmul_rate(torch.float32, device, threads=1)
    fit = fit_to_memory(
        build_plan(merged, example, settings, rules, releasable),
        merged,
        example,
        settings,
        tasks=options.tasks,
        flops_per_second=matmul_rate(torch.float32, device, torch.get_num_threads()),
        available_bytes=available_memory(device),
    )
    plan, estimate = fit.plan, fit.estimate
    timer, clock, flops = BlockTimer(plan), PhaseClock(device), FlopCounter()
    wall, cpu = time.perf_counter(), time.process_time()
    with MemoryWatch() as memory, flops:
        calibrate(merged, base, experts, data, plan, settings, observer=timer, clock=clock)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    ends = {i for i in timer.seconds if i % options.blocks in (0, options.blocks - 1)}
    interior = [v for k, v in timer.seconds.items() if k not in ends]
    per_block = sum(interior) / len(interior) if interior and len(shape.depths) == 1 else None
    above = memory.peak - memory.before
    estimated = estimate.activation_bytes + estimate.working_bytes + estimate.sums_bytes
    return {
        "options": vars(options),
        "machine": describe_machine(),
        "torch": torch.__version__,
        "sgemm_flops_one_core": peak_one,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "cpu_seconds_per_interior_block": per_block,
        "same_at_148_gflops": per_block and per_block * peak_one / REFERENCE_FLOPS,
        "cpu_seconds_by_block": {plan.blocks[i].name: v for i, v in timer.seconds.items()},
        "cpu_seconds_whole_model": whole_model(timer.seconds, shape, options.blocks, first),
        "blocks_whole_model": sum(shape.depths),
        "phases": [vars(cost) for cost in clock.costs()],
        "flops": flops.total,
        "share_of_peak": flops.total / cpu / peak_one if device.type == "cpu" else None,
        "holding": fit.holding,
        "peak_bytes": memory.peak,
        "peak_bytes_above_models": above,
        "peak_device_bytes": clock.costs()[0].peak_device_bytes,
        "estimate": vars(estimate),
        "measured_over_estimate": above / estimated if device.type == "cpu" else None,
    }


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    options = result["options"]
    title = (
        f"{options['shape']}, {options['tasks']} tasks, n={options['n']}, "
        f"{options['blocks']} blocks per stack, {options['granularity']}, "
        f"forwards {options['forward_dtype']}"
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
    for name, seconds in result["cpu_seconds_by_block"].items():
        row(f"  {name}", f"{seconds:.1f} CPU-s")
    row(
        f"all {result['blocks_whole_model']} blocks, extrapolated",
        f"{result['cpu_seconds_whole_model']:.0f} CPU-s",
    )
    row("arithmetic", f"{result['flops'] / 1e12:.2f} TFLOP")
    if result["share_of_peak"]:
        row("share of the sgemm peak", f"{result['share_of_peak']:.0%}")
    row("peak of the process", f"{result['peak_bytes'] / gib:.2f} GiB")
    row("peak above the models", f"{result['peak_bytes_above_models'] / gib:.2f} GiB")
    if result["peak_device_bytes"]:
        row("peak on the device", f"{result['peak_device_bytes'] / gib:.2f} GiB")
    estimate = result["estimate"]
    parts = [estimate[f"{part}_bytes"] / gib for part in ("activation", "working", "sums")]
    row("  estimated: held + working + sums", " + ".join(f"{part:.2f}" for part in parts) + " GiB")
    if result["measured_over_estimate"]:
        row("  measured / estimated", f"{result['measured_over_estimate']:.2f}")
    row("  estimated seconds", f"{estimate['seconds']:.0f}")
    Console().print(table, result["holding"])


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="clip-vit-base-patch32")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--n", type=int, default=256, help="inputs per task")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--first", type=int, help="calibrate only so many blocks of each stack")
    parser.add_argument("--modules", default="", help="and of them what this expression finds")
    parser.add_argument("--hold-activations", choices=["auto", "always", "never"], default="always")
    parser.add_argument("--granularity", choices=["module", "block"], default="module")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--forward-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--statistics-dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="featcal-") as directory:
        result = run(options, Path(directory))
    show(result)
    if options.json is not None:
        write_json(options.json, json.loads(json.dumps(result, default=_plain)))


def _plain(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dict__") else str(value)


if __name__ == "__main__":
    sys.exit(main())
