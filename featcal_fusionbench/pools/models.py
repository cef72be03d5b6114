"""The models of a pool, each opened once and checked, and given to mergers as it was checked."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..calibration import Weights
from ..calibration.errors import WeightsError
from ..errors import ModelPoolError
from ..report import ModelIdentity
from .checkpoints import SafetensorsWeights, some, tied_names
from .finishing import Extras, restore_extras, silence_extras
from .opening import BASE, OpenedModel, Opener, assign, floating_tensors

__all__ = ["CheckedWeights", "PoolModels", "check_weights", "open_models"]

_VIEWED = "_featcal_models"
"""Attribute of a pool made for mergers: the models that it shows."""

Role = Literal["base", "expert", "merged"]

_PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that fit the base and are finite, and what identifies them."""

    weights: Weights
    identity: ModelIdentity


@dataclass(frozen=True)
class PoolModels:
    """The base and the experts of a pool.

    Attributes:
        pool: The pool; it is not changed.
        base_model: The base, a model of its own on the host, in evaluation mode, without gradients:
            its structure is everyone's.
        base: Its weights.
        experts: Checked weights by task.
        dtypes: The precision in which mergers see each tensor: the base's, or, where models differ,
            the widest of theirs and at least float32.
        extras: What the base's forwards return besides features, switched off in ``base_model``.
        warnings: What the user should know.
        opener: Opened them, and opens a merged checkpoint.
    """

    pool: BaseModelPool
    base_model: nn.Module
    base: CheckedWeights
    experts: Mapping[str, CheckedWeights]
    dtypes: Mapping[str, torch.dtype]
    extras: Extras
    warnings: tuple[str, ...]
    opener: Opener

    @property
    def identities(self) -> tuple[ModelIdentity, ...]:
        """Base and experts, for the report."""
        return (self.base.identity, *(expert.identity for expert in self.experts.values()))

    def load(self, name: str) -> nn.Module:
        """A model of its own with the weights that were checked, as mergers see it.

        Args:
            name: ``_pretrained_`` or a task.
        """
        checked = self.base if name == BASE else self.experts[name]
        model = copy.deepcopy(self.base_model)
        assign(model, checked.weights, self.dtypes)
        return model.requires_grad_(True)

    def load_merged(self, entry: Any) -> tuple[nn.Module, tuple[str, ...]]:
        """A merged model that is there already, in the base's structure and precision.

        Args:
            entry: What an entry of a pool may be: a path, a hub id, a configuration, a model.

        Returns:
            The model, and warnings.

        Raises:
            CalibrationError: It cannot be read or does not fit the base.
        """
        opened = self.opener.open(entry, "merged")
        reference = floating_tensors(self.base_model)
        checked = check_weights("merged", "merged", opened.weights, opened.source, reference)
        model = copy.deepcopy(self.base_model)
        assign(model, checked.weights, {name: value.dtype for name, value in reference.items()})
        return model, opened.warnings


def open_models(
    pool: BaseModelPool,
    scratch: Path,
    *,
    show_progress: bool,
    require_base: Callable[[nn.Module], object] = lambda _: None,
) -> PoolModels:
    """Open and check the base and the experts of a pool.

    Args:
        pool: The model pool; it is not changed.
        scratch: Directory for weights that have to be assembled; the caller removes it when the
            models are no longer needed.
        show_progress: Whether to show a bar while experts are read.
        require_base: Raises where the base will not do; called before experts are read.

    Raises:
        ModelPoolError: There is no base, no expert, or one of them cannot be read.
        WeightsError: Weights do not fit the base, or are not finite.
    """
    tasks = require_base_and_experts(pool)
    if (models := opened_models_of(pool)) is not None:  # of the method around this one
        return models
    opener = Opener(pool, scratch)
    base_model, opened = opener.open_base()
    require_base(base_model)
    extras = silence_extras(base_model)
    _rehearse_saving(base_model, scratch)
    extras, unsaved = _extras_that_can_be_saved(base_model, extras, scratch)
    reference = floating_tensors(base_model)
    base = check_weights("base", BASE, opened.weights, opened.source, reference)
    warnings = [*opened.warnings, *unsaved]
    experts = {}
    for task in tqdm(tasks, desc="Checking experts", leave=False, disable=not show_progress):
        expert = opener.open(pool._models[task], task)
        _require_same_ties(opened, expert, task)
        experts[task] = check_weights("expert", task, expert.weights, expert.source, reference)
        warnings += expert.warnings
    warnings += _warn_of_equal_models(base, experts)
    dtypes = {name: value.dtype for name, value in reference.items()}
    common = _common_precision(reference, {BASE: base, **experts})
    if common is not None:
        named = ", ".join(
            f"{n} {_precision(c, reference)}" for n, c in {BASE: base, **experts}.items()
        )
        warnings.append(
            f"the models' precisions differ ({named}): they are merged in {_name(common)}, and the "
            "result has the base's."
        )
        dtypes = dict.fromkeys(dtypes, common)
    return PoolModels(pool, base_model, base, experts, dtypes, extras, tuple(warnings), opener)


def mark_as_view(pool: BaseModelPool, models: PoolModels) -> None:
    """Note in a pool made for mergers which opened models it shows."""
    setattr(pool, _VIEWED, models)


def opened_models_of(pool: BaseModelPool) -> PoolModels | None:
    """The models that a pool made for mergers shows, if it still names the same ones."""
    models: PoolModels | None = getattr(pool, _VIEWED, None)
    return models if models is not None and pool.model_names == list(models.experts) else None


def require_base_and_experts(pool: BaseModelPool) -> list[str]:
    """The tasks of a pool that has a base and at least one expert.

    Raises:
        ModelPoolError: It lacks one of them.
    """
    if not pool.has_pretrained:
        raise ModelPoolError(
            "the model pool has no base: add `_pretrained_: <path or hub id>` to modelpool.models."
        )
    if not pool.model_names:
        raise ModelPoolError(
            "the model pool has no experts: add `<task>: <path or hub id>` to modelpool.models."
        )
    return list(pool.model_names)


def check_weights(
    role: Role, name: str, weights: Weights, source: str, reference: Mapping[str, Tensor]
) -> CheckedWeights:
    """Check a model's weights against the base's names and shapes and read them through once.

    Args:
        role: What the model is in this run.
        name: Its name.
        weights: Its weights.
        source: Where they came from.
        reference: Tensors of the base.

    Raises:
        WeightsError: Names are missing or too many, shapes differ, tensors hold no data (meta) or
            NaN or Inf, are quantised, or differ where the base's are tied; all that is wrong is
            named in one message.
    """
    missing = [key for key in reference if key not in weights]
    if missing:
        raise WeightsError(
            f"model {name!r} ({source}) lacks {len(missing)} of the base's {len(reference)} "
            f"tensors, e.g. {some(missing)}: it is of another architecture. Every expert must be "
            "fine-tuned from the base."
        )
    digest = hashlib.sha256()
    shapes, strange, empty, broken, untied, count = [], [], [], [], [], 0
    tied = tied_names(reference)
    for key, expected in reference.items():
        first = tied[key][0]
        if key != first:
            if not _are_equal(weights, first, key):
                untied.append(f"{key} and {first}")
            continue
        tensor = weights[key].detach()
        if tensor.dtype not in _PRECISIONS:
            strange.append(f"{key} {_name(tensor.dtype)}")
        elif tensor.shape != expected.shape:
            shapes.append(f"{key} {tuple(tensor.shape)} for {tuple(expected.shape)}")
        elif tensor.is_meta:
            empty.append(key)
        else:
            if not bool(torch.isfinite(tensor).all()):
                broken.append(key)
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            count += tensor.numel()
    problems = [
        f"{what}: {some(found)}"
        for what, found in (
            (
                "tensors that the base does not have",
                [key for key in weights if key not in reference],
            ),
            ("shapes differ from the base's", shapes),
            ("quantised or no weights", strange),
            ("tensors without data (meta device)", empty),
            ("NaN or Inf", broken),
            (
                "tensors differ that the base ties (tie_word_embeddings in its config.json), so "
                "that one merged model cannot hold both",
                untied,
            ),
        )
        if found
    ]
    if problems:
        raise WeightsError(
            f"model {name!r} ({source}) cannot be used: {'; '.join(problems)}. "
            "Check the checkpoint, or remove the task from the model pool."
        )
    identity = ModelIdentity(
        role=role, name=name, source=source, sha256=digest.hexdigest(), parameters=count
    )
    return CheckedWeights(weights, identity)


def _are_equal(weights: Weights, first: str, second: str) -> bool:
    """Whether two names have the same values; NaN equals nothing, so that it is found."""
    if isinstance(weights, SafetensorsWeights) and weights.are_one(first, second):
        return True
    one, other = weights[first], weights[second]
    has_memory = not one.is_meta and not other.is_meta
    if not has_memory or one.shape != other.shape:
        return one.shape == other.shape
    return one.data_ptr() == other.data_ptr() or torch.equal(one.cpu(), other.cpu())


def _rehearse_saving(base_model: nn.Module, scratch: Path) -> None:
    """Find settings of the base that its library refuses to save, before there is work to lose."""
    for name in ("config", "generation_config"):
        content: Any = getattr(base_model, name, None)
        if not hasattr(content, "save_pretrained"):
            continue
        try:
            content.save_pretrained(scratch / "rehearsal")
        except Exception as error:
            raise ModelPoolError(
                f"the base's {name} cannot be saved, and so neither could the result "
                f"({type(error).__name__}: {error}): mend {name}.json beside the base."
            ) from error


def _extras_that_can_be_saved(
    base_model: nn.Module, extras: Extras, scratch: Path
) -> tuple[Extras, list[str]]:
    """What the result may be told to return besides features, and a warning if that is nothing."""
    restore_extras(base_model, extras)
    try:
        _rehearse_saving(base_model, scratch)
    except ModelPoolError:  # transformers 5 saves no `output_attentions` beside a fused kernel
        flags = sorted({flag.removeprefix("_") for _, flag in extras})
        return (), [
            f"the base's configuration sets {', '.join(flags)}, with which transformers saves no "
            "model of its attention kernel: the result does not set it."
        ]
    finally:
        silence_extras(base_model)
    return extras, []


def _require_same_ties(base: OpenedModel, expert: OpenedModel, task: str) -> None:
    """Refuse an expert whose head is tied to its embeddings where the base's is not.

    T5 scales what a tied head reads: one model cannot be both.
    """
    if base.ties is None or expert.ties is None or base.ties == expert.ties:
        return
    kinds = {True: "ties head and embeddings", False: "has a head of its own"}
    raise ModelPoolError(
        f"model {task!r} ({expert.source}) {kinds[expert.ties]} and the base ({base.source}) "
        f"{kinds[base.ties]}, by their configurations (tie_word_embeddings): one merged model "
        "cannot be both. Give experts that were fine-tuned from this base, or mend the "
        "configuration that is wrong."
    )


def _warn_of_equal_models(base: CheckedWeights, experts: Mapping[str, CheckedWeights]) -> list[str]:
    """One warning per set of tasks whose experts are the same checkpoint, and those of the base."""
    by_digest: dict[str, list[str]] = {}
    for task, checked in experts.items():
        by_digest.setdefault(checked.identity.sha256 or "", []).append(task)
    found = []
    for digest, tasks in by_digest.items():
        if digest == base.identity.sha256:
            found.append(
                f"the experts of {' and '.join(tasks)} equal the base in every weight: they were "
                "not fine-tuned, or an adapter does nothing. Check the model pool."
            )
        elif len(tasks) > 1:
            found.append(
                f"the experts of {' and '.join(tasks)} are the same checkpoint (sha256 "
                f"{digest[:12]}…): check the model pool."
            )
    return found


def _common_precision(
    reference: Mapping[str, Tensor], models: Mapping[str, CheckedWeights]
) -> torch.dtype | None:
    """The precision that holds all models' values, at least float32; None where all agree."""
    common, differ = torch.float32, False
    for name in reference:
        dtypes = {_dtype(checked.weights, name) for checked in models.values()}
        differ = differ or len(dtypes) > 1
        for dtype in dtypes:
            common = torch.promote_types(common, dtype)
    return common if differ else None


def _precision(checked: CheckedWeights, reference: Mapping[str, Tensor]) -> str:
    return "/".join(sorted({_name(_dtype(checked.weights, name)) for name in reference}))


def _dtype(weights: Weights, name: str) -> torch.dtype:
    is_stored = isinstance(weights, SafetensorsWeights)
    return weights.dtype_of(name) if is_stored else weights[name].dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
