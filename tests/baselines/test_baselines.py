"""The modules and their training against an implementation of its own, in float64.

The reference below takes no gradient from autograd and no step from an optimiser of torch: the
derivatives and Adam are written out, and the tasks are gone through in turn, step by step.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from featcal_fusionbench import baselines
from featcal_fusionbench.baselines import (
    ProbSurgeryModule,
    ProbSurgerySettings,
    Representations,
    RepresentationSurgerySettings,
    SurgeryModule,
    SurgerySettings,
    train_module,
)
from featcal_fusionbench.baselines.training import batch_indices, generator_of
from featcal_fusionbench.errors import SettingsError

WIDTH, TASKS = 6, ("mnist", "svhn", "dtd")


def representations(
    task: str, inputs: int = 10, positions: int = 1, dtype: torch.dtype = torch.float64
) -> Representations:
    generator = generator_of(0, task, f"data/{inputs}")
    merged = torch.randn(inputs, positions, WIDTH, generator=generator, dtype=dtype)
    shift = torch.randn(WIDTH, generator=generator, dtype=dtype)
    noise = torch.randn(merged.shape, generator=generator, dtype=dtype)
    mask = torch.arange(positions).expand(inputs, positions) <= (
        torch.arange(inputs)[:, None] % positions
    )
    return Representations(merged, merged + shift.relu() + 0.1 * noise, mask)


# --- the reference ----------------------------------------------------------------------------


class Adam:
    """Kingma and Ba's algorithm 1, for one array."""

    def __init__(self, rate: float) -> None:
        self.rate, self.step = rate, 0
        self.first: Any = 0.0
        self.second: Any = 0.0

    def __call__(self, value: Tensor, gradient: Tensor) -> Tensor:
        self.step += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first = self.first / (1 - 0.9**self.step)
        second = self.second / (1 - 0.999**self.step)
        return value - self.rate * first / (second**0.5 + 1e-8)


def gradients(
    weights: dict[str, Tensor], f: Tensor, target: Tensor, noise: Tensor | None, kl_weight: float
) -> dict[str, Tensor]:
    before = f @ weights["down"].T
    hidden = before * (before > 0)
    if noise is None:
        subtracted = hidden @ weights["up"].T
    else:
        mean, log_variance = hidden @ weights["mean"].T, hidden @ weights["log_variance"].T
        deviation = (log_variance / 2).exp()
        subtracted = mean + deviation * noise
    # d mean|f - s - t| / d s
    of_subtracted = -torch.sign(f - subtracted - target) / f.numel()
    if noise is None:
        heads = {"up": of_subtracted}
    else:
        rows = len(f)
        heads = {
            "mean": of_subtracted + kl_weight * mean / rows,
            "log_variance": of_subtracted * noise * deviation / 2
            + kl_weight * (log_variance.exp() - 1) / 2 / rows,
        }
    of_hidden = sum(gradient @ weights[name] for name, gradient in heads.items()) * (before > 0)
    return {
        "down": of_hidden.T @ f,
        **{name: gradient.T @ hidden for name, gradient in heads.items()},
    }


def order(generator: torch.Generator, settings: SurgerySettings) -> Iterator[Tensor]:
    for _ in itertools.count():
        left = torch.randperm(10, generator=generator)
        while len(left):
            yield left[: settings.train_batch_size]
            left = left[settings.train_batch_size :]


def reference(settings: SurgerySettings) -> dict[str, dict[str, Tensor]]:
    """All tasks' weights, trained in turn."""
    probabilistic = isinstance(settings, ProbSurgerySettings)
    heads = ("mean", "log_variance") if probabilistic else ("up",)
    weights, optimisers, orders, noises = {}, {}, {}, {}
    for task in TASKS:
        generator = generator_of(settings.seed, task, "initialisation")
        bound = 1 / math.sqrt(WIDTH)  # Kaiming-uniform with a = √5
        uniform = torch.rand(settings.hidden_width, WIDTH, generator=generator)
        weights[task] = {"down": ((2 * uniform - 1) * bound).double()}
        weights[task] |= {h: torch.zeros(WIDTH, settings.hidden_width).double() for h in heads}
        optimisers[task] = {name: Adam(settings.learning_rate) for name in weights[task]}
        orders[task] = order(generator_of(settings.seed, task, "batches"), settings)
        noises[task] = generator_of(settings.seed, task, "noise")
    for _ in range(settings.steps_per_task):
        for task in TASKS:
            data = representations(task)
            batch = next(orders[task])
            f, target = data.merged[batch, 0], data.expert[batch, 0]
            noise = None
            if probabilistic:
                noise = torch.randn(f.shape, generator=noises[task], dtype=torch.float64)
            kl_weight = getattr(settings, "kl_weight", 0.0)
            for name, gradient in gradients(weights[task], f, target, noise, kl_weight).items():
                weights[task][name] = optimisers[task][name](weights[task][name], gradient)
    return weights


@pytest.mark.parametrize(
    "settings",
    [
        RepresentationSurgerySettings(steps=60, train_batch_size=4, hidden_width=5),
        ProbSurgerySettings(
            rounds=3, batches_per_round=20, train_batch_size=4, hidden_width=7, kl_weight=0.03
        ),
    ],
)
def test_training_is_what_the_reference_does(settings: SurgerySettings) -> None:
    expected = reference(settings)
    for task in TASKS:
        module, result = train_module(task, representations(task), None, settings)
        assert result.steps == 60 and result.loss_end < result.loss_start
        found = {name.removesuffix(".weight"): v for name, v in module.state_dict().items()}
        assert found.keys() == expected[task].keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[task][name], rtol=1e-9, atol=1e-12)


def test_divergence_is_torch_s() -> None:
    module = ProbSurgeryModule(WIDTH, 4, kl_weight=1.0).double()
    torch.nn.init.normal_(module.mean.weight)
    torch.nn.init.normal_(module.log_variance.weight)
    features = torch.randn(5, WIDTH, dtype=torch.float64)
    hidden = module.down(features).relu()
    mean, log_variance = module.mean(hidden), module.log_variance(hidden)
    wanted = kl_divergence(
        Normal(mean, (0.5 * log_variance).exp()),
        Normal(torch.zeros_like(mean), torch.ones_like(mean)),
    )
    noise = generator_of(0, "a", "noise")
    with_divergence = module.loss(features, features, noise)
    module.kl_weight = 0.0
    without = module.loss(features, features, generator_of(0, "a", "noise"))
    torch.testing.assert_close(with_divergence - without, wanted.sum(-1).mean())


@pytest.mark.parametrize("module", [SurgeryModule(8, 3), ProbSurgeryModule(8, 3, 1e-4)])
def test_a_new_module_changes_nothing_and_has_no_bias(module: torch.nn.Module) -> None:
    assert not module(torch.randn(2, 5, 8)).any()
    assert all(name.endswith("weight") for name, _ in module.named_parameters())


def test_inference_subtracts_the_mean_alone() -> None:
    module = ProbSurgeryModule(WIDTH, 4, kl_weight=1e-4)
    torch.nn.init.normal_(module.log_variance.weight)
    assert not module(torch.randn(3, WIDTH)).any()


# --- properties -------------------------------------------------------------------------------

QUICK = RepresentationSurgerySettings(steps=12, train_batch_size=3, hidden_width=4)


@given(seed=st.integers(0, 2**40), positions=st.integers(2, 4))
@hypothesis_settings(max_examples=10, deadline=None)
def test_padding_never_matters(seed: int, positions: int) -> None:
    data = representations("a", inputs=7, positions=positions)
    settings = dataclasses.replace(QUICK, seed=seed)
    noise = torch.randn(data.merged.shape, dtype=torch.float64) * ~data.mask[..., None]
    changed = Representations(data.merged + noise, data.expert - noise, data.mask)
    module, result = train_module("a", data, data, settings)
    other, again = train_module("a", changed, changed, settings)
    assert result == again and result.rows == int(data.mask.sum())
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@given(inputs=st.integers(1, 40), size=st.integers(1, 17), seed=st.integers(0, 99))
def test_batches_go_through_all_inputs_again_and_again(inputs: int, size: int, seed: int) -> None:
    batches = batch_indices(inputs, size, generator_of(seed, "a", "batches"))
    epoch = math.ceil(inputs / size)
    for _ in range(3):
        seen = torch.cat([next(batches) for _ in range(epoch)])
        assert sorted(seen.tolist()) == list(range(inputs))


def test_global_random_state_does_not_matter_and_tasks_differ() -> None:
    settings = ProbSurgerySettings(rounds=1, batches_per_round=5)
    torch.manual_seed(1)
    first, _ = train_module("a", representations("a"), None, settings)
    torch.manual_seed(2)
    second, _ = train_module("a", representations("a"), None, settings)
    other, _ = train_module("b", representations("a"), None, settings)
    weights = [list(module.parameters()) for module in (first, second, other)]
    assert all(torch.equal(a, b) for a, b in zip(*weights[:2], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    assert not any(p.requires_grad for p in first.parameters())


def test_held_out_rows_are_measured_and_not_trained_on() -> None:
    module, result = train_module("a", representations("a"), representations("a", 4), QUICK)
    alone, without = train_module("a", representations("a"), None, QUICK)
    assert result.heldout_start is not None and result.heldout_end is not None
    assert without.heldout_start is None and without.heldout_end is None
    assert torch.equal(next(module.parameters()), next(alone.parameters()))


def test_a_training_that_diverges_is_an_error() -> None:
    data = representations("a")
    broken = Representations(data.merged, data.expert * math.nan, data.mask)
    with pytest.raises(FloatingPointError, match="learning_rate"):
        train_module("a", broken, None, QUICK)


def test_representations_must_fit_together() -> None:
    data = representations("a")
    with pytest.raises(ValueError, match="do not fit"):
        Representations(data.merged, data.expert[:5], data.mask)


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "value", "remedy"),
    [
        (kind, *case)
        for kind in (RepresentationSurgerySettings, ProbSurgerySettings)
        for case in [
            ("hidden_width", 0, "at least 1"),
            ("hidden_width", True, "at least 1"),
            ("learning_rate", 0, "above zero"),
            ("learning_rate", math.nan, "a number of at least 0"),
            ("learning_rate", "0.1", "a number of at least 0"),
            ("train_batch_size", 1.5, "at least 1"),
            ("train_on", "val", "one of train, test"),
            ("n_samples", 0, "at least 1"),
            ("n_heldout", -1, "at least 0"),
            ("seed", -1, "at least 0"),
            ("forward_dtype", "float16", "one of float32"),
        ]
    ]
    + [
        (RepresentationSurgerySettings, "steps", 0, "at least 1"),
        (ProbSurgerySettings, "rounds", 0, "at least 1"),
        (ProbSurgerySettings, "batches_per_round", None, "at least 1"),
        (ProbSurgerySettings, "kl_weight", -1e-4, "at least 0"),
    ],
)
def test_bad_settings_are_named_with_their_remedy(
    kind: type[Any], name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=remedy) as caught:
        kind(**{name: value})
    assert str(caught.value).startswith(name)


def test_defaults_are_the_authors() -> None:
    plain, prob = RepresentationSurgerySettings(), ProbSurgerySettings()
    assert (plain.hidden_width, plain.steps_per_task, plain.learning_rate) == (16, 1000, 1e-3)
    assert (prob.hidden_width, prob.steps_per_task, prob.kl_weight) == (128, 500, 1e-4)
    assert plain.train_batch_size == prob.train_batch_size == 16
    assert plain.n_samples == prob.n_samples == 256


@pytest.mark.parametrize("kind", [RepresentationSurgerySettings, ProbSurgerySettings])
def test_settings_survive_json(kind: type[Any]) -> None:
    settings = kind(learning_rate=1, train_on="test")
    assert kind(**json.loads(json.dumps(settings.as_dict()))) == settings


def test_the_package_knows_torch_and_of_this_project_only_the_shared_settings() -> None:
    folder = Path(baselines.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2 or node.module in {"errors", "settings"}, path
                assert (node.module or "").split(".")[0] not in {"fusion_bench", "transformers"}
