"""RegMean++ for CLIP, which FusionBench's release cannot run, on the pico family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench.method import RegMeanAlgorithmForCLIPPlusPlus
from pico import Pico
from torch import Tensor, nn

from featcal_fusionbench.method.regmean_plusplus import ClipRegMeanPlusPlus

SETTINGS: dict[str, Any] = {
    "num_regmean_examples": 1000,  # all: FusionBench draws them from the global random state
    "exclude_param_names_regex": [],
    "reduce_non_diagonal_ratio": 0.9,
    "weight_transpose": True,
    "dataloader_kwargs": {"batch_size": 16, "num_workers": 0},
}


def tower(model: Any) -> Any:
    return getattr(model, "vision_model", model)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def reference(pico: Pico) -> Any:
    """The paper's algorithm, layer by layer, in float64, in one pass over all train inputs."""
    merged, pool = pico.load_base().double(), pico.instance_pool()
    experts = {task: pico.load_expert(task).double() for task in pico.tasks}
    for name in ("embeddings", "pre_layrnorm"):
        average(getattr(tower(merged), name), [getattr(tower(e), name) for e in experts.values()])
    hidden = {}
    for task in pico.tasks:
        images = [row["image"] for row in pool.load_train_dataset(task)]
        pixels = pool.load_processor()(images=images, return_tensors="pt")["pixel_values"]
        hidden[task] = tower(merged).pre_layrnorm(tower(merged).embeddings(pixels.double()))
    for index, layer in enumerate(tower(merged).encoder.layers):
        own = {task: tower(expert).encoder.layers[index] for task, expert in experts.items()}
        grams = {task: {} for task in own}
        for task, module in own.items():
            hooks = [
                linear.register_forward_pre_hook(
                    lambda _, args, grams=grams[task], name=name: grams.update(
                        {name: gram(args[0])}
                    )
                )
                for name, linear in module.named_modules()
                if isinstance(linear, nn.Linear)
            ]
            module(hidden[task], *masks(module))
            for hook in hooks:
                hook.remove()
        average(layer, list(own.values()))
        for name in grams[pico.tasks[0]]:
            left = sum(grams[task][name] for task in own)
            right = sum(grams[t][name] @ m.get_submodule(name).weight.T for t, m in own.items())
            layer.get_submodule(name).weight.copy_(torch.linalg.solve(left, right).T)
        hidden = {task: first(layer(h, *masks(layer))) for task, h in hidden.items()}
    return merged


def masks(layer: nn.Module) -> list[None]:
    names = layer.forward.__code__.co_varnames  # the causal mask is gone from newer releases
    return [None] * (1 + ("causal_attention_mask" in names))


def average(target: nn.Module, sources: list[nn.Module]) -> None:
    for name, value in target.named_parameters():
        value.copy_(torch.stack([source.get_parameter(name) for source in sources]).mean(0))


def gram(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    product = rows.T @ rows / len(rows)
    diagonal = torch.diag(product.diagonal())
    return diagonal + 0.9 * (product - diagonal)


def test_it_is_the_paper_s_algorithm(pico: Pico, in_tmp_path: Path) -> None:
    merged = ClipRegMeanPlusPlus(**SETTINGS).run(pico.instance_pool())
    expected = reference(pico).state_dict()
    assert type(merged) is type(pico.load_base())
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=2e-3, atol=2e-4)
    assert list(in_tmp_path.iterdir()) == []  # no cache of zero-shot heads is left behind


def test_settings_are_fusionbench_s_and_serialise() -> None:
    algorithm = ClipRegMeanPlusPlus(**SETTINGS)
    assert algorithm.config.reduce_non_diagonal_ratio == 0.9
    assert algorithm.config.dataloader_kwargs == SETTINGS["dataloader_kwargs"]


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("arguments", [1, 2, 3])
@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_of_all_releases(as_tuple: bool, arguments: int, wrapped: bool) -> None:
    class Layer(nn.Linear):
        def _run(self, x: Tensor) -> Any:
            output = super().forward(x)
            return (output, None) if as_tuple else output

    def one(self: Any, x: Tensor, **kwargs: Any) -> Any:
        return self._run(x)

    def two(self: Any, x: Tensor, attention_mask: Any, output_attentions: bool = False) -> Any:
        return self._run(x)

    def three(self: Any, x: Tensor, attention_mask: Any, causal_attention_mask: Any) -> Any:
        return self._run(x)

    Layer.forward = [one, two, three][arguments - 1]  # type: ignore[method-assign]

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    layer = Layer(4, 4)
    batches = [torch.randn(3, 2, 4), torch.randn(1, 2, 4)]
    algorithm = ClipRegMeanPlusPlus(**SETTINGS)
    outputs = algorithm.layer_batches_forward(Wrapper(layer) if wrapped else layer, batches)
    for batch, output in zip(batches, outputs, strict=True):
        torch.testing.assert_close(output, batch @ layer.weight.T + layer.bias)


def test_a_mended_fusionbench_still_works(
    pico: Pico, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on their main branch: a two-way mapping, and any layout of the vision tower."""
    from fusion_bench.method.regmean_plusplus.regmean_plusplus import RegMeanAlgorithmPlusPlus

    own = RegMeanAlgorithmPlusPlus._config_mapping | {"_dataloader_kwargs": "dataloader_kwargs"}
    monkeypatch.setattr(RegMeanAlgorithmForCLIPPlusPlus, "_config_mapping", own)
    monkeypatch.setattr(
        RegMeanAlgorithmForCLIPPlusPlus, "get_layers", lambda self, m: tower(m).encoder.layers
    )
    assert ClipRegMeanPlusPlus(**SETTINGS).run(pico.instance_pool())


@pytest.mark.cli
@pytest.mark.slow
def test_the_command(pico: Pico, tmp_path: Path) -> None:
    finished = pico.run_cli(
        "method=clip_regmean_plusplus", "method.num_regmean_examples=16", cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
