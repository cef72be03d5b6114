"""Forwards that pause, and the expert of which only the next piece is in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from greenlet import GreenletExit, greenlet
from tiny import (
    MODES,
    Toy,
    clip,
    family,
    hooks_of,
    images,
    llama,
    split,
    text,
    toy_inputs,
)
from torch import Tensor, nn

from featcal_fusionbench.calibration import (
    CalibrationSettings,
    ForwardError,
    Weights,
    build_plan,
    calibrate,
)
from featcal_fusionbench.calibration.expert_path import ExpertPath
from featcal_fusionbench.calibration.kinds import linear
from featcal_fusionbench.calibration.kinds.base import BatchFeatures
from featcal_fusionbench.calibration.suspended import PauseHooks, SuspendedForward
from featcal_fusionbench.calibration.trace import trace_forward


class Chain(nn.Module):
    """Three Linears in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@pytest.fixture
def chain() -> Iterator[Chain]:
    with torch.no_grad():
        yield Chain()


def start(model: nn.Module, x: Tensor | None = None) -> SuspendedForward:
    x = torch.ones(1, 2) if x is None else x
    return SuspendedForward(lambda: model(x), "the forward of task t, batch 3")


def test_changes_made_at_a_pause_are_what_the_resumed_forward_uses(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.capture("b", "b", output=False)
        hooks.at_entry("b")
        forwards = [start(chain, torch.full((1, 2), float(i))) for i in range(3)]
        for i, forward in enumerate(forwards):
            pause = forward.resume("b")
            assert pause.name == "b" and pause.last is None
            expected = chain.a(torch.full((1, 2), float(i)))
            assert torch.equal(pause.capture_of("b").input, expected)
        chain.b.weight.mul_(3)
        chain.a.weight.mul_(0)  # has run: must not matter
        outputs = [forward.finish() for forward in forwards]
    chain.a.weight.copy_(torch.zeros(2, 2))
    assert not hooks_of(chain)
    assert not torch.equal(outputs[0], outputs[1])
    assert all(forward.dead for forward in forwards)


def test_output_equals_a_fresh_forward(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        for name in "abc":
            hooks.at_entry(name)
        forward = start(chain)
        for name in "abc":
            forward.resume(name)
            chain.get_submodule(name).weight.mul_(-2)
        assert torch.equal(forward.finish(), chain(torch.ones(1, 2)))


def test_exit_hands_over_call_and_output(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.at_exit("b", pause="after b")
        pause = start(chain).resume("after b")
    assert pause.last is not None
    (x,) = pause.last.args
    assert pause.last.kwargs == {} and torch.equal(pause.last.output, chain.b(x))


def test_captures_are_those_of_the_pause_that_the_forward_is_bound_for(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.capture("a", "b", output=True)
        hooks.at_entry("b")
        hooks.capture("b", "end", output=False)  # hooks of one module run in their order
        hooks.at_entry("c", pause="end")
        forward = start(chain)
        first, second = forward.resume("b"), forward.resume("end")
        assert set(first.captures) == {"a"} and set(second.captures) == {"b"}
        output = first.captures["a"].output
        assert output is not None and torch.equal(output, second.captures["b"].input)
        assert second.captures["b"].output is None
        with pytest.raises(ForwardError, match="came to b without reaching c"):
            first.capture_of("c")


def test_other_forwards_pass_all_hooks_by(chain: Chain) -> None:
    expected = chain(torch.ones(1, 2))
    with PauseHooks(chain) as hooks:
        hooks.at_entry("a")
        hooks.at_exit("a")
        hooks.capture("a", "a", output=True)
        hooks.in_advance("b", "b", ["b"])
        hooks.release_inputs("b")
        hooks.release_input_of("b")
        x = torch.ones(1, 2)
        assert torch.equal(chain(x), expected) and x.numel() == 2
        forward = start(chain)
        forward.resume("a")
        assert torch.equal(chain(torch.ones(1, 2)), expected)


class Chains(nn.Module):
    """A chain within a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(2, 2), Chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(x))


def test_a_block_is_run_in_advance_for_each_pause_and_then_for_real(chain: Chain) -> None:
    model, calls = Chains(), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    with PauseHooks(model) as hooks:
        for name, output in (("block.a", False), ("block.b", True), ("block.c", False)):
            hooks.capture(name, name, output=output)
            hooks.in_advance("block", name, [name])
        forward = start(model)
        for name, ran in (
            ("block.a", ["before"]),
            ("block.b", ["block.a", "block.b"]),
            ("block.c", ["block.a", "block.b"]),
        ):
            pause = forward.resume(name)
            assert set(pause.captures) == {name} and calls == ran
            assert (pause.capture_of(name).output is None) == (name != "block.b")
            model.get_submodule(name).weight.mul_(-2)
            calls.clear()
        output = forward.finish()
        assert calls == ["block.a", "block.b", "block.c", "block", ""]
        assert torch.equal(output, model(torch.ones(1, 2)))


def test_a_run_in_advance_leaves_nothing_but_the_captures(chain: Chain) -> None:
    model, seen = Chains(), []
    model.block.a.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    with PauseHooks(model) as hooks:
        hooks.capture("block.c", "c", output=False)
        hooks.in_advance("block", "c", ["block.c"])
        forward = start(model)
        pause = forward.resume("c")
        assert len(seen) == 1 and seen[0]() is None
        seen.append(weakref.ref(pause.captures["block.c"].input))
        del pause
        assert seen[1]() is None and not forward.dead


def test_a_run_in_advance_ends_through_code_that_catches_exceptions(chain: Chain) -> None:
    class Careful(Chain):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x

    model = Chains()
    model.block = Careful()
    with PauseHooks(model) as hooks:
        hooks.capture("block.b", "b", output=False)
        hooks.in_advance("block", "b", ["block.b"])
        forward = start(model)
        assert "block.b" in forward.resume("b").captures
        assert torch.equal(forward.finish(), model(torch.ones(1, 2)))


def test_a_module_that_runs_twice_is_found_in_the_real_run_too(chain: Chain) -> None:
    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.b(self.a(x))))

    model = Chains()
    model.block = Twice()
    with PauseHooks(model) as hooks:
        hooks.capture("block.b", "b", output=False)
        hooks.in_advance("block", "b", ["block.b"])
        forward = start(model)
        forward.resume("b")
        with pytest.raises(ForwardError, match=r"failed after b: .*block\.b ran once more"):
            forward.finish()


def test_tensors_are_released_where_the_hooks_say(chain: Chain) -> None:
    x = torch.ones(1, 2)
    own, model = x.detach(), Chains()
    embedded: list[Tensor] = []
    model.before.register_forward_hook(lambda _, __, output: embedded.append(output))
    with PauseHooks(model) as hooks:
        hooks.release_inputs("block")
        hooks.release_input_of("block.a")
        hooks.at_entry("block.a", pause="first")
        hooks.at_entry("block.c", pause="end")
        forward = SuspendedForward(lambda: model(own), "the forward", releasable=[own])
        forward.resume("first")
        assert own.numel() == 0 and x.numel() == 2  # the user's own tensor stays
        assert embedded[0].numel() == 2
        forward.resume("end")
        assert embedded[0].numel() == 0
        assert torch.equal(forward.finish(), model(x))


def test_what_is_about_to_be_handed_over_is_not_released(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.release_input_of("a")
        hooks.capture("a", "b", output=False)
        hooks.at_entry("b")
        pause = start(chain).resume("b")
        assert torch.equal(pause.captures["a"].input, torch.ones(1, 2))


def test_reading_what_was_released_is_an_error_with_its_place(chain: Chain) -> None:
    class Skips(Chains):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.before(x)
            return self.block(hidden) + hidden

    model = Skips()
    with PauseHooks(model) as hooks:
        hooks.release_input_of("block")
        hooks.at_entry("block")
        forward = start(model, torch.ones(3, 2))
        forward.resume("block")
        with pytest.raises(ForwardError, match="failed after block: RuntimeError: The size of"):
            forward.finish()


def test_planned_and_real_pauses_must_agree(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.at_entry("b")
        with pytest.raises(ForwardError, match="batch 3 came to b where c was planned.*Exclude"):
            start(chain).resume("c")
        forward = start(chain)
        forward.resume("b")
        with pytest.raises(ForwardError, match="batch 3 ended after b without reaching c"):
            forward.resume("c")
        with pytest.raises(ForwardError, match="batch 3 came to b although no pause"):
            start(chain).finish()


def test_failure_names_forward_and_place(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.at_entry("b")
        with pytest.raises(ForwardError, match="batch 3 failed after its start: RuntimeError: "):
            start(chain, torch.ones(1, 5)).resume("b")
        forward = start(chain)
        forward.resume("b")
        chain.c.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ForwardError, match="failed after b: ZeroDivisionError") as caught:
            forward.finish()
        assert isinstance(caught.value.__cause__, ZeroDivisionError) and forward.dead


def test_out_of_device_memory_says_what_to_lower(chain: Chain) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    chain.b.register_forward_pre_hook(fail)
    with PauseHooks(chain) as hooks:
        hooks.at_entry("a")
        forward = start(chain)
        forward.resume("a")
        with pytest.raises(ForwardError, match="out of device memory after a: lower batch_size"):
            forward.finish()


def test_interrupt_passes_through_unchanged(chain: Chain) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    chain.b.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), PauseHooks(chain) as hooks:
        hooks.at_entry("c")
        start(chain).resume("c")
    assert not [name for name in hooks_of(chain) if name != "b"]


def test_close_ends_a_forward_wherever_it_is(chain: Chain) -> None:
    left = []

    class Watched(Chain):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except GreenletExit:
                left.append("exit")
                raise

    model = Watched()
    with PauseHooks(model) as hooks:
        hooks.at_entry("b")
        paused, ended, unborn = start(model), start(model), start(model)
        paused.resume("b")
        ended.resume("b")
        ended.finish()
        for forward in (paused, ended, unborn):
            forward.close()
            forward.close()
            assert not forward
    assert left == ["exit"]


def test_a_forward_may_be_resumed_from_another_greenlet(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.at_entry("b")
        hooks.at_entry("c")
        forward = start(chain)
        forward.resume("b")
        pause = greenlet(lambda: forward.resume("c")).switch()
        assert pause.name == "c"
        assert torch.equal(forward.finish(), chain(torch.ones(1, 2)))


def test_handed_over_captures_are_not_kept_by_the_paused_forward(chain: Chain) -> None:
    with PauseHooks(chain) as hooks:
        hooks.capture("a", "end", output=True)
        hooks.at_entry("c", pause="end")
        forward = start(chain)
        pause = forward.resume("end")
        output = pause.captures["a"].output
        assert output is not None
        seen = weakref.ref(output)
        del pause, output
        # b read it and has returned: only the capture could have kept it
        assert seen() is None and not forward.dead


# --- what a calibration holds ----------------------------------------------------------------


def test_wide_features_of_the_expert_are_gone_after_their_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In granularity `module` the widest tensor, fc2's input, is held by no paused expert."""
    models = family(Toy())
    seen: dict[str, list[Any]] = {}

    class Watched(linear.LinearSums):
        def update(self, batch: BatchFeatures) -> None:
            super().update(batch)
            name = self._group.leader.name
            # all of earlier batches and tasks must be gone
            assert all(ref() is None for ref in seen.get(name, [])), name
            if name.endswith("down"):
                assert batch.expert is not None
                seen.setdefault(name, []).append(weakref.ref(batch.expert.input))

    monkeypatch.setattr(linear, "LinearSums", Watched)
    data = {task: split(toy_inputs(6, task), 2) for task in models.experts}
    models.calibrate(data)
    assert {name: len(refs) for name, refs in seen.items()} == {
        "blocks.0.down": 9,
        "blocks.1.down": 9,
    }


class CountingMapping(Mapping[str, Tensor]):
    """Weights read lazily, that count what they are asked for."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.asked: dict[str, int] = {}

    def __getitem__(self, name: str) -> Tensor:
        self.asked[name] = self.asked.get(name, 0) + 1
        return self._weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("lazily read weights are not listed")

    def __len__(self) -> int:
        raise AssertionError("lazily read weights are not counted")


@pytest.mark.parametrize("granularity", ["module", "block"])
def test_lazy_weights_are_asked_only_for_what_is_needed(granularity: Any) -> None:
    models = family(clip())
    settings = CalibrationSettings(
        granularity=granularity, statistics_dtype="float64", exclude=(r"layers\.1\.mlp",)
    )
    data = {task: split(images(4, task), 2) for task in models.experts}
    model = models.copy()
    plan = build_plan(model, data["a"][0], settings)
    lazy = {task: CountingMapping(weights) for task, weights in models.weights.items()}
    calibrate(model, models.base, lazy, data, plan, settings)
    expected, _ = models.calibrate(data, granularity=granularity, exclude=(r"layers\.1\.mlp",))
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in model.state_dict().items())
    planned = {module.name for module in plan.modules}
    for weights in lazy.values():
        for name, count in weights.asked.items():
            # once for the forward, once for the closed form of what is calibrated
            assert count <= 1 + (name.rpartition(".")[0] in planned), name
        late = [name for name in weights.asked if "post_layernorm" in name]
        assert not late
        if granularity == "module":
            assert not [name for name in weights.asked if "layers.1.mlp" in name]
        assert any("patch_embedding" in name for name in weights.asked)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_of_twenty_experts_one_piece_of_one_is_in_memory(mode: dict[str, Any]) -> None:
    """Whenever a tensor is read, all that are still alive are one expert's, of one block."""
    tasks = [f"task{i}" for i in range(20)]
    models = family(clip(layers=3), tasks=tasks)
    alive: list[tuple[weakref.ref[Tensor], str, str]] = []
    most = 0

    class Watched(CountingMapping):
        def __init__(self, task: str, weights: Mapping[str, Tensor]) -> None:
            super().__init__(weights)
            self.task = task

        def __getitem__(self, name: str) -> Tensor:
            nonlocal most
            value = super().__getitem__(name)
            alive.append((weakref.ref(value), self.task, name))
            alive[:] = [entry for entry in alive if entry[0]() is not None]
            assert {task for _, task, _ in alive} == {self.task}
            layers = {name.split("layers.")[1][0] for _, _, name in alive if "layers." in name}
            assert len(layers) <= 2  # the rest of a block and the beginning of the next
            most = max(most, sum(ref().nbytes for ref, *_ in alive))  # type: ignore[union-attr]
            return value

    data = {task: [images(2, task)] for task in tasks}
    settings = CalibrationSettings(**mode)
    model = models.copy()
    plan = build_plan(model, data["task0"][0], settings)
    lazy = {task: Watched(task, weights) for task, weights in models.weights.items()}
    calibrate(model, models.base, lazy, data, plan, settings)
    block = sum(p.nbytes for n, p in model.named_parameters() if "layers.1." in n)
    # what runs, and once more what the closed forms of the stage read
    assert 0 < most <= 2.1 * block


# --- the expert's path -----------------------------------------------------------------------


def resident_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the tensors that a model really holds, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in tensors
        if tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
        and tensor.is_floating_point()
        and tensor.numel() > 1
    }


def path_of(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[ExpertPath, Any]:
    trace = trace_forward(model, inputs)
    return ExpertPath(model, trace), trace


def test_only_the_segment_is_resident() -> None:
    models = family(Toy())
    inputs = toy_inputs(2, "a")
    path, trace = path_of(models.merged, inputs)
    assert resident_bytes(path.model) == {}
    assert all(bool(p.isnan().all()) for p in path.model.parameters())
    weights = models.weights["a"]
    for name in ("attention.q", "gate", "down"):
        call = trace.calls_of(f"blocks.0.{name}")[0]
        with path.resident(weights, call.enter - 1, call.exit) as model:
            own = {n for n in weights if n.startswith(f"blocks.0.{name}.")}
            assert set(resident_bytes(model)) == own
            for n in own:
                assert torch.equal(model.get_parameter(n), weights[n])
        assert resident_bytes(path.model) == {}
    everything = [call.enter for call in trace.calls_of("blocks.1")]
    with path.resident(weights, -1, everything[0]) as model:
        assert {n.split(".")[0] for n in resident_bytes(model)} == {"embed", "blocks"}
        assert not [n for n in resident_bytes(model) if n.startswith("blocks.1")]


def test_absent_again_after_an_exception() -> None:
    models = family(Toy())
    path, trace = path_of(models.merged, toy_inputs(2, "a"))
    weights: Weights = {k: v for k, v in models.weights["a"].items() if k != "head.weight"}
    with pytest.raises(KeyError, match=r"head\.weight"):
        with path.resident(weights, -1, trace.events + 1):
            pass
    with pytest.raises(ZeroDivisionError), path.resident(models.weights["a"], -1, trace.events):
        raise ZeroDivisionError
    assert resident_bytes(path.model) == {}
    assert all(bool(p.isnan().all()) for p in path.model.parameters())


class Functional(nn.Module):
    """Reads parameters without calling the modules that hold them, and tables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.unused = nn.Linear(6, 6)
        self.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("ids", torch.arange(6))
        self.original_table = self.table

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 6), x], dim=1) + self.table
        x = self.attention(x, x, x, need_weights=False)[0] + self.original_table
        x = self.blocks[0](x)
        x = nn.functional.linear(x, self.unused.weight) - self.mean
        return self.blocks[1](x)[..., self.ids]


def test_a_path_run_in_pieces_equals_the_expert_itself() -> None:
    models = family(Functional())
    merged, expert = models.merged, models.experts["a"]
    merged.get_buffer("mean").mul_(7)
    merged.original_table = merged.get_buffer("table")  # as rotary embeddings keep theirs
    merged.attention.register_buffer("table", merged.get_buffer("table"), persistent=False)
    x = toy_inputs(2, "a")["x"]
    path, trace = path_of(merged, {"x": x})
    stop = trace.calls_of("blocks.1")[0].enter
    with torch.no_grad(), PauseHooks(path.model) as hooks:
        hooks.at_entry("blocks.0")
        hooks.at_entry("blocks.1")
        forward = SuspendedForward(lambda: path.model(x), "path")
        event = -1
        for name in ("blocks.0", "blocks.1"):
            stop = trace.calls_of(name)[0].enter
            with path.resident(models.weights["a"], event, stop):
                forward.resume(name)
            event = stop
        with path.resident(models.weights["a"], event, trace.events + 1):
            output = forward.finish()
        assert torch.equal(output, expert(x))


def test_a_module_that_is_never_called_is_held_while_its_parent_runs() -> None:
    models = family(Functional())
    path, trace = path_of(models.merged, {"x": toy_inputs(2, "a")["x"]})
    ((attention,), (last,)) = (trace.calls_of(name) for name in ("attention", "blocks.1"))
    with path.resident(models.weights["a"], attention.enter, attention.exit) as model:
        assert {n for n in resident_bytes(model) if n.startswith("attention.out_proj")}
    with path.resident(models.weights["a"], last.enter, last.exit) as model:
        held = set(resident_bytes(model)) - {"table", "attention.table"}
    # what has no parent that is called may be read at any time
    whole = {"token", "mean", "unused.weight", "unused.bias"}
    assert held == whole | {"blocks.1.weight", "blocks.1.bias"}


def test_rotary_tables_are_the_model_s_own() -> None:
    models = family(llama())
    inputs = text([4, 3], "a")
    path, trace = path_of(models.merged, inputs)
    (table,) = [n for n, _ in models.merged.named_buffers() if n.endswith("rotary_emb.inv_freq")]
    assert torch.equal(path.model.get_buffer(table), models.merged.get_buffer(table))
    with torch.no_grad(), path.resident(models.weights["b"], -1, trace.events + 1) as model:
        assert torch.equal(model(**inputs).logits, models.experts["b"](**inputs).logits)
    # the merged model's own tensors are untouched
    assert not any(bool(p.isnan().any()) for p in models.merged.parameters())
