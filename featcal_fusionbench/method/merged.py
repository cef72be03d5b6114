"""The merged model to calibrate: from an upstream merger, a saved checkpoint, or the pool."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning
from fusion_bench import BaseModelPool, import_object, instantiate
from fusion_bench.compat.method import load_algorithm_from_config
from fusion_bench.utils.lazy_state_dict import LazyStateDict
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from ..corrected import is_corrected_checkpoint
from ..errors import MergerError, ModelPoolError
from ..pools.models import PoolModels, check_weights
from ..pools.opening import assign, floating_tensors
from ..pools.plain import plain_model
from ..pools.view import view_for_mergers
from ..process.surroundings import seeded

__all__ = ["MergedSource", "make_merger"]


def make_merger(config: Any, program: Any, fabric: lightning.Fabric) -> Any:
    """Instantiate an upstream merger as FusionBench's program would.

    Args:
        config: Configuration of any FusionBench method, with ``_target_`` or, as AdaMerging has it,
            with ``name``; or a method already made.
        program: The running program, or None.
        fabric: The fabric that the merger shares.

    Raises:
        MergerError: There is no such method.
    """
    if config is None:
        raise MergerError(
            "no upstream merger is set: give one, e.g. `method@method.merger=task_arithmetic`."
        )
    merger = config
    if isinstance(config, Mapping | DictConfig):
        config = OmegaConf.create(dict(config)) if not isinstance(config, DictConfig) else config
        try:
            if "_target_" in config:
                import_object(config["_target_"])
                merger = instantiate(config, _recursive_=config.get("_recursive_", False))
            else:
                merger = load_algorithm_from_config(config)
        except Exception as error:
            named = config.get("_target_", config.get("name", config))
            raise MergerError(
                f"the upstream merger {named!r} cannot be made: {type(error).__name__}: {error}. "
                "`method@method.merger=<name>` takes any of FusionBench's methods."
            ) from error
    for name, value in (("_program", program), ("_fabric_instance", fabric), ("_fabric", fabric)):
        if hasattr(merger, name) and value is not None:
            setattr(merger, name, value)
    return merger


class MergedSource:
    """Where the merged model comes from; looked up before anything is loaded.

    Args:
        pool: The model pool; it is not changed, and mergers see a view of it.
        merger: The upstream merger, used where neither of the next two is given.
        merged_model: Path or hub id of a merged checkpoint. A pool with a ``_merged_`` entry gives
            that one.

    Raises:
        MergerError: The checkpoint is one of a model with corrections, not of one model.
    """

    def __init__(self, pool: BaseModelPool, merger: Any, merged_model: str | None) -> None:
        self._pool = pool
        self.merger = merger
        self._merged_model = merged_model
        if merged_model is not None:
            if is_corrected_checkpoint(merged_model):
                raise MergerError(
                    f"merged_model={merged_model!r} is a merged model with one correction per task "
                    "(Representation Surgery, ProbSurgery), not one model of the base's "
                    "architecture: give the checkpoint of the merged model alone."
                )
            self.description = merged_model
        elif pool.has_merged:
            self.description = "the model pool's `_merged_`"
        else:
            self.description = f"{type(merger).__name__}, run by this method"

    @property
    def runs_merger(self) -> bool:
        """Whether an upstream merger is to be run."""
        return self._merged_model is None and not self._pool.has_merged

    def load(self, models: PoolModels, seed: int) -> tuple[nn.Module, tuple[str, ...]]:
        """The merged model: a model of its own, on the host, in evaluation mode, without gradients.

        Args:
            models: The pool's base and experts.
            seed: What mergers that draw random numbers draw them by.

        Returns:
            The model, and warnings.

        Raises:
            MergerError: What the merger returned is not one model of the base's structure.
            CalibrationError: The checkpoint cannot be read or does not fit the base.
        """
        warnings: tuple[str, ...] = ()
        if self._merged_model is not None:
            if not models.opener.holds_weights(self._merged_model):
                raise ModelPoolError(
                    f"merged_model={self._merged_model!r}: there is no safetensors file. Save the "
                    "merged model with save_pretrained; pickled checkpoints are not read."
                )
            merged, warnings = models.load_merged(self._merged_model)
        elif self._pool.has_merged:
            merged, warnings = models.load_merged(self._pool._models["_merged_"])
        else:
            with seeded(seed):
                result = self.merger.run(view_for_mergers(models))
            merged = self._one_model(result, models.base_model)
        return merged.requires_grad_(False).eval(), warnings

    def _one_model(self, result: Any, base: nn.Module) -> nn.Module:
        if isinstance(result, LazyStateDict):
            return _with_weights(base, result, "the merger's lazy state dict")
        name = f"{self.description} returned"
        if isinstance(result, nn.Module):
            result, _ = plain_model(result, "merged")
        if not isinstance(result, nn.Module):
            raise MergerError(
                f"{name} {_what(result)}, not one model: it cannot be calibrated. Use a merger "
                "that returns a single model, or set method.merged_model=<path> to one of them."
            )
        expected, found = set(floating_tensors(base)), set(floating_tensors(result))
        if expected != found:
            raise MergerError(
                f"{name} a {type(result).__name__} whose parameters are not the base's "
                f"({len(found - expected)} more, {len(expected - found)} missing): ensembles, "
                "mixtures of experts and wrappers cannot be calibrated. Use a merger that returns "
                "a model of the base's architecture."
            )
        return result


def _what(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with the keys {', '.join(map(str, list(result)[:5]))}"
    if isinstance(result, list | tuple):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"


def _with_weights(base: nn.Module, weights: Mapping[str, Tensor], source: str) -> nn.Module:
    """A copy of the base with other weights, compared name by name and shape by shape."""
    reference = floating_tensors(base)
    weights = {name: weights[name] for name in reference}
    check_weights("merged", "merged", weights, source, reference)
    model = copy.deepcopy(base)
    assign(model, weights, {name: value.dtype for name, value in reference.items()})
    return model
