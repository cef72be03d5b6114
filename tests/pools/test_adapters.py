"""Adapters as full weights: all kinds and layouts, and what is refused and named."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import peft
import pytest
import torch
from fusion_bench.models.linearized.linearized_model_utils import LinearizedModelWraper
from omegaconf import OmegaConf
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from random_models.shapes import ClipShape, T5Shape, Tower
from random_models.weights import fill
from safetensors.torch import load_file, save_file
from tiny import randn
from torch import Tensor, nn
from transformers import CLIPVisionModel, T5ForConditionalGeneration

from featcal_fusionbench.errors import ModelPoolError
from featcal_fusionbench.pools.adapter_entries import AdapterEntry, adapter_entry, plain_entry
from featcal_fusionbench.pools.adapters import merge_adapter, merged_copy
from featcal_fusionbench.pools.seq2seq_modelpool import load_lora_model

CONFIGS: dict[str, Any] = {
    getattr(k, "value", k): config for k, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QVF = ["q_proj", "v_proj", "fc1"]


@cache
def make(kind: str) -> Any:
    """A tiny base, always with the same weights: `clip`, `t5` with a tied head, or `flan-t5`."""
    if kind == "clip":
        return fill(ClipShape(Tower(32, 64, 2, 2)).vision_model())
    return fill(T5Shape(16, 4, 24, 1, 4, vocabulary=40, tied=kind == "t5").model("cpu"))


def tower() -> Any:
    """A CLIP vision tower of its own."""
    return copy.deepcopy(make("clip"))


def t5(tied: bool) -> Any:
    """A T5 of its own, with its head tied to the embeddings or, as in FLAN-T5, not."""
    return copy.deepcopy(make("t5" if tied else "flan-t5"))


def outputs(model: Any) -> Tensor:
    """What a tower or a T5 computes for some inputs."""
    with torch.no_grad():
        if hasattr(model, "lm_head"):
            ids = torch.arange(24).reshape(2, 12)
            return model.eval()(input_ids=ids, labels=ids % 7).logits
        pixels = randn(3, 3, 16, 16, key="pixels").to(next(model.parameters()).dtype)
        return model.eval()(pixel_values=pixels)[0]


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def adapted(base: Any, kind: str, **options: Any) -> Any:
    """A model with an adapter whose trained weights are some way off their initial values."""
    torch.manual_seed(1)
    model = peft.PeftModel(base, CONFIGS[kind](**options))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.requires_grad:
                value.add_(0.05 * randn(*value.shape, key=key).float())
    return model.eval()


def write(model: Any, path: Path) -> dict[str, Tensor]:
    """Save an adapter; returns what its file holds."""
    model.save_pretrained(path)
    stored = {key: value.clone() for key, value in load_file(path / WEIGHTS).items()}
    if model.peft_config["default"].to_dict().get("bias") == "lora_only":
        # PEFT 0.14 forgets the biases, which later releases save under these names
        for key, value in model.named_parameters():
            if value.requires_grad and key.endswith("base_layer.bias"):
                stored[key] = value.detach().clone()
        save_file(stored, path / WEIGHTS)
    return stored


def random_states() -> tuple[Any, ...]:
    """The states of the generators that a caller may draw from."""
    return torch.get_rng_state().tolist(), str(numpy.random.get_state()), random.getstate()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LORA", {"target_modules": QVF, "r": 4}),
    ("LORA", {"target_modules": QVF, "use_dora": True}),
    ("LORA", {"target_modules": QVF, "use_rslora": True}),
    ("LORA", {"target_modules": QVF, "rank_pattern": {"fc1": 2}, "alpha_pattern": {"fc1": 3}}),
    ("LORA", {"target_modules": QVF, "bias": "lora_only"}),
    ("LORA", {"target_modules": QVF, "bias": "all"}),
    ("LORA", {"target_modules": QVF, "lora_bias": True}),
    ("LORA", {"target_modules": "all-linear"}),
    ("LORA", {"target_modules": r".*layers\.1\..*_proj"}),
    ("LORA", {"target_modules": QVF, "layers_to_transform": [1]}),
    ("LORA", {"target_modules": QVF, "modules_to_save": ["layer_norm1", "post_layernorm"]}),
    ("LORA", {"target_modules": ["patch_embedding", "position_embedding"]}),
    ("LORA", {"target_modules": QVF, "init_lora_weights": "pissa"}),
    ("LORA", {"target_modules": QVF, "init_lora_weights": "olora"}),
    ("LORA", {"target_modules": QVF, "trainable_token_indices": {"position_embedding": [0, 2]}}),
    ("LORA", {"target_modules": [], "target_parameters": ["fc1.weight"]}),
    ("ADALORA", {"target_modules": QVF, "init_r": 6, "target_r": 4, "total_step": 10}),
    ("ADAMSS", {"target_modules": QVF, "r": 8, "num_subspaces": 2}),
    ("BEFT", {"target_modules": QVF}),
    ("BOFT", {"target_modules": QVF, "boft_block_size": 4}),
    ("BONE", {"target_modules": QVF, "r": 4}),
    ("C3A", {"target_modules": QVF, "block_size": 16}),
    ("DEFT", {"target_modules": QVF, "r": 4}),
    ("DELORA", {"target_modules": QVF, "r": 4}),
    ("FOURIERFT", {"target_modules": QVF, "n_frequency": 20}),
    ("FROD", {"target_modules": QVF}),
    ("GLORA", {"target_modules": QVF, "r": 4}),
    ("GRALORA", {"target_modules": QVF, "r": 4, "gralora_k": 2}),
    ("HIRA", {"target_modules": QVF, "r": 4}),
    ("HRA", {"target_modules": QVF, "r": 4}),
    ("IA3", {"target_modules": ["q_proj", "fc2"], "feedforward_modules": ["fc2"]}),
    ("LN_TUNING", {"target_modules": ["layer_norm1"]}),
    ("LN_TUNING", {"target_modules": ["layer_norm1"], "modules_to_save": ["fc2"]}),
    ("LOHA", {"target_modules": QVF, "r": 4}),
    ("LOKR", {"target_modules": QVF, "r": 4}),
    ("MISS", {"target_modules": QVF, "r": 4}),
    ("OFT", {"target_modules": QVF, "r": 4, "oft_block_size": 0}),
    ("OSF", {"target_modules": QVF, "effective_rank": 4}),
    ("PEANUT", {"target_modules": QVF, "r": 4}),
    ("PSOFT", {"target_modules": QVF, "r": 4}),
    ("PVERA", {"target_modules": ["q_proj"], "r": 4}),
    ("RANDLORA", {"target_modules": ["q_proj"], "r": 4}),
    ("ROAD", {"target_modules": QVF, "group_size": 16}),
    ("SHIRA", {"target_modules": QVF, "r": 4}),
    ("SUPERTUNING", {"target_modules": QVF, "r": 4}),
    ("TINYLORA", {"target_modules": QVF, "r": 2, "u": 8}),
    ("TRAINABLE_TOKENS", {"target_modules": ["position_embedding"], "token_indices": [0, 3]}),
    ("UNILORA", {"target_modules": QVF, "r": 4, "theta_d_length": 16}),
    ("VBLORA", {"target_modules": QVF, "num_vectors": 8, "vector_length": 16}),
    (
        "VBLORA",
        {
            "target_modules": QVF,
            "num_vectors": 8,
            "vector_length": 16,
            "save_only_topk_weights": True,
        },
    ),
    ("VERA", {"target_modules": ["q_proj"], "r": 4}),
    ("VERA", {"target_modules": ["q_proj"], "r": 4, "save_projection": False}),
    ("WAVEFT", {"target_modules": QVF, "n_frequency": 20}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: str(value)[:60])
def test_merged_weights_compute_what_the_adapter_does(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if kind not in CONFIGS or options.keys() - {f.name for f in fields(CONFIGS[kind])}:
        pytest.skip(f"PEFT {peft.__version__} has no {kind} with {', '.join(options)}")
    model, base, plain = adapted(tower(), kind, **options), tower(), outputs(tower())
    stored, expected = write(model, tmp_path), outputs(model)
    assert gap(expected, plain) > 1e-4
    if gap(outputs(copy.deepcopy(model).merge_and_unload()), expected) > 1e-3:
        assert (peft.__version__, options.get("lora_bias")) == ("0.14.0", True)  # mended later
        with pytest.raises(ModelPoolError, match="'mnist'.*compute something else"):
            merge_adapter(base, str(tmp_path), name="mnist")
        return

    before = random_states()
    merged = merge_adapter(base, str(tmp_path), name="mnist")
    assert random_states() == before
    assert gap(outputs(merged), expected) < 1e-5
    assert gap(outputs(merged_copy(model, "mnist")), expected) < 1e-5
    assert torch.equal(outputs(model), expected)
    assert type(merged) is CLIPVisionModel and merged.state_dict().keys() == (
        tower().state_dict().keys()
    )
    assert not any("peft" in type(m).__module__ for m in merged.modules())
    assert not [key for m in merged.modules() for key in vars(m) if "peft" in key]

    lost = sorted(stored)[-1]
    save_file({key: value for key, value in stored.items() if key != lost}, tmp_path / WEIGHTS)
    with pytest.raises(ModelPoolError, match=f"'mnist'.*({re.escape(lost)}|holds no tensors)"):
        merge_adapter(tower(), str(tmp_path), name="mnist")
    save_file({**stored, "base_model.model.nowhere": torch.ones(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelPoolError, match="'mnist'.*no place.*base_model.model.nowhere"):
        merge_adapter(tower(), str(tmp_path), name="mnist")


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LAYERS = [f"encoder.layers.{i}.self_attn.q_proj" for i in range(2)]


def write_lora(path: Path, prefix: str, **changes: Any) -> dict[str, Tensor]:
    """Write an adapter of the two layers' queries by hand; returns what it adds to each weight."""
    path.mkdir(exist_ok=True)
    stored, added = {}, {}
    for layer in LAYERS:
        down, up = (0.1 * randn(*s, key=f"{layer}/{s}").float() for s in ((4, 32), (32, 4)))
        stored |= {f"{prefix}{layer}.lora_A.weight": down, f"{prefix}{layer}.lora_B.weight": up}
        added[layer] = 2 * up @ down
    save_file(stored, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(LORA | changes))
    return added


@pytest.mark.parametrize("targets", [["q_proj"], LAYERS, "regex", "full names"], ids=str)
@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.vision_model.",  # the nested tower, or the tower in a whole CLIP
        "base_model.model.",  # the flat tower, or what is inside the nested one
        "vision_model.",
        "module.base_model.model.vision_model._orig_mod.",
        "_orig_mod.base_model.model.module.",
    ],
)
def test_adapters_of_either_layout_change_the_same_weights(
    prefix: str, targets: Any, tmp_path: Path
) -> None:
    nested = "vision_model." if "vision_model." in prefix else ""
    if targets == "regex":
        targets = nested.replace(".", r"\.") + r"encoder\.layers\.\d+\.self_attn\.q_proj"
    elif targets == "full names":
        targets = [nested + layer for layer in LAYERS]
    added = write_lora(tmp_path, prefix, target_modules=targets)
    base = tower()
    merged = merge_adapter(base, str(tmp_path), name="mnist")
    assert merged is base
    for key, value in tower().state_dict().items():
        change = added.get(key.removeprefix("vision_model.").removesuffix(".weight"))
        expected = value if change is None else value + change
        assert torch.allclose(merged.state_dict()[key], expected, atol=1e-6), key


def test_all_linear_is_found_in_every_layout(tmp_path: Path) -> None:
    stored = write(adapted(tower(), "LORA", target_modules="all-linear"), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"target_modules": "all-linear"}))
    one = outputs(merge_adapter(tower(), str(tmp_path), name="mnist"))
    assert gap(one, outputs(tower())) > 1e-3
    plain = {k.replace("vision_model.", ""): v for k, v in stored.items()}
    for prefix in ("", "vision_model."):
        new = {k.replace("model.encoder", f"model.{prefix}encoder"): v for k, v in plain.items()}
        save_file(new, tmp_path / WEIGHTS)
        assert torch.equal(outputs(merge_adapter(tower(), str(tmp_path), name="mnist")), one)


def test_precision_gradients_and_mode_are_the_bases(tmp_path: Path) -> None:
    write(adapted(tower(), "LORA", target_modules=QVF, modules_to_save=["fc2"]), tmp_path)
    expected = merge_adapter(tower(), str(tmp_path), name="mnist")
    base = tower().bfloat16().train()
    frozen = [key for key, _ in base.named_parameters()][::2]
    for key in frozen:
        base.get_parameter(key).requires_grad_(False)
    merged = merge_adapter(base, str(tmp_path), name="mnist")
    assert merged.training and {v.dtype for v in merged.parameters()} == {torch.bfloat16}
    assert [key for key, v in merged.named_parameters() if not v.requires_grad] == frozen
    assert gap(outputs(merged).float(), outputs(expected)) < 0.03


def edit(**changes: Any) -> Callable[[Path], None]:
    """A change of the adapter's configuration."""

    def change(path: Path) -> None:
        content = json.loads((path / CONFIG).read_text()) | changes
        (path / CONFIG).write_text(json.dumps(content))

    return change


def edit_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """A change of the adapter's tensors, in place."""

    def apply(path: Path) -> None:
        stored = {key: value.clone() for key, value in load_file(path / WEIGHTS).items()}
        change(stored)
        save_file(stored, path / WEIGHTS)

    return apply


def only_pickled(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(b"\x80\x04.")


FIRST = f"base_model.model.{LAYERS[0]}.lora_A.weight"
PROMPTS = {"num_virtual_tokens": 3, "task_type": "SEQ_2_SEQ_LM", "target_modules": None}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda p: (p / CONFIG).unlink(), "cannot be loaded: no adapter_config.json"),
    "damaged config": (lambda p: (p / CONFIG).write_text('{"r": 4'), f"{CONFIG} is cut off"),
    "config of another kind": (lambda p: (p / CONFIG).write_text("[4]"), "no JSON object"),
    "unknown type": (edit(peft_type="NEW"), "type 'NEW'.*install the release that saved"),
    "no type": (edit(peft_type=None), "type 'None'"),
    "unknown setting": (edit(new_way={"a": 1}), "sets new_way={'a': 1}.*install the release"),
    "wrong setting": (edit(r=-1), "ValueError"),
    "random start": (edit(init_lora_weights="pissa_niter_4"), "init_lora_weights='pissa_niter_4'"),
    "Megatron": (edit(megatron_config={"a": 1}), "Megatron"),
    "pickled": (only_pickled, "adapter_model.bin, which is pickled.*safe_serialization"),
    "no weights": (lambda p: (p / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "LFS pointer": (
        lambda p: (p / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "LFS pointer.*git lfs pull",
    ),
    "cut off": (
        lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-9]),
        f"{WEIGHTS} is cut off",
    ),
    "empty": (lambda p: (p / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is empty"),
    "NaN": (edit_tensors(lambda s: s[FIRST].fill_(float("nan"))), f"NaN or Inf in {FIRST}"),
    "another rank": (edit(r=3), rf"another shape.*{FIRST} \(4, 32\) for \(3, 32\)"),
    "another width": (
        edit_tensors(lambda s: s.update({FIRST: torch.zeros(4, 16)})),
        rf"another shape.*{FIRST} \(4, 16\) for \(4, 32\)",
    ),
    "integers": (edit_tensors(lambda s: s.update({FIRST: s[FIRST].char()})), f"{FIRST} torch.int8"),
    "twice": (
        edit_tensors(lambda s: s.update({f"module.{FIRST}": s[FIRST].clone()})),
        f"{FIRST} twice",
    ),
    "no targets": (edit(target_modules=["nowhere"]), "nowhere"),
    "more targets": (edit(target_modules=["q_proj", "k_proj"]), "initial values.*k_proj.lora_A"),
    "fewer targets": (edit(target_modules=r".*0\.self_attn\.q_proj"), f"no place.*{LAYERS[1]}"),
    "another nesting": (
        edit(target_modules=r"vision_model\.encoder\.layers\.0\.self_attn\.q_proj"),
        "vision_model",
    ),
    "a whole CLIP": (
        edit_tensors(
            lambda s: s.update({FIRST.replace("encoder", "text_model.encoder"): s[FIRST].clone()})
        ),
        "no place.*text_model.*a whole CLIP, of which the vision tower alone",
    ),
    **{
        kind: (edit(**PROMPTS, peft_type=kind), f"type {kind}, which cannot be merged into weights")
        for kind in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")
    },
    **{
        kind: (edit(peft_type=kind), f"{kind}.*(cannot be merged|does not take|does not know)")
        for kind in ("ADAPTION_PROMPT", "POLY", "XLORA", "CPT", "LILY", "SHADOW", "CARTRIDGE")
    },
    "aLoRA": (
        edit(alora_invocation_tokens=[1, 2]),
        "(LORA, which cannot be merged.*aLoRA|sets alora_invocation_tokens)",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_used_in_part_or_not_at_all_is_refused(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write_lora(tmp_path, "base_model.model.")  # as in the test above, where it is merged
    damage(tmp_path)
    with pytest.raises(ModelPoolError, match=message) as caught:
        merge_adapter(tower(), str(tmp_path), name="mnist")
    assert str(tmp_path) in str(caught.value)
    if "JSON" not in message and CONFIG not in message:
        assert "mnist" in str(caught.value)


Change = Callable[[Any], Any]


def nothing(model: Any) -> None:
    """Leave the model as it is."""


def for_saved_modules(value: Callable[[Any, str, Tensor], Tensor]) -> Change:
    """A change of the whole modules that an adapter brings."""

    def change(model: Any) -> None:
        for key, tensor in model.named_parameters():
            if "modules_to_save" in key:
                tensor.data.copy_(value(model, key, tensor))

    return change


all_equal = for_saved_modules(lambda _, __, tensor: randn(*tensor.shape, key="one").float())
as_it_was = for_saved_modules(
    lambda model, key, _: model.get_parameter(
        key.replace("modules_to_save.default", "original_module")
    )
)
SHARED = r"shared.weight = encoder.embed_tokens.weight = decoder.embed_tokens.weight"
Q = {"target_modules": ["q"]}
HEAD = Q | {"modules_to_save": ["lm_head"]}
WHOLE = Q | {"modules_to_save": ["lm_head", "shared", "embed_tokens"]}
TOKENS = Q | {"trainable_token_indices": {"shared": [1, 3]}}
TIES: dict[str, tuple[bool, dict[str, Any], Change, str | None]] = {
    "untied head": (False, HEAD, nothing, None),
    "norms": (True, Q | {"modules_to_save": ["final_layer_norm"]}, nothing, None),
    "tied head": (True, HEAD, nothing, f"{SHARED} = lm_head.weight"),
    "tied head as it was": (True, HEAD, as_it_was, None),
    "shared alone": (False, Q | {"modules_to_save": ["shared"]}, nothing, SHARED),
    "shared by LoRA": (False, {"target_modules": ["shared"]}, nothing, SHARED),
    "tied head by LoRA": (True, {"target_modules": ["lm_head"]}, nothing, SHARED),
    "untied head by LoRA": (False, {"target_modules": ["lm_head", "q"]}, nothing, None),
    "all, unequal": (True, WHOLE, nothing, SHARED),
    "all, equal": (True, WHOLE, all_equal, None),
    "tokens, tied": (True, TOKENS, nothing, None),
}


def tied_names(model: Any) -> set[str]:
    """All names of the tensor of a T5's embeddings."""
    named = model.named_parameters(remove_duplicate=False)
    return {key for key, value in named if value is model.shared.weight}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tied", "options", "change", "refused"), TIES.values(), ids=TIES.keys())
def test_what_the_base_ties_stays_tied_or_is_refused(
    tied: bool, options: dict[str, Any], change: Change, refused: str | None, tmp_path: Path
) -> None:
    if options.keys() - {f.name for f in fields(CONFIGS["LORA"])}:
        pytest.skip(f"PEFT {peft.__version__} has no {', '.join(options)}")
    base = t5(tied)
    if options is WHOLE and change is all_equal and base.shared is base.encoder.embed_tokens:
        pytest.skip("in transformers 4 PEFT cannot replace T5's embeddings: they are one module")
    model = adapted(base, "LORA", **options)
    change(model)
    write(model, tmp_path)
    for merge in (
        lambda: merge_adapter(t5(tied), str(tmp_path), name="glue-cola"),
        lambda: merged_copy(model, "glue-cola"),
    ):
        if refused:
            with pytest.raises(ModelPoolError, match=f"'glue-cola'.*{refused}.*modules_to_save"):
                merge()
            continue
        merged: Any = merge()
        assert gap(outputs(merged), outputs(model)) < 1e-5
        assert gap(outputs(merged), outputs(t5(tied))) > 1e-3
        assert merged.config.to_dict() == t5(tied).config.to_dict()
        assert tied_names(merged) == tied_names(t5(tied))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [40, 44])
def test_trained_embeddings_beside_an_adapter_are_used(
    tied: bool, rows: int, tmp_path: Path
) -> None:
    base = t5(tied)
    if rows != 40:
        base.resize_token_embeddings(rows)
    base.shared.weight.data.mul_(1.5)
    model = adapted(base, "LORA", target_modules=["q"])
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    if rows != 40:
        with pytest.raises(ModelPoolError, match=r"shared.weight \(44, 16\) for \(40, 16\)"):
            merge_adapter(t5(tied), str(tmp_path), name="glue-cola")
        return
    merged = merge_adapter(t5(tied), str(tmp_path), name="glue-cola")
    assert gap(outputs(merged), outputs(model)) < 1e-5
    assert tied_names(merged) == tied_names(t5(tied))


def two_adapters() -> Any:
    """A tower with the adapters `default`, in use, and `other`, which brings whole modules too."""
    model = adapted(tower(), "LORA", target_modules=QVF)
    other = {"target_modules": ["q_proj"], "modules_to_save": ["layer_norm1"]}
    model.add_adapter("other", CONFIGS["LORA"](**other))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if ".other" in key:
                value.add_(0.05 * randn(*value.shape, key=key).float())
    return model.eval()


def merged_then_disabled(model: Any) -> None:
    model.merge_adapter()
    model.base_model.disable_adapter_layers()


STATES: dict[str, Change] = {
    "first": nothing,
    "second": lambda m: m.set_adapter("other"),
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "second, disabled": lambda m: (m.set_adapter("other"), m.base_model.disable_adapter_layers()),
    "merged": lambda m: m.merge_adapter(),
    "merged, disabled": merged_then_disabled,
    "merged, then another": lambda m: (m.merge_adapter(), m.base_model.set_adapter("other")),
    "in training": lambda m: m.train(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_an_instance_is_merged_as_its_forward_uses_it(state: Change) -> None:
    model = two_adapters()
    state(model)
    training = model.training
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged = merged_copy(model, "mnist")
    assert merged.training == training and type(merged) is CLIPVisionModel
    assert all(value.requires_grad for value in merged.parameters())
    assert merged.state_dict().keys() == tower().state_dict().keys()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert gap(outputs(merged), outputs(model)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_two_adapters_at_once_and_what_is_no_change_of_weights() -> None:
    model = adapted(tower(), "LORA", target_modules=QVF)
    model.add_adapter("other", CONFIGS["LORA"](**{"target_modules": ["q_proj", "k_proj"]}))
    for key, value in model.named_parameters():
        if ".other" in key:
            value.data.add_(0.05 * randn(*value.shape, key=key).float())
    model.base_model.set_adapter(["default", "other"])
    assert gap(outputs(merged_copy(model, "mnist")), outputs(model)) < 1e-5

    linear = adapted(tower(), "LORA", target_modules=QVF)
    layer = linear.get_submodule("base_model.model").get_submodule(
        next(key for key, _ in tower().named_modules() if key.endswith("q_proj"))
    )
    holder: Any = next(m for m in linear.modules() if getattr(m, "q_proj", None) is layer)
    holder.q_proj = LinearizedModelWraper(layer)
    with pytest.raises(ModelPoolError, match="'mnist'.*linearised LoRA"):
        merged_copy(linear, "mnist")
    prompt = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    with pytest.raises(ModelPoolError, match="'glue-cola'.*PROMPT_TUNING, which cannot be merged"):
        merged_copy(peft.get_peft_model(t5(False), prompt), "glue-cola")


def test_loading_a_text_model_refuses_half_an_adapter(tmp_path: Path) -> None:
    t5(False).save_pretrained(tmp_path / "base")
    base = T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    model = adapted(base, "LORA", target_modules=["q", "v"])
    stored = write(model, tmp_path / "adapter")
    arguments = str(tmp_path / "base"), str(tmp_path / "adapter")
    assert gap(outputs(load_lora_model(*arguments)), outputs(model)) < 1e-5
    save_file({key: v for key, v in stored.items() if ".q." in key}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(
        ModelPoolError, match=r"adapter' does not fit the base '.*base'.*\.v\.lora_A"
    ):
        load_lora_model(*arguments)


VISION = "fusion_bench.models.linearized.vision_model"
BASE, ADAPTER = "openai/clip-vit-base-patch16", "tanganke/adapter"
CLIP_LORA = {"_target_": f"{VISION}.load_lora_vision_model_hf", "base_model_name": BASE,
             "peft_name": ADAPTER}  # fmt: skip
UPSTREAM = "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model"
T5_LORA = {"base_model_path": BASE, "peft_model_path": ADAPTER}
PLAIN = {"_target_": "transformers.CLIPVisionModel.from_pretrained",
         "pretrained_model_name_or_path": BASE}  # fmt: skip
ON_BASE = {"_target_": "peft.PeftModel.from_pretrained", "model": PLAIN, "model_id": ADAPTER}
FULL = {"_target_": f"{VISION}.load_fft_vision_model_hf", "model_name": BASE}
ENTRIES: list[tuple[dict[str, Any], AdapterEntry | str | None]] = [
    (CLIP_LORA, AdapterEntry(BASE, ADAPTER, {})),
    (CLIP_LORA | {"merge_and_unload": False}, AdapterEntry(BASE, ADAPTER, {})),
    (CLIP_LORA | {"return_vision_model": True}, AdapterEntry(BASE, ADAPTER, {})),
    (CLIP_LORA | {"revision": "x"}, None),
    ({"_target_": UPSTREAM, **T5_LORA}, AdapterEntry(BASE, ADAPTER, {})),
    ({"_target_": UPSTREAM, **T5_LORA, "is_trainable": True}, AdapterEntry(BASE, ADAPTER, {})),
    ({"_target_": UPSTREAM, **T5_LORA, "torch_dtype": "bfloat16"}, None),
    ({"_target_": UPSTREAM, "base_model_path": BASE}, None),
    ({"_target_": UPSTREAM, "peft_model_path": ADAPTER}, None),
    (
        {
            "_target_": "featcal_fusionbench.pools.seq2seq_modelpool.load_lora_model",
            **T5_LORA,
            "torch_dtype": "b",
        },
        AdapterEntry(BASE, ADAPTER, {"torch_dtype": "b"}),
    ),
    ({"_target_": "elsewhere.load_lora_model", **T5_LORA}, None),
    (ON_BASE, AdapterEntry(BASE, ADAPTER, {})),
    (ON_BASE | {"adapter_name": "x"}, None),
    (ON_BASE | {"model": CLIP_LORA}, None),
    (ON_BASE | {"model": BASE}, None),
    (PLAIN, BASE),
    (PLAIN | {"torch_dtype": "float16"}, None),
    (FULL, BASE),
    (FULL | {"return_vision_model": False}, BASE),
    (FULL | {"revision": "x"}, None),
]


@pytest.mark.parametrize(("entry", "meaning"), ENTRIES, ids=range(len(ENTRIES)))
def test_entries_that_mean_an_adapter_or_a_plain_model(entry: Any, meaning: Any) -> None:
    for config in (entry, OmegaConf.create(entry)):
        assert adapter_entry(config) == (meaning if isinstance(meaning, AdapterEntry) else None)
        assert plain_entry(config) == (meaning if isinstance(meaning, str) else None)


def test_entries_by_adapters_that_name_their_base(tmp_path: Path) -> None:
    write_lora(tmp_path, "", base_model_name_or_path=BASE)
    entry = {"_target_": "peft.AutoPeftModelForSeq2SeqLM.from_pretrained",
             "pretrained_model_name_or_path": str(tmp_path)}  # fmt: skip
    assert adapter_entry(entry) == AdapterEntry(BASE, str(tmp_path), {})
    assert adapter_entry(entry | {"torch_dtype": "b"}) == (
        AdapterEntry(BASE, str(tmp_path), {"torch_dtype": "b"})
    )
    assert adapter_entry(entry | {"subfolder": "x"}) is None
    edit(revision="v2")(tmp_path)
    assert adapter_entry(entry) == AdapterEntry(BASE, str(tmp_path), {"revision": "v2"})
    assert plain_entry(entry) is None
    edit(base_model_name_or_path=None)(tmp_path)
    with pytest.raises(ModelPoolError, match="names no base"):
        adapter_entry(entry)
    linearised = {"_target_": f"{VISION}.load_l_lora_vision_model_hf", "peft_name": ADAPTER}
    with pytest.raises(ModelPoolError, match=f"'{ADAPTER}'.*linearised LoRA"):
        adapter_entry(linearised)
    assert adapter_entry("a/path") is None and adapter_entry(nn.Linear(1, 1)) is None
