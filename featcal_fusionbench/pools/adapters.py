"""Adapters (PEFT) as full weights: every stored tensor is used, or the adapter is refused by name.

PEFT itself loads an adapter of which a part, or nothing, fits with a warning at most, and leaves
places without a tensor at their initial values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.config import PromptLearningConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelPoolError
from .adapter_entries import ADAPTER_CONFIG as _CONFIG
from .adapter_entries import NO_PLAIN_WEIGHTS
from .checkpoints import SafetensorsWeights, find_file, read_config, read_header, some

__all__ = ["merge_adapter", "merged_copy"]

_WEIGHTS, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
# What torch.compile, FSDP and activation checkpointing put into names.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# What PEFT holds an adapted module under, and what it removes from the names that it saves.
_HOLDERS = re.compile(r"\b(?:base_layer|original_module|token_adapter)\.")
# Adapters whose output is no fixed change of weights. Prompts are known by their configuration, and
# of what PEFT adds in later releases its own refusal to merge is passed on.
_NOT_WEIGHTS = {"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"}
# Later releases write these whatever the adapter is; the second is read with `use_qalora` alone.
_HARMLESS = {"peft_version", "qalora_group_size"}
# Initial values that leave the base as it is, or change it in a way that is found again.
_REPEATABLE = (True, False, None, "gaussian", "orthogonal", "eva", "pissa", "olora")
_KINDS = {getattr(kind, "value", kind): c for kind, c in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
_REST_OF_CLIP = {"text_model", "text_projection", "visual_projection", "logit_scale"}


def merge_adapter(base: nn.Module, source: str, *, name: str, platform: str = "hf") -> nn.Module:
    """Apply an adapter to a model and merge it into the weights.

    The adapter may have been trained on the model, on a CLIP vision tower in the other layout (with
    or without ``vision_model.`` in the names), or on the tower in a whole CLIP.

    Args:
        base: The model; it is changed, and is no longer of use where an error is raised.
        source: Directory or hub id of the adapter.
        name: The model's name in the pool, for messages.
        platform: Hub that ids refer to.

    Returns:
        The model, with the same class, structure and names.

    Raises:
        ModelPoolError: The adapter cannot be read, does not fit, would be used in part, or is of a
            kind that is no change of weights.
    """
    label = f"model {name!r} (the adapter {source!r})"
    raw = read_config(source, platform, _CONFIG)
    if raw is None:
        raise ModelPoolError(
            f"{label} cannot be loaded: no {_CONFIG} was found there. Give the directory or hub id "
            "that the adapter was saved to."
        )
    config = _peft_config(raw, label)
    stored = _stored_tensors(source, platform, label)
    mismatch = (
        f"model {name!r}: the adapter {source!r} does not fit the base "
        f"{getattr(base, 'name_or_path', '') or type(base).__name__!r}"
    )
    before, training = _outline(base), base.training
    gradients = {key: value.requires_grad for key, value in base.named_parameters()}
    root, stored = _layout(base, stored, label)
    is_known = isinstance(root, PreTrainedModel)
    if getattr(config, "target_modules", None) == "all-linear" and not is_known:
        # PEFT resolves it for transformers' models alone; a tower has no head, which it leaves out
        config.target_modules = [n for n, m in root.named_modules() if isinstance(m, nn.Linear)]
    with _own_randomness(base):
        try:
            model = PeftModel(root, config)
        except Exception as error:
            raise ModelPoolError(
                f"{mismatch}, or is of a kind ({config.peft_type.value}) that PEFT cannot apply to "
                f"it ({type(error).__name__}: {error})"
            ) from error
        ties = _untie(_inside(model))
        _load(model, config, stored, ties, mismatch)
        _merge(model, ties, label, config.peft_type.value)
    after = _outline(base)
    if after != before:
        changed = sorted({key for key, _ in before.items() ^ after.items()})
        raise ModelPoolError(f"{mismatch}: merging would change the structure, {some(changed)}.")
    for key, value in base.named_parameters():
        value.requires_grad_(gradients[key])
    return base.train(training)


def merged_copy(peft_model: nn.Module, name: str) -> nn.Module:
    """The plain model that computes what a model with adapters computes.

    What PEFT's forward uses is merged: the active adapters, none where they are disabled.

    Args:
        peft_model: A ``PeftModel``; it is not changed.
        name: Its name in the pool, for messages.

    Returns:
        A model of its own, of the base's class.

    Raises:
        ModelPoolError: An adapter is no change of weights, or unties tensors that the base ties.
    """
    label = f"model {name!r} (an instance of {type(peft_model).__name__})"
    configs: Mapping[str, Any] = getattr(peft_model, "peft_config")  # noqa: B009
    kinds = sorted({config.peft_type.value for config in configs.values()})
    for kind in kinds:
        _refuse_no_weights(kind, label)
    if any(type(m).__name__ == "LinearizedModelWraper" for m in peft_model.modules()):
        raise ModelPoolError(f"{label} is linearised LoRA, {NO_PLAIN_WEIGHTS}")
    own: Any = copy.deepcopy(peft_model)
    with _own_randomness(own):
        plain = _merge(own, _untie(_inside(own)), label, " and ".join(kinds))
    return plain.requires_grad_(True).train(peft_model.training)


def _peft_config(raw: Mapping[str, Any], label: str) -> Any:
    """PEFT's configuration object, with nothing of the file left out."""
    kind = str(raw.get("peft_type"))
    if kind not in _KINDS:
        raise ModelPoolError(
            f"{label} is of the type {kind!r} (peft_type in {_CONFIG}), which the installed PEFT "
            "does not know: install the release that saved it."
        )
    _refuse_no_weights(kind, label)
    known = {f.name for f in fields(_KINDS[kind])}
    unknown = {k: v for k, v in raw.items() if k not in known | _HARMLESS and v}
    if unknown:
        raise ModelPoolError(
            f"{label} sets {some(f'{k}={v!r}' for k, v in unknown.items())} in its {_CONFIG}, "
            "which the installed PEFT does not know: install the release that saved it."
        )
    if raw.get("megatron_config"):
        raise ModelPoolError(f"{label} is for Megatron's layers: convert it to plain LoRA first.")
    if (init := raw.get("init_lora_weights")) not in _REPEATABLE:
        raise ModelPoolError(
            f"{label} was trained with init_lora_weights={init!r}, which changes the base in a way "
            "that cannot be found again. Save it as plain LoRA: "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)."
        )
    try:
        config = _KINDS[kind](**{k: v for k, v in raw.items() if k in known})
    except Exception as error:
        raise ModelPoolError(
            f"{label} has a {_CONFIG} that PEFT does not take ({type(error).__name__}: {error}): "
            "save the adapter again, or install the PEFT release that saved it."
        ) from error
    config.inference_mode = False  # what is trained is then what requires gradients
    return config


def _refuse_no_weights(kind: str, label: str) -> None:
    if kind in _NOT_WEIGHTS or issubclass(_KINDS[kind], PromptLearningConfig):
        raise ModelPoolError(_not_merged(label, kind))


def _not_merged(label: str, kind: str, why: str = "") -> str:
    return (
        f"{label} is of the type {kind}, which cannot be merged into weights{why}. Give the task "
        "an expert in full, or one trained with LoRA."
    )


def _stored_tensors(source: str, platform: str, label: str) -> dict[str, Tensor]:
    path = find_file(source, _WEIGHTS, platform)
    if path is None:
        pickled = find_file(source, _PICKLED, platform) is not None
        raise ModelPoolError(
            f"{label} has its weights in {_PICKLED}, which is pickled and could run any code when "
            "it is read: save it again with save_pretrained(…, safe_serialization=True)."
            if pickled
            else f"{label} has no {_WEIGHTS} beside its {_CONFIG}: download or save it again."
        )
    try:
        stored = dict(SafetensorsWeights(read_header(path)))
    except ModelPoolError as error:
        raise ModelPoolError(f"{label}: {error}") from error
    if not stored:
        raise ModelPoolError(f"{label}: {path} holds no tensors: save the adapter again.")
    broken = [k for k, v in stored.items() if not bool(torch.isfinite(v.float()).all())]
    if broken:
        raise ModelPoolError(
            f"{label} holds NaN or Inf in {some(broken)}: train or download it again."
        )
    return stored


class _Nested(nn.Module):
    """A flat vision tower under the name that it has in the nested layout and in a whole CLIP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vision_model = model


def _layout(
    base: nn.Module, stored: Mapping[str, Tensor], label: str
) -> tuple[nn.Module, dict[str, Tensor]]:
    """What the adapter was trained on: the base, what it holds, or what holds it.

    Returns:
        The module for PEFT to adapt, and the tensors by the names that PEFT gives them there.
    """
    inner = getattr(base, "vision_model", None)
    roots = (base, inner) if isinstance(inner, nn.Module) else (base, _Nested(base))
    named: dict[str, Tensor] = {}
    for key, value in stored.items():
        plain = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        plain = plain.removeprefix("module.")
        if plain.startswith(_PREFIX) or not plain.startswith("base_model."):
            inside = plain.removeprefix(_PREFIX)
            plain = _PREFIX + (
                inside if hasattr(base, "module") else inside.removeprefix("module.")
            )
        if plain in named:
            raise ModelPoolError(f"{label} holds {plain} twice: save the adapter again, unwrapped.")
        named[plain] = value
    heads = [k.removeprefix(_PREFIX).partition(".")[0] for k in named if k.startswith(_PREFIX)]
    return max(roots, key=lambda root: sum(h in root._modules for h in heads)), named


def _inside(model: Any) -> nn.Module:
    """What PEFT was given, with the adapters in it."""
    return model.base_model.model


def _load(
    model: PeftModel, config: Any, stored: dict[str, Tensor], ties: _Ties, mismatch: str
) -> None:
    """Give an adapted model, whose ties were undone, the stored tensors.

    Raises:
        ModelPoolError: They are not just those that the configuration makes places for, or tensors
            that replace the base's, such as resized or trained embeddings.
    """
    own = dict(_parameters(_inside(model)))
    saved_whole = tuple(getattr(config, "modules_to_save", None) or ())
    base = {
        key: value
        for key, value in model.state_dict().items()
        if _base_name(key) in own
        and not (saved_whole and _owner(_base_name(key)).endswith(saved_whole))
    }
    places = _places(model, config)
    _check_fit(stored, places, base | places, mismatch)
    names = model.state_dict()
    for key in set_peft_model_state_dict(model, dict(stored)).unexpected_keys:
        if f"{key}.default" not in names:
            raise ModelPoolError(f"{mismatch}: the installed PEFT has no place for {key}.")
        names[f"{key}.default"].copy_(stored[key])  # VeRA's projections, which PEFT 0.14 ignores
    replaced = {_base_name(key) for key in stored if key not in places}
    for group in ties.parameters:  # what replaces a tied tensor, replaces it under all its names
        given = [name for name in group if name in replaced]
        for name in group if given else ():
            if name not in replaced:
                own[name].data.copy_(own[given[0]].data)


def _places(model: PeftModel, config: Any) -> dict[str, Tensor]:
    """The tensors that the adapter must bring, by the names of its file, with initial values."""
    places = dict(get_peft_model_state_dict(model, save_embedding_layers=False))
    if getattr(config, "bias", "none") != "none":
        # which biases are saved differs between PEFT's releases: all that are trained must be there
        for key, value in model.named_parameters():
            if value.requires_grad and key.endswith(".bias"):
                places.setdefault(
                    key.replace("modules_to_save.", "").replace(".default", ""), value
                )
    return places


def _check_fit(
    stored: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    known: Mapping[str, Tensor],
    mismatch: str,
) -> None:
    """Compare what is stored with what there are places for: those in `places` must be filled."""
    missing = [key for key in places if key not in stored]
    extra = [key for key in stored if key not in known]
    both = [(key, value, known[key]) for key, value in stored.items() if key in known]
    shapes = [
        f"{k} {tuple(v.shape)} for {tuple(w.shape)}" for k, v, w in both if v.shape != w.shape
    ]
    types = [f"{k} {v.dtype}" for k, v, w in both if v.is_floating_point() != w.is_floating_point()]
    problems = [
        f"{what} ({len(found)}: {some(found)})"
        for what, found in (
            ("tensors of the adapter find no place", extra),
            ("places have no tensor in it and would stay at their initial values", missing),
            ("tensors have another shape than their place", shapes),
            ("tensors are no weights", types),
        )
        if found
    ]
    if problems:
        remedy = "Check that the adapter is complete, and was trained on this base"
        if any(part in _REST_OF_CLIP for key in extra for part in key.split(".")):
            remedy = (
                "It is of a whole CLIP, of which the vision tower alone is used: give an adapter "
                "of the tower, or the tower with the adapter merged"
            )
        raise ModelPoolError(f"{mismatch}: {'; '.join(problems)}. {remedy}.")


def _base_name(key: str) -> str:
    """The name in the plain model of a tensor of the base in an adapted one."""
    return _HOLDERS.sub("", key.removeprefix(_PREFIX))


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


@dataclass(frozen=True)
class _Ties:
    """What is one thing under several names in a model, without PEFT's own names.

    Attributes:
        parameters: Names of the same tensor.
        modules: Names of the same module.
    """

    parameters: list[list[str]]
    modules: list[list[str]]


def _untie(root: nn.Module) -> _Ties:
    """Give each name of an adapted model a tensor of its own.

    PEFT adds to tensors in place, so that what was trained at one name would change all.
    """
    modules: dict[int, list[str]] = {}
    parameters: dict[int, list[str]] = {}
    found = list(_base_modules(root))
    for path, _, _, module in found:
        modules.setdefault(id(module), []).append(path)
        for key, value in module._parameters.items():
            if value is not None:
                parameters.setdefault(id(value), []).append(f"{path}.{key}")
    ties = _Ties(*([v for v in same.values() if len(v) > 1] for same in (parameters, modules)))
    copied = tuple(path for paths in ties.modules for path in paths[1:])
    for path, holder, key, module in found:
        if path in copied and not path.startswith(tuple(f"{other}." for other in copied)):
            holder._modules[key] = copy.deepcopy(module)
    first = {paths[0] for paths in ties.parameters}
    tied = {path for paths in ties.parameters for path in paths} - first
    for path, _, _, module in list(_base_modules(root)):
        for key, value in module._parameters.items():
            if value is not None and f"{path}.{key}" in tied:
                module._parameters[key] = nn.Parameter(value.detach().clone(), value.requires_grad)
    return ties


def _tie(plain: nn.Module, ties: _Ties) -> list[list[str]]:
    """Make one thing again of what was; returns the names of tensors that are no longer equal."""
    broken = []
    for names in ties.parameters:
        values = [plain.get_parameter(name) for name in names]
        if not all(torch.equal(values[0], value) for value in values[1:]):
            broken.append(names)
    for names in (*ties.modules, *ties.parameters) if not broken else ():
        first = attrgetter(names[0])(plain)
        for name in names[1:]:
            holder, _, key = name.rpartition(".")
            setattr(plain.get_submodule(holder), key, first)
    return broken


def _base_modules(
    module: nn.Module, path: str = "", holder: nn.Module | None = None, key: str = ""
) -> Iterator[tuple[str, Any, str, nn.Module]]:
    """The modules of the base in an adapted model, under all of their names in the plain model.

    Yields:
        Name, the module that holds it and the name there, and the module itself.
    """
    while inner := _held(module):
        holder, key, module = module, inner, getattr(module, inner)
    yield path, holder, key, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _base_modules(child, f"{path}.{name}" if path else name, module, name)


def _held(module: nn.Module) -> str | None:
    """Under which name one of PEFT's modules holds what it adapts."""
    names = ("base_layer", "original_module", "token_adapter")
    if not type(module).__module__.startswith("peft."):
        return None
    return next((name for name in names if module._modules.get(name) is not None), None)


def _parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, _, _, module in _base_modules(root):
        for key, value in module._parameters.items():
            if value is not None:
                yield f"{path}.{key}", value


def _merge(model: Any, ties: _Ties, label: str, kind: str) -> nn.Module:
    """Turn an adapted model, whose ties were undone, into the plain one that computes the same.

    Raises:
        ModelPoolError: PEFT cannot merge the adapter, merges it into something else, or the result
            needs two tensors where the base has one.
    """
    model.eval()
    try:
        for path, layer in list(model.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                _merge_layer(path, layer)
        plain: nn.Module = _without_copies(model.base_model).unload()
    except Exception as error:
        why = f" by the installed PEFT ({type(error).__name__}: {error}): try its newest release"
        raise ModelPoolError(_not_merged(label, kind, why)) from error
    left = [k for k, m in plain.named_modules() if type(m).__module__.startswith("peft.")]
    if left:
        raise ModelPoolError(_not_merged(label, kind, f": PEFT leaves {some(left)} as it is"))
    if broken := _tie(plain, ties):
        raise ModelPoolError(
            f"{label} changes {some(' = '.join(names) for names in broken)} in different ways, "
            "but the base ties them: they are one tensor. Train the adapter on an untied base, or "
            "without them in modules_to_save and target_modules."
        )
    for attribute in ("peft_config", "active_peft_config"):
        vars(plain).pop(attribute, None)
    return plain


def _merge_layer(path: str, layer: Any) -> None:
    """Give the base of an adapted layer the weights by which it computes what the layer does."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if layer.disable_adapters or layer.merged:
        return
    base = layer.get_base_layer()
    if not isinstance(base, nn.Linear):
        layer.merge()
        return
    # PEFT 0.14 forgets the scale of `lora_bias`: what it merges is compared with what it computes.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, base.in_features, generator=generator).to(base.weight)
    with torch.no_grad():
        expected = layer(inputs).float()
        layer.merge()
        error = float((layer.base_layer(inputs).float() - expected).abs().max())
    allowed = max(1e-3, 8 * torch.finfo(base.weight.dtype).eps) * float(expected.abs().max())
    if not error <= allowed:
        raise ValueError(
            f"merged weights of {path} compute something else than the adapter, by {error:.1e}"
        )


def _without_copies(model: nn.Module) -> Any:
    """Put copies of modules that adapters bring (modules_to_save) in their place where used."""
    for path, wrapper in list(model.named_modules()):
        if isinstance(wrapper, ModulesToSaveWrapper):
            active = wrapper.active_adapter
            names = [active] if isinstance(active, str) else list(active)
            copies = [wrapper.modules_to_save[n] for n in names if n in wrapper.modules_to_save]
            in_use = copies and len(copies) == len(names) and not wrapper.disable_adapters
            holder, _, key = path.rpartition(".")
            module = copies[-1] if in_use else wrapper.original_module
            setattr(model.get_submodule(holder), key, module)
    return model


def _outline(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}


@contextmanager
def _own_randomness(model: nn.Module) -> Iterator[None]:
    """Let PEFT draw its initial values from a fixed seed, and not from the caller's generators."""
    cuda = {value.device for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(sorted(device.index for device in cuda)):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU
        yield
