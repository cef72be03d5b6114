"""A T5 of a few thousand weights with full and LoRA experts, and a GLUE of a few dozen rows.

`build_pico_t5` writes below one directory all that FusionBench's FLAN-T5 path needs offline:

- `base/`: a `T5ForConditionalGeneration` with a tokenizer of its own. As in FLAN-T5 its embeddings
  are shared and its head is not. It is trained for some seconds to answer all tasks somehow;
- `experts/<task>/` and `adapters/<task>/`: an expert in full, and as a LoRA adapter of the base;
- `glue/`: GLUE's eight text tasks with a few dozen made-up rows, as the configurations of a data
  set that `datasets.load_dataset("glue", name)` reads when the current directory is the root.
"""

from __future__ import annotations

import copy
import functools
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mirror.glue import GLUE, glue_features, glue_rows
from pico import run_fusion_bench
from random_models.checkpoints import write_adapter, write_expert, write_processor
from random_models.shapes import T5Shape
from random_models.weights import departure, fill, save_weights
from random_models.words import flan_t5_tokenizer as tokenizer

SHAPE = T5Shape(32, 8, 48, 2, 4, vocabulary=224)
ROWS = {"train": 40, "validation": 24}


@dataclass(frozen=True)
class PicoT5:
    """Where a pico T5 family lies, and how to run FusionBench on it.

    Attributes:
        root: the directory that `build_pico_t5` filled; run FusionBench there.
    """

    root: Path

    @property
    def base(self) -> Path:
        """Directory of the base and its tokenizer."""
        return self.root / "base"

    def expert(self, task: str) -> Path:
        """Directory of the expert of `task`."""
        return self.root / "experts" / task

    def adapter(self, task: str) -> Path:
        """Directory of the LoRA adapter of `task`."""
        return self.root / "adapters" / task

    def overrides(self, *extra: str, lora: bool = False) -> list[str]:
        """Hydra overrides that put this family into the shipped configs for FLAN-T5."""
        pool = "flan-t5-base_glue_lora16_featcal" if lora else "flan-t5-base_glue_featcal"
        source = "pretrained_model_name_or_path"
        models = [f"modelpool.models._pretrained_.{source}={self.base}"]
        for task in GLUE:
            entry = f"modelpool.models.glue-{task}"
            if lora:
                models += [f"{entry}.base_model_path={self.base}",
                           f"{entry}.peft_model_path={self.adapter(task)}"]  # fmt: skip
            else:
                models.append(f"{entry}.{source}={self.expert(task)}")
        return [
            f"modelpool=Seq2SeqLMPool/{pool}",
            "taskpool=flan-t5_glue_text_generation",
            *models,
            f"modelpool.tokenizer.{source}={self.base}",
            f"taskpool.tokenizer={self.base}",
            "taskpool.num_workers=0",
            "fabric.accelerator=cpu",
            *extra,
        ]

    def pool(self, *, lora: bool = False, tasks: Iterable[str] = GLUE, **changes: Any) -> Any:
        """The model pool of the shipped config on this family; run where `./glue` is.

        Args:
            lora: whether the experts are adapters.
            tasks: those that it is to keep.
            changes: values of the config to replace.
        """
        from fusion_bench import instantiate
        from omegaconf import OmegaConf

        config = copy.deepcopy(_pool_config(self, lora))
        for task in set(GLUE) - set(tasks):
            del config.models[f"glue-{task}"]
        return instantiate(OmegaConf.merge(config, changes))

    def run_method(self, *overrides: str, lora: bool = False) -> Any:
        """Compose a method and this family's pool, and run the one on the other."""
        import hydra
        from fusion_bench import instantiate
        from fusion_bench.constants import DEFAULT_CONFIG_PATH
        from omegaconf import OmegaConf

        with hydra.initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
            overrides = (*self.overrides(*overrides, lora=lora),)
            config = hydra.compose("fabric_model_fusion", overrides=list(overrides))
        OmegaConf.resolve(config.method)
        return instantiate(config.method).run(self.pool(lora=lora))

    def run_cli(self, *overrides: str, lora: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the installed `fusion_bench` command on this family."""
        return run_fusion_bench(self.overrides(*overrides, lora=lora), cwd=self.root)


@functools.cache
def _pool_config(pico: PicoT5, lora: bool) -> Any:
    import hydra
    from fusion_bench.constants import DEFAULT_CONFIG_PATH
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        overrides = pico.overrides(lora=lora)
        config = hydra.compose("fabric_model_fusion", overrides=overrides).modelpool
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    return config


def build_pico_t5(root: Path) -> PicoT5:
    """Write base, experts, adapters and data below `root` (some ten seconds, 10 MB)."""
    pico = PicoT5(root)
    rows = {
        task: {split: list(glue_rows(task, split, count)) for split, count in ROWS.items()}
        for task in GLUE
    }
    _write_glue(root / "glue", rows)
    base = fill(SHAPE.model("cpu"))
    _train(base, tokenizer(), rows)
    write_processor(pico.base, SHAPE)
    weights = dict(base.named_parameters())
    save_weights(pico.base / "model.safetensors", weights, torch.float32)
    for task in GLUE:
        expert = {name: departure(name, value, task) for name, value in weights.items()}
        write_expert(pico.expert(task), SHAPE, expert, torch.float32)
        write_adapter(pico.adapter(task), SHAPE, str(pico.base), task)
    return pico


def _write_glue(path: Path, rows: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    from datasets import Dataset

    card = ["---", "configs:"]
    for task, splits in rows.items():
        card += [f"- config_name: {task}", "  data_files:"]
        for split, content in splits.items():
            name = "validation_matched" if (task, split) == ("mnli", "validation") else split
            file = f"{task}/{name}.parquet"
            data = Dataset.from_list(content, features=glue_features(task))
            data.to_parquet(path / file)
            card += [f"  - split: {name}", f"    path: {file}"]
    (path / "README.md").write_text("\n".join([*card, "---", ""]))


def _train(model: Any, words: Any, rows: Any, steps: int = 100) -> None:
    """Teach the base the form of the answers, and a little of what they depend on."""
    from fusion_bench.tasks.flan_t5_text_generation.glue_preprocessors import glue_processors
    from fusion_bench.tasks.flan_t5_text_generation.glue_prompt_templates import (
        glue_prompt_templates,
    )

    examples = []
    for task, splits in rows.items():
        prepare = glue_processors[task](
            words,
            {"padding": "max_length", "truncation": True, "return_tensors": "pt"},
            glue_prompt_templates[task],
        )
        columns = {key: [row[key] for row in splits["train"]] for key in splits["train"][0]}
        examples.append(prepare(columns))
    ids = torch.cat([e["input_ids"] for e in examples])
    ids = ids[:, : int((ids != 0).sum(1).max())]
    labels = torch.cat([e["labels"] for e in examples])[:, :10]
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(ids), (24,), generator=generator)
        batch = ids[chosen]
        loss = model(
            input_ids=batch, attention_mask=(batch != 0).long(), labels=labels[chosen]
        ).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
