"""The shim that lets FusionBench import under transformers 5.6 and later."""

from __future__ import annotations

from types import ModuleType

import pytest
from transformers.models.clip import modeling_clip

from featcal_fusionbench.compat import apply_transformers_shim


def test_missing_name_is_given_back_and_present_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.clip as package

    module = ModuleType("modeling_clip")
    module.CLIPVisionModel = object()
    monkeypatch.setattr(package, "modeling_clip", module)

    apply_transformers_shim()
    assert module.CLIPVisionTransformer is module.CLIPVisionModel

    original = module.CLIPVisionTransformer = object()
    apply_transformers_shim()
    assert module.CLIPVisionTransformer is original


def test_fusion_bench_imports_with_the_shim() -> None:
    from fusion_bench.taskpool import CLIPVisionModelTaskPool

    # The pool's own annotation: what it takes as a vision tower is what transformers makes.
    assert CLIPVisionModelTaskPool.__name__ == "CLIPVisionModelTaskPool"
    tower = modeling_clip.CLIPVisionModel(modeling_clip.CLIPVisionConfig(num_hidden_layers=1))
    assert isinstance(getattr(tower, "vision_model", tower), modeling_clip.CLIPVisionTransformer)
