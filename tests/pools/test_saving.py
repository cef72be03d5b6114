"""What is saved is what was calibrated, wherever it is loaded."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import Pico
from pico_t5 import PicoT5
from places import SUPPORT
from reload_probe import difference
from safetensors import safe_open
from safetensors.torch import save_file
from test_pool_models import tie
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, CLIPVisionModel

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.errors import OutputError
from featcal_fusionbench.method.surgery import ProbSurgeryAlgorithm, RepresentationSurgeryAlgorithm
from featcal_fusionbench.pools.finishing import save_whole

AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
METHODS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "merge_only": (MergeOnlyAlgorithm, {}),
    "featcal": (FeatCalAlgorithm, {"n_samples": 6, "n_heldout": 0, "ridge_lambda": 1e-3}),
    "representation_surgery": (
        RepresentationSurgeryAlgorithm,
        {"n_samples": 6, "n_heldout": 0, "steps": 4},
    ),
    "prob_surgery": (
        ProbSurgeryAlgorithm,
        {"n_samples": 6, "n_heldout": 0, "rounds": 1, "batches_per_round": 2},
    ),
}
OTHER_PYTHON = os.environ.get("FEATCAL_OTHER_PYTHON")


def run(method: str, pool: Any, out: Path) -> Any:
    kind, settings = METHODS[method]
    return kind(merger=AVERAGE, output_dir=str(out), **settings).run(pool)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, CLIPVisionModel):
        size = model.config.image_size
        return {"pixel_values": torch.linspace(-1, 1, 6 * size * size).reshape(2, 3, size, size)}
    words = torch.arange(3, 13).reshape(2, 5)
    return {"input_ids": words, "decoder_input_ids": words[:, :3].clone()}


def save(model: Any, path: Path) -> None:
    """Save a result, and beside it what the model inside gives."""
    model.save_pretrained(path)
    plain = getattr(model, "model", model)
    inputs = inputs_of(plain)
    with torch.no_grad():
        output = plain(**inputs)
    found = output.pooler_output if "pixel_values" in inputs else output.logits
    save_file({**inputs, "output": found.clone()}, path / "expected.safetensors")


def pools(pico: Pico, pico_t5: PicoT5, tmp_path: Path) -> dict[str, Any]:
    """A pool of every architecture and way of tying; of CLIP also one that no file was read for."""
    import shutil

    from featcal_fusionbench.pools.seq2seq_modelpool import Seq2SeqLMPool

    tied: dict[str, Any] = {}
    sources = {"_pretrained_": pico_t5.base} | {f"glue-{t}": pico_t5.expert(t) for t in ("cola",)}
    for name, source in sources.items():
        tied[name] = str(shutil.copytree(source, tmp_path / "tied" / name))
        tie(Path(tied[name]))
    built = pico.instance_pool()
    for name, model in built._models.items():
        other = CLIPVisionModel(copy.deepcopy(model.config))
        other.load_state_dict(model.state_dict())
        built._models[name] = other
    untied = pico_t5.pool(tasks=["cola"])
    return {
        "clip": pico.instance_pool(),
        "clip built here": built,
        "t5": untied,
        "t5 tied": Seq2SeqLMPool(
            tied, tokenizer=untied._tokenizer, train_datasets=untied._train_datasets
        ),
    }


@pytest.fixture
def saved(pico: Pico, pico_t5: PicoT5, tmp_path: Path) -> Path:
    """Every method's result on every pool, saved; surgeries with CLIP's projection where it is."""
    root = tmp_path / "saved"
    for name, pool in pools(pico, pico_t5, tmp_path).items():
        for method in METHODS:
            if "surgery" in method and name.startswith("clip"):
                pool._models["_pretrained_"] = str(pico.base)
            save(run(method, pool, tmp_path / "out"), root / f"{name}, {method}")
    return root


@pytest.mark.slow
@pytest.mark.cli
def test_saved_models_are_the_same_in_every_release(saved: Path) -> None:
    for directory in saved.iterdir():
        assert difference(directory) < 1e-6, directory.name
        config = json.loads((directory / "config.json").read_text())
        with safe_open(directory / "model.safetensors", "pt") as file:
            names = set(file.keys())
        if "clip" in directory.name:
            assert all(name.startswith("vision_model.") for name in names), directory.name
        else:
            assert config.get("tie_word_embeddings", True) == ("tied" in directory.name)
            assert ("lm_head.weight" in names) == ("tied" not in directory.name)
    if OTHER_PYTHON is None:
        pytest.skip("FEATCAL_OTHER_PYTHON names no Python with another release of transformers")
    probe = SUPPORT / "reload_probe.py"
    finished = subprocess.run(
        [OTHER_PYTHON, str(probe), str(saved)], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    differences = json.loads(finished.stdout.splitlines()[-1])
    assert differences.keys() == {path.name for path in saved.iterdir()}
    assert max(differences.values()) < 1e-5, differences


# --- saving that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["merge_only", "prob_surgery"])
@pytest.mark.parametrize("obstacle", ["a file in the way", "below a file", "a full disk"])
def test_a_model_that_cannot_be_saved_is_kept(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, obstacle: str
) -> None:
    pool = pico.instance_pool()
    pool._models["_pretrained_"] = str(pico.base)
    model = run(method, pool, tmp_path / "out")
    path = tmp_path / "model"
    if obstacle == "a full disk":
        own = CLIPVisionModel.save_pretrained

        def full(self: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
            if Path(directory).parent == tmp_path:
                raise OSError(errno.ENOSPC, "No space left on device")
            own(self, directory, *args, **kwargs)

        monkeypatch.setattr(CLIPVisionModel, "save_pretrained", full)
    else:
        path.write_text("in the way")
        path = path if obstacle == "a file in the way" else path / "deeper"
    with pytest.raises(OutputError, match="could not be saved to .*saved to .*out/model instead"):
        model.save_pretrained(path)
    again = CLIPVisionModel.from_pretrained(tmp_path / "out/model")
    plain = getattr(model, "model", model)
    assert all(map(torch.equal, plain.state_dict().values(), again.state_dict().values()))


def test_a_model_that_can_be_kept_nowhere(
    pico: Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run("merge_only", pico.instance_pool(), tmp_path / "out")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CLIPVisionModel, "save_pretrained", full)
    with pytest.raises(OutputError, match="No space left.* Neither .* nor the temporary"):
        model.save_pretrained(tmp_path / "model")


def test_an_older_save_is_replaced_whole(pico: Pico, tmp_path: Path) -> None:
    """What it leaves must not be taken for the new one: loaders prefer a file to shards."""
    base, expert = pico.load_base(), pico.load_expert(pico.tasks[0])
    save_whole(base, tmp_path / "model")
    (tmp_path / "model/notes.txt").write_text("mine")
    save_whole(expert, tmp_path / "model", max_shard_size="40KB")
    shards = list((tmp_path / "model").glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    again = CLIPVisionModel.from_pretrained(tmp_path / "model")
    assert all(map(torch.equal, expert.state_dict().values(), again.state_dict().values()))
    save_whole(base, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "notes.txt"}
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_copies_of_a_result_save_themselves(pico_t5: PicoT5, tmp_path: Path) -> None:
    model = run("merge_only", pico_t5.pool(tasks=["cola"]), tmp_path / "out")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    other.save_pretrained(tmp_path / "model")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert not again.lm_head.weight.any() and again.shared.weight.any()
    assert sys.getsizeof(model) > 0
