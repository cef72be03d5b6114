"""Models of a few thousand weights, their experts and inputs, made in memory for engine tests.

Weights come from a generator seeded by name, so that they do not depend on a release's
initialisation, and are large enough for attention and activations to matter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from random_models.shapes import ClipShape, T5Shape, Tower
from random_models.weights import departure, fill, generator
from torch import Tensor, nn

from featcal_fusionbench.calibration import (
    CalibrationResult,
    CalibrationSettings,
    RowRule,
    RowRules,
    build_plan,
    calibrate,
    uniform_rows,
)

Batches = list[dict[str, Any]]

MODES: list[dict[str, Any]] = [
    {"granularity": "module", "hold_activations": "always"},
    {"granularity": "module", "hold_activations": "never"},
    {"granularity": "block"},
]
"""The ways in which forwards wait, as settings."""


@dataclass(frozen=True)
class Family:
    """A base, its experts and a merged model, all of one architecture.

    Attributes:
        merged: the merged model. Calibrate a `copy` of it.
        base: weights of the base.
        experts: expert models by task.
    """

    merged: nn.Module
    base: dict[str, Tensor]
    experts: dict[str, nn.Module]

    def copy(self) -> nn.Module:
        """A fresh merged model."""
        return copy.deepcopy(self.merged)

    @property
    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The experts as the engine takes them."""
        return {task: dict(expert.state_dict()) for task, expert in self.experts.items()}

    def calibrate(
        self,
        data: Mapping[str, Batches],
        row_rules: RowRules = uniform_rows,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> tuple[nn.Module, CalibrationResult]:
        """Plan and calibrate a fresh copy (or `model`) in float64, or as the settings say."""
        model = self.copy() if model is None else model
        chosen = CalibrationSettings(**{"statistics_dtype": "float64"} | settings)
        plan = build_plan(model, next(iter(data.values()))[0], chosen, row_rules)
        return model, calibrate(model, self.base, self.weights, data, plan, chosen)


def randn(*shape: int, key: object) -> Tensor:
    """Standard normal float64 numbers that depend on the key alone."""
    return torch.randn(shape, generator=generator(key), dtype=torch.float64)


def family(
    model: nn.Module, tasks: Sequence[str] = ("a", "b", "c"), scaling: float = 0.3
) -> Family:
    """Experts around `model` as the base, merged by Task Arithmetic; all in float64.

    Args:
        model: any model; its weights are overwritten.
        tasks: names of the tasks; the expert depends on the name alone.
        scaling: weight of each task vector.
    """
    base = fill(model.double())
    merged = copy.deepcopy(base)
    experts = {}
    with torch.no_grad():
        for task in tasks:
            expert = experts[task] = copy.deepcopy(base)
            for name, value in expert.named_parameters():
                value.copy_(departure(name, value, task, step=0.3, shift=0.05))
                vector = value - base.get_parameter(name)
                merged.get_parameter(name).add_(vector, alpha=scaling)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    return Family(merged, weights, experts)


def split(inputs: Mapping[str, Tensor], size: int) -> Batches:
    """Cut inputs into batches of at most `size`."""
    count = len(next(iter(inputs.values())))
    return [
        {key: value[i : i + size] for key, value in inputs.items()} for i in range(0, count, size)
    ]


# --- inputs ----------------------------------------------------------------------------------


def images(count: int, key: object, size: int = 16) -> dict[str, Tensor]:
    """Pixels of `count` images."""
    return {"pixel_values": randn(count, 3, size, size, key=f"{key}/pixels")}


def text(lengths: Sequence[int], key: object, *, width: int = 0, side: str = "right") -> Any:
    """Token ids with padding, attention mask and the positions of the tokens among the real ones.

    Args:
        lengths: real tokens of each sequence; they depend on the key and the index alone.
        key: seeds the tokens.
        width: padded length, by default the longest.
        side: where the padding stands.
    """
    width = width or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        real = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, real] = torch.randint(3, 60, (length,), generator=generator(key, row))
        mask[row, real] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


@dataclass(frozen=True)
class MaskRows:
    """Weight 0 on padding: the rows of a mask among the inputs, whatever dimensions follow."""

    key: str = "attention_mask"

    def __call__(self, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        mask = inputs[self.key].to(features.device)
        mask = mask.reshape(*mask.shape, *[1] * (features.dim() - 1 - mask.dim()))
        return mask.expand(features.shape[:-1])


def mask_rows(module: str, block: int | None, blocks: int) -> RowRule | None:
    """Row rules that leave padding out of every module."""
    return MaskRows()


# --- transformers' models --------------------------------------------------------------------

_TEXT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
                         "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip


def clip(layers: int = 2) -> nn.Module:
    """A CLIP vision tower of 5 tokens."""
    return ClipShape(Tower(16, 32, layers, 2), projection=8).vision_model()


def clip_modules(model: nn.Module) -> list[list[str]]:
    """Names of the modules of a CLIP vision tower that are calibrated, block by block."""
    names = ["layer_norm1", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
             "self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2"]  # fmt: skip
    known = dict(model.named_modules())
    prefix = "vision_model." if "vision_model" in known else ""
    layers = len(known[f"{prefix}encoder.layers"])
    return [[f"{prefix}encoder.layers.{i}.{name}" for name in names] for i in range(layers)]


def llama() -> nn.Module:
    """A causal language model with grouped-query attention and RMSNorms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TEXT, num_key_value_heads=2, use_cache=False))


def qwen3() -> nn.Module:
    """Like Llama, with a norm on each head's queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_TEXT, num_key_value_heads=2, head_dim=8, use_cache=False)
    return Qwen3ForCausalLM(config)


def gpt2() -> nn.Module:
    """A model whose matrices are Conv1D, for which the engine knows no closed form."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=4, use_cache=False)
    )


def bert() -> nn.Module:
    """An encoder with LayerNorms after its residuals."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_TEXT))


def bert_classifier() -> nn.Module:
    """The same below a classification head."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_TEXT))


def dinov2() -> nn.Module:
    """A vision transformer with layer scale."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                          image_size=16, patch_size=8, mlp_ratio=2)  # fmt: skip
    return Dinov2Model(config)


def t5() -> nn.Module:
    """An encoder-decoder with tied embeddings, gated MLPs and relative positions."""
    shape = T5Shape(16, 4, 24, 2, 4, vocabulary=64, tied=True)
    return shape.model("cpu", use_cache=False)


# --- models of our own -----------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention that respects a mask of real tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, :] == 0, -torch.inf)
        return self.out(scores.softmax(-1) @ self.v(x))


class Block(nn.Module):
    """A pre-norm block with an RMSNorm, a LayerNorm and a gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Toy(nn.Module):
    """A transformer with every kind of module the engine calibrates; takes features and a mask."""

    def __init__(self, width: int = 6, hidden: int = 10, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(x)


TOY_MODULES = [
    [f"blocks.{i}.{name}" for name in ("norm1", "attention.q", "attention.k", "attention.v",
                                       "attention.out", "norm2", "gate", "up", "down")]
    for i in range(2)
]  # fmt: skip
"""The modules of a `Toy` that are calibrated, block by block."""


def toy_inputs(count: int, key: object, tokens: int = 4, width: int = 6) -> dict[str, Tensor]:
    """Features for a `Toy`; every second sequence ends in a padded row."""
    mask = torch.ones(count, tokens, dtype=torch.long)
    mask[1::2, -1] = 0
    return {"x": randn(count, tokens, width, key=f"{key}/x"), "attention_mask": mask}


def toy_data(tasks: Sequence[str] = ("a", "b", "c"), size: int = 3, count: int = 6) -> Any:
    """Batches for a `Toy`, by task."""
    return {task: split(toy_inputs(count, task), size) for task in tasks}


# --- looking at results ----------------------------------------------------------------------


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest absolute difference over two states with the same names."""
    assert one.keys() == other.keys()
    return max(
        (float((one[k].double() - other[k].double()).abs().max()) for k in one if one[k].numel()),
        default=0.0,
    )


def hooks_of(model: nn.Module) -> list[str]:
    """Names of the modules that carry a forward hook."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]


def tensors_of(output: Any) -> Iterator[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_of(value)
