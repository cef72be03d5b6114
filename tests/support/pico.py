"""A CLIP of a few thousand weights with its experts and data, for end-to-end tests.

Everything a FusionBench CLIP run needs is written below one directory, with no network:

- `base/`: a whole `CLIPModel` with processor and tokenizer;
- `experts/<task>/`: one `CLIPVisionModel` per task, in the key layout of the published
  experts (every key starts with `vision_model.`);
- `data/<task>/`: a parquet data set with `image` and `label`, splits `train` and `test`;
- `conf/`: the config groups `modelpool=pico` and `taskpool=pico`, for `--config-dir`.

Weights come from a seeded generator of our own, name by name, so that they are the same under
every transformers release. A task's labels are what its expert predicts: an expert's accuracy is
1, and a merged model's is lower.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from forks import run_forked
from random_models.checkpoints import expert_weights, write_base, write_expert
from random_models.shapes import ClipShape, Tower
from random_models.weights import generator

if TYPE_CHECKING:
    from fusion_bench.modelpool import CLIPVisionModelPool
    from transformers import CLIPVisionModel

# Names that FusionBench's CLIPTemplateFactory knows, each with ten classes.
TASKS = ("mnist", "svhn", "eurosat")
NUM_CLASSES = 10
# Without merges: a tokenizer of nothing but characters.
SHAPE = ClipShape(Tower(32, 64, 2, 2), merges=0)
SPLITS = {"train": 48, "test": 40}

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Pico:
    """Where a pico model family lies, and how to run FusionBench on it.

    Attributes:
        root: the directory that `build_pico` filled.
        tasks: the task names, in the order of the model pool.
    """

    root: Path
    tasks: tuple[str, ...] = TASKS

    @property
    def base(self) -> Path:
        """Directory of the base `CLIPModel` and its processor."""
        return self.root / "base"

    @property
    def config_dir(self) -> Path:
        """Directory to give to `--config-dir`."""
        return self.root / "conf"

    def expert(self, task: str) -> Path:
        """Directory of the expert of `task`."""
        return self.root / "experts" / task

    def dataset(self, task: str) -> Path:
        """Directory of the data set of `task`, for `datasets.load_dataset`."""
        return self.root / "data" / task

    def load_base(self) -> CLIPVisionModel:
        """Load the base's vision tower, in evaluation mode."""
        return _load_vision(self.base)

    def load_expert(self, task: str) -> CLIPVisionModel:
        """Load the expert of `task`, in evaluation mode."""
        return _load_vision(self.expert(task))

    def instance_pool(self, *, with_data: bool = True) -> CLIPVisionModelPool:
        """Make a pool that holds models, not paths: it hands out the SAME objects every time.

        Args:
            with_data: whether the pool has the processor and the data sets too.
        """
        from fusion_bench.modelpool import CLIPVisionModelPool

        # Annotated as a DictConfig there; a dict is what works with modules.
        models: Any = {"_pretrained_": self.load_base()}
        models |= {task: self.load_expert(task) for task in self.tasks}
        kwargs: dict[str, Any] = {}
        if with_data:
            kwargs["processor"] = str(self.base)
            # Paths: FusionBench's pools cannot hand out data sets that are objects already.
            for split in SPLITS:
                kwargs[f"{split}_datasets"] = {task: str(self.dataset(task)) for task in self.tasks}
        return CLIPVisionModelPool(models, **kwargs)

    def overrides(self, *extra: str) -> list[str]:
        """Hydra overrides for a run on this family: pools, CPU, no worker processes."""
        return ["modelpool=pico", "taskpool=pico", "fabric.accelerator=cpu", *extra]

    def run_program(self, *overrides: str) -> dict[str, Any]:
        """Run FusionBench's program in this process (what the CLI does, without its 8 s start).

        Relative output paths lie below the current directory, so change to a temporary one.

        Args:
            overrides: Hydra overrides such as `method=simple_average`.

        Returns:
            The program's `{"merged_model": ..., "report": ...}`.
        """
        import hydra
        from fusion_bench import instantiate
        from fusion_bench.constants import DEFAULT_CONFIG_PATH
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf, open_dict, read_write

        with hydra.initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
            cfg = hydra.compose(
                "fabric_model_fusion",
                overrides=[
                    f"hydra.searchpath=[file://{self.config_dir}]",
                    f"hydra.runtime.output_dir={Path.cwd() / 'outputs'}",
                    f"hydra.runtime.cwd={Path.cwd()}",
                    *self.overrides("print_config=false", *overrides),
                ],
                return_hydra_config=True,
            )
        before = HydraConfig.instance().cfg
        # Composition gives no job a run directory, and FusionBench asks the global for it.
        HydraConfig.instance().set_config(copy.deepcopy(cfg))
        try:
            with read_write(cfg), open_dict(cfg):
                del cfg["hydra"]
            OmegaConf.resolve(cfg)
            return instantiate(cfg).run()
        finally:
            HydraConfig.instance().cfg = before

    def run_cli(
        self, *overrides: str, cwd: Path, python: str | Path = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Run the installed `fusion_bench` command on this family.

        Args:
            overrides: Hydra overrides and flags; `method=...` is the caller's.
            cwd: directory to run in; outputs go to `outputs/` below it.
            python: interpreter to run it with.

        Returns:
            The finished process with stdout and stderr in one text; check its `returncode`.
        """
        args = ["--config-dir", str(self.config_dir), *self.overrides(*overrides)]
        return run_fusion_bench(args, cwd=cwd, python=python)


def run_fusion_bench(
    *commands: Sequence[str],
    cwd: Path,
    python: str | Path = sys.executable,
    env: Mapping[str, str] | None = None,
    before: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `fusion_bench` offline in a new process, by default of the running interpreter.

    By the running interpreter, with no variables of its own, it is a fork: see `forks`.

    Args:
        commands: arguments of one run each, in turn; the first that fails ends the process.
        cwd: directory to run in.
        python: interpreter to run it with.
        env: variables to set.
        before: code that runs first.
    """
    job = json.dumps(commands)
    if python == sys.executable and env is None:
        return run_forked(before + _RUN, job, cwd=cwd, env=_OFFLINE)
    return subprocess.run(
        [str(python), "-c", before + _RUN, job],
        cwd=cwd,
        env={**os.environ, **_OFFLINE, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


# `python -m` would put the current directory on the path and so hide what an installed command
# sees; `-P` (Python 3.11) is not in 3.10: the first entry, an empty one, is removed at once.
_RUN = """
import json, sys
sys.path[:] = [p for p in sys.path if p]
from fusion_bench.scripts.cli import _hydra_main
for command in json.loads(sys.argv[1]):
    sys.argv = ["fusion_bench", *command]
    _hydra_main()
"""


def build_pico(root: Path, tasks: Iterable[str] = TASKS) -> Pico:
    """Write base, experts, data and configs below `root` (about two seconds, 1 MB).

    Args:
        root: an empty or missing directory.
        tasks: names that `CLIPTemplateFactory` knows.

    Returns:
        The family's paths and runners.
    """
    pico = Pico(root, tuple(tasks))
    write_base(pico.base, SHAPE, "base", torch.float32)
    for task in pico.tasks:
        write_expert(pico.expert(task), SHAPE, expert_weights(SHAPE, "base", task), torch.float32)
        _write_dataset(pico, task)
    _write_configs(pico)
    return pico


def _load_vision(path: Path) -> CLIPVisionModel:
    from transformers import CLIPVisionModel

    return CLIPVisionModel.from_pretrained(path).eval()


def _write_dataset(pico: Pico, task: str) -> None:
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as PILImage

    features = Features(image=Image(), label=ClassLabel(num_classes=NUM_CLASSES))
    for split, size in SPLITS.items():
        pixels = torch.randint(
            0, 256, (size, SHAPE.image_size, SHAPE.image_size, 3), generator=generator(task, split)
        )
        images = [PILImage.fromarray(image.to(torch.uint8).numpy()) for image in pixels]
        columns = {"image": images, "label": _labels(pico, task, images)}
        dataset = Dataset.from_dict(columns, features=features)
        dataset.to_parquet(pico.dataset(task) / f"{split}.parquet")


def _labels(pico: Pico, task: str, images: list[Any]) -> list[int]:
    """What the expert of `task` predicts, with FusionBench's class names and templates."""
    from transformers import CLIPModel, CLIPProcessor

    from featcal_fusionbench.compat import apply_transformers_shim

    apply_transformers_shim()
    from fusion_bench.models.hf_clip import HFCLIPClassifier
    from fusion_bench.tasks.clip_classification import get_classnames_and_templates

    clip = CLIPModel.from_pretrained(pico.base).eval()
    clip.vision_model = pico.load_expert(task)
    processor = CLIPProcessor.from_pretrained(pico.base)
    classifier = HFCLIPClassifier(clip, processor)
    classifier.set_classification_task(*get_classnames_and_templates(task))
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return classifier(pixels).argmax(dim=-1).tolist()


def _write_configs(pico: Pico) -> None:
    from omegaconf import OmegaConf

    def datasets(split: str) -> dict[str, dict[str, str]]:
        return {
            task: {
                "_target_": "datasets.load_dataset",
                "path": str(pico.dataset(task)),
                "split": split,
            }
            for task in pico.tasks
        }

    pool = {
        "_target_": "fusion_bench.modelpool.CLIPVisionModelPool",
        "_recursive_": False,
        "processor": str(pico.base),
        "models": {"_pretrained_": str(pico.base)}
        | {task: str(pico.expert(task)) for task in pico.tasks},
        "train_datasets": datasets("train"),
        "test_datasets": datasets("test"),
        "platform": "hf",
    }
    taskpool = {
        "defaults": [{"CLIPVisionModelTaskPool@": "_template"}, "_self_"],
        "base_model": str(pico.base),
        "test_datasets": datasets("test"),
        "dataloader_kwargs": {"batch_size": 16, "num_workers": 0, "pin_memory": False},
    }
    for group, content in {"modelpool": pool, "taskpool": taskpool}.items():
        path = pico.config_dir / group / "pico.yaml"
        path.parent.mkdir(parents=True)
        OmegaConf.save(OmegaConf.create(content), path)
