"""RegMean++ for CLIP: FusionBench's own, with what does not run in its release 0.2.33 put right.

There it fails when it is made (its table of settings is a dict where a two-way mapping is needed),
and would fail later where transformers has changed: encoder layers that return a tensor instead of
a tuple, and take no causal mask; vision towers without the inner ``vision_model``. Everything is
found by structure, so that it also works where FusionBench has been mended.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import apply_transformers_shim

apply_transformers_shim()

from fusion_bench.method.regmean_plusplus.clip_regmean_plusplus import (  # noqa: E402
    RegMeanAlgorithmForCLIPPlusPlus,
)
from fusion_bench.method.regmean_plusplus.regmean_plusplus import (  # noqa: E402
    RegMeanAlgorithmPlusPlus,
)

__all__ = ["ClipRegMeanPlusPlus"]


class ClipRegMeanPlusPlus(RegMeanAlgorithmForCLIPPlusPlus):
    """RegMean++ for CLIP vision towers, of either layout; settings are FusionBench's."""

    _config_mapping = RegMeanAlgorithmPlusPlus._config_mapping | {
        "dataloader_kwargs": "dataloader_kwargs"
    }

    def run(self, modelpool: Any, **kwargs: Any) -> Any:
        """Merge; a tower without ``vision_model`` is shown as one that has it."""
        merged = super().run(_nested(modelpool), **kwargs)
        return merged.vision_model if isinstance(merged, _Nested) else merged

    def on_regmean_start(self) -> None:
        """Nothing: the zero-shot head that is made here is not used afterwards."""

    def layer_batches_forward(self, layer: nn.Module, batches_input: list[Tensor]) -> Any:
        """Outputs of an encoder layer, on the host."""
        # Fabric may have wrapped the layer, and a wrapper tells nothing of the arguments.
        arguments = inspect.signature(getattr(layer, "module", layer).forward).parameters.values()
        required = sum(
            a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments
        )
        device = next(layer.parameters()).device
        with torch.no_grad():
            outputs = [layer(batch.to(device), *[None] * (required - 1)) for batch in batches_input]
        return [(out[0] if isinstance(out, tuple) else out).cpu() for out in outputs]


class _Nested(nn.Module):
    """A flat vision tower under the name that it had inside its wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.vision_model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.vision_model(*args, **kwargs)


def _nested(pool: Any) -> Any:
    """The pool with vision towers in the layout that FusionBench expects; it is not changed."""
    view = copy.copy(pool)

    def load_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = pool.load_model(*args, **kwargs)
        return model if hasattr(model, "vision_model") else _Nested(model)

    view.load_model = load_model
    return view
