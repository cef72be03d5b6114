"""CLIP: the projected image embedding is corrected, before it is normalised.

FusionBench's CLIP classifier and task pool recognise a model with ``is_surgery_model`` and ask it
to correct the image embeddings of the batch that it has just seen, by
``compute_surgery_features(embeddings, dataset_name=task)``. They do so after normalising them,
where the papers' code corrects them before (the classification head normalises). So the wrapper
keeps the embeddings of its last forward, corrects those, and hands back normalised ones.

FusionBench's own wrapper does not import under transformers 5.6 and later; this one needs no name
of transformers but ``CLIPVisionModel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionModel

from ..calibration.inputs import Inputs
from ..errors import CalibrationError, ModelPoolError
from .base import CorrectedModel

__all__ = ["CorrectedClipVision"]

_PROJECTION = "visual_projection.weight"


class CorrectedClipVision(CorrectedModel):
    """A CLIP vision tower with a correction of the image embedding per task.

    Args:
        model: The vision tower.
        projection: The base CLIP's visual projection, of shape (embedding, width). FusionBench's
            task pool has one of its own, from its ``base_model``: it must be the same.
    """

    architecture = "CLIP vision tower"
    is_surgery_model = True
    """By which FusionBench's task pool and classifier recognise a model that needs the task."""

    def __init__(self, model: nn.Module, projection: Tensor) -> None:
        super().__init__(model)
        self.visual_projection = nn.Linear(*projection.shape[::-1], bias=False)
        self.visual_projection.weight = nn.Parameter(projection.detach().clone(), False)
        self._embeddings: Tensor | None = None

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """Whether the model is a CLIP vision tower."""
        return isinstance(model, CLIPVisionModel)

    @classmethod
    def from_pool(cls, model: nn.Module, pool: BaseModelPool) -> CorrectedClipVision:
        """Wrap a vision tower, with the visual projection of the pool's base.

        Raises:
            ModelPoolError: The pool's base has no visual projection.
        """
        try:
            load: Any = pool.load_clip_model  # pyright: ignore[reportAttributeAccessIssue]
            clip, loaded = load("_pretrained_", output_loading_info=True)
            if _PROJECTION in loaded["missing_keys"]:  # it would be a random one
                raise KeyError(f"the checkpoint has no {_PROJECTION}")
        except Exception as error:
            reason = str(error.args[0] if error.args else error).partition("\n")[0]
            raise ModelPoolError(
                "the visual projection, which the image embedding goes through, cannot be loaded: "
                "the model pool's `_pretrained_` must be path, hub id or configuration of a whole "
                f"CLIPModel, in a CLIPVisionModelPool ({type(error).__name__}: {reason})"
            ) from error
        return cls(model, clip.visual_projection.weight)

    def around(self, model: nn.Module) -> CorrectedClipVision:
        """The same wrapper around another model."""
        return type(self)(model, self.visual_projection.weight)

    def representation(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Projected image embeddings of a batch, one position each."""
        embeddings = self._project(self.model(**inputs))[:, None]
        return embeddings, torch.ones(embeddings.shape[:2], dtype=torch.bool)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The merged model's forward, uncorrected; see ``compute_surgery_features``."""
        output = self.model(*args, **kwargs)
        self._embeddings = self._project(output)
        return output

    def compute_surgery_features(
        self, embeddings: Tensor, dataset_name: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Correct the image embeddings of the last forward; FusionBench's classifier calls it.

        Args:
            embeddings: The same embeddings, normalised, of shape (batch, embedding).
            dataset_name: The task.

        Returns:
            The corrected embeddings, normalised; those before; and what was subtracted.

        Raises:
            CalibrationError: They are not the embeddings of the last forward.
        """
        own, self._embeddings = self._embeddings, None
        if own is None or own.shape != embeddings.shape:
            raise CalibrationError(
                "compute_surgery_features corrects the embeddings of the forward just before it."
            )
        normalised = F.normalize(own, dim=-1).to(embeddings.dtype)
        if not torch.allclose(normalised, embeddings, atol=1e-2):
            raise CalibrationError(
                "the task pool's CLIP has another visual projection than the model pool's base, "
                "with which the corrections were trained: set taskpool.base_model to the model "
                "pool's `_pretrained_`."
            )
        corrected, subtracted = self.corrected(own, dataset_name)
        return F.normalize(corrected, dim=-1).to(embeddings.dtype), embeddings, subtracted

    def extra_tensors(self) -> dict[str, Tensor]:
        """The visual projection."""
        return {_PROJECTION: self.visual_projection.weight}

    @classmethod
    def from_saved(cls, path: str, extra: Mapping[str, Tensor]) -> CorrectedClipVision:
        """Load the vision tower, and take the projection from the saved file."""
        return cls(CLIPVisionModel.from_pretrained(path), extra[_PROJECTION])

    def _project(self, output: Any) -> Tensor:
        pooled = output.pooler_output
        return self.visual_projection(pooled.to(self.visual_projection.weight.dtype))
