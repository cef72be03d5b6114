"""Pools that belong together: FusionBench's, or ours where FusionBench's cannot be calibrated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CORRUPTIONS", "DEFAULT_SET", "SETS", "Selection"]

CORRUPTIONS = (
    "contrast",
    "gaussian_noise",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "spatter",
)
"""Splits of corrupted images; FusionBench's robustness configs list them in a comment."""


@dataclass(frozen=True)
class Selection:
    """A model pool and a task pool, as on the command line of ``fusion_bench``.

    Attributes:
        modelpool: What stands behind ``modelpool=``.
        taskpool: What stands behind ``taskpool=``.
        overrides: Further overrides of either.
    """

    modelpool: str
    taskpool: str
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``fusion_bench`` that select this."""
        return (f"modelpool={self.modelpool}", f"taskpool={self.taskpool}", *self.overrides)

    @property
    def method(self) -> str:
        """The method that calibrates such models by default."""
        t5 = self.modelpool.startswith("Seq2SeqLMPool")
        return "featcal/flan_t5_task_arithmetic" if t5 else "featcal"


def _clip(model: str, tasks: str, *overrides: str) -> Selection:
    return Selection(
        f"CLIPVisionModelPool/{model}_{tasks}",
        f"CLIPVisionModelTaskPool/clip-vit-classification_{tasks}",
        overrides,
    )


def _clip_tables(model: str, *overrides: str) -> list[Selection]:
    return [_clip(model, tasks, *overrides) for tasks in ("TA8", "TALL14", "TALL20")]


def _flan_t5(pool: str) -> list[Selection]:
    return [Selection(f"Seq2SeqLMPool/{pool}_featcal", "flan-t5_glue_text_generation")]


# The task pools have the text tower of B/32 where nothing else is said.
_B16 = "taskpool.base_model=openai/clip-vit-base-patch16"
_L14 = "taskpool.base_model=openai/clip-vit-large-patch14"

_ROBUST = "CLIPVisionModelPool/clip-vit-base-patch32_robustness"

SETS: dict[str, list[Selection]] = {
    "clip-b32-8": [_clip("clip-vit-base-patch32", "TA8")],
    "clip-b32": _clip_tables("clip-vit-base-patch32"),
    "clip-b16": _clip_tables("clip-vit-base-patch16", _B16),
    "clip-l14": _clip_tables("clip-vit-large-patch14", _L14),
    "robustness": [
        Selection(f"{_ROBUST}_clean", "clip-vit-base-patch32_robustness_clean"),
        Selection(
            f"{_ROBUST}_corrupted",
            "clip-vit-base-patch32_robustness_corrupted",
            # what FusionBench's primary config of that name sets, and inputs to calibrate on
            (
                f"+corruption={CORRUPTIONS[0]}",
                "+dataset/image_classification/train@modelpool.train_datasets="
                "[stanford-cars,eurosat,resisc45,gtsrb]",
            ),
        ),
    ],
    "clip-b16-lora": [
        Selection(
            "CLIPVisionModelPool/clip-vit-base-patch16_TA8_lora",
            "CLIPVisionModelTaskPool/clip-vit-classification_TA8",
            # inputs to calibrate on, of which that pool has none
            (
                _B16,
                "+dataset/image_classification/train@modelpool.train_datasets="
                "[sun397,stanford-cars,resisc45,eurosat,svhn,gtsrb,mnist,dtd]",
            ),
        )
    ],
    "flan-t5-base": _flan_t5("flan-t5-base_glue"),
    "flan-t5-base-lora": _flan_t5("flan-t5-base_glue_lora16"),
    "flan-t5-large-lora": _flan_t5("flan-t5-large_glue_lora16"),
}
"""Pools by name."""

DEFAULT_SET = "clip-b32-8"
"""The paper's main setting."""
