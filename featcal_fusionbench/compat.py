"""What FusionBench needs to run beside transformers releases newer than itself.

This module is the only place that changes another library: one name for good, and one method for
as long as models are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


def apply_transformers_shim() -> None:
    """Let FusionBench's CLIP modules import under transformers 5.6 and later.

    Up to 5.5 transformers has `CLIPVisionModel(vision_model=CLIPVisionTransformer(...))`. From 5.6
    on the wrapper is gone: `CLIPVisionModel` IS the transformer, and the name
    `CLIPVisionTransformer` no longer exists. FusionBench 0.2.33 imports that name (in its CLIP
    task pools, surgery models and fine-tuning), mostly for annotations and `isinstance`, and so
    fails with an ImportError. The two classes have one meaning now, so the old name is given back.

    Whether the name is missing is looked up, not derived from a version number. Call it before
    anything of `fusion_bench.taskpool` is used; calling it again does nothing. It can go once the
    oldest supported FusionBench imports cleanly under the newest supported transformers.
    """
    from transformers.models.clip import modeling_clip

    if not hasattr(modeling_clip, "CLIPVisionTransformer"):
        # setattr: the type stubs of neither layout know a module attribute that is added.
        setattr(modeling_clip, "CLIPVisionTransformer", modeling_clip.CLIPVisionModel)  # noqa: B010


@contextmanager
def watched_loading() -> Iterator[list[LoadedCheckpoint]]:
    """Learn what every ``from_pretrained`` of transformers inside the block found and missed.

    transformers fills tensors that no file holds with random numbers and says so in a log line
    alone. Whoever calls it inside the block (a pool, a function that a configuration names), what
    it made up is listed.

    Yields:
        A list that grows by one entry per call.
    """
    from transformers import PreTrainedModel

    original = vars(PreTrainedModel)["from_pretrained"]
    loaded: list[LoadedCheckpoint] = []

    def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any):  # noqa: ANN202
        model, found = original.__func__(cls, *args, output_loading_info=True, **kwargs)
        missing = [*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])]
        loaded.append(LoadedCheckpoint(type(model).__name__, tuple(sorted(missing))))
        return (model, found) if output_loading_info else model

    setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))  # noqa: B010
    try:
        yield loaded
    finally:
        setattr(PreTrainedModel, "from_pretrained", original)  # noqa: B010


@dataclass(frozen=True)
class LoadedCheckpoint:
    """One call of ``from_pretrained``.

    Attributes:
        model: The model's class.
        made_up: Tensors that no file held, or held in another shape: transformers made them up.
    """

    model: str
    made_up: tuple[str, ...]
