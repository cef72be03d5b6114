"""What FusionBench needs to run beside transformers releases newer than itself.

This module is the only place that changes another library, and it changes one name.
"""

from __future__ import annotations


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
