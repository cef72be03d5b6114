"""What a run calibrates against is what the loader loads: every role, both architectures.

Each table below goes through one kind of entry or of damage: names, files, precisions, ties, forms.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.modelpool import CLIPVisionModelPool
from pico import Pico
from pico_t5 import PicoT5
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, CLIPModel, CLIPVisionModelWithProjection

from featcal_fusionbench.algorithm import FeatCalAlgorithm, MergeOnlyAlgorithm
from featcal_fusionbench.calibration import WeightsError
from featcal_fusionbench.errors import CalibrationError, ModelPoolError
from featcal_fusionbench.pools.models import PoolModels, open_models
from featcal_fusionbench.pools.opening import floating_tensors
from featcal_fusionbench.pools.seq2seq_modelpool import Seq2SeqLMPool
from featcal_fusionbench.pools.view import view_for_mergers
from featcal_fusionbench.report import RunReport

ROLES = ("base", "expert", "merged")
TASKS = ("cola", "mnli")
AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}


@dataclass(frozen=True)
class Family:
    """A base and two experts on disk, copied so that a test may spoil them."""

    root: Path
    pool: Callable[..., Any]

    def directory(self, role: str) -> Path:
        return self.root / role

    def open(self, scratch: Path, **changes: Any) -> PoolModels:
        scratch.mkdir(exist_ok=True)
        return open_models(self.pool(self, **changes), scratch, show_progress=False)

    def read(self, role: str, scratch: Path) -> dict[str, Tensor]:
        """The weights of a role as a run reads them."""
        models = self.open(scratch)
        if role == "merged":
            return floating_tensors(models.load_merged(str(self.directory(role)))[0])
        checked = models.base if role == "base" else models.experts["expert"]
        return {name: value.clone() for name, value in checked.weights.items()}  # not the file's


def clip_pool(family: Family, **changes: Any) -> CLIPVisionModelPool:
    paths: Any = {"_pretrained_": str(family.root / "base"), "expert": str(family.root / "expert"),
                  "other": str(family.root / "other")}  # fmt: skip
    return CLIPVisionModelPool(paths | changes)


def t5_pool(family: Family, **changes: Any) -> Seq2SeqLMPool:
    paths: Any = {"_pretrained_": str(family.root / "base"), "expert": str(family.root / "expert"),
                  "other": str(family.root / "other")}  # fmt: skip
    return Seq2SeqLMPool(paths | changes, tokenizer=None)


@pytest.fixture
def clip(pico: Pico, tmp_path: Path) -> Family:
    for role, source in zip(
        ("base", "expert", "other", "merged"), (pico.base, *map(pico.expert, pico.tasks)),
        strict=True,
    ):  # fmt: skip
        shutil.copytree(source, tmp_path / "models" / role)
    return Family(tmp_path / "models", clip_pool)


@pytest.fixture
def t5(built_pico_t5: PicoT5, tmp_path: Path) -> Family:
    sources = (built_pico_t5.base, *map(built_pico_t5.expert, ("cola", "mnli", "stsb")))
    for role, source in zip(("base", "expert", "other", "merged"), sources, strict=True):
        shutil.copytree(source, tmp_path / "models" / role)
    return Family(tmp_path / "models", t5_pool)


@pytest.fixture(params=["clip", "t5"])
def family(request: pytest.FixtureRequest) -> Family:
    return request.getfixturevalue(request.param)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(file).items()}
    save_file(change(stored), file, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def differing(one: Any, other: Any) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "clip.", "base_model.model.", "module._orig_mod."]
)
def test_known_prefixes_are_read_through(
    family: Family, tmp_path: Path, role: str, prefix: str
) -> None:
    expected = family.read(role, tmp_path / "a")
    rewrite(family.directory(role), lambda stored: {prefix + k: v for k, v in stored.items()})
    assert differing(expected, family.read(role, tmp_path / "b")) == []


@pytest.mark.parametrize("role", ROLES)
def test_clips_own_prefix_may_be_there_or_not(clip: Family, tmp_path: Path, role: str) -> None:
    expected = clip.read(role, tmp_path / "a")

    def tower_alone(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        start = "vision_model."
        return {k.removeprefix(start): v for k, v in stored.items() if k.startswith(start)}

    rewrite(clip.directory(role), tower_alone)
    assert differing(expected, clip.read(role, tmp_path / "b")) == []


def one_of(stored: dict[str, Tensor]) -> str:
    """The name of a weight in a block of the model, not in a CLIP's text tower."""
    names = [key for key in sorted(stored) if ".layer" in key and key.endswith(".weight")]
    return next(key for key in names if not key.startswith("text_model"))


def without_one(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    name = one_of(stored)
    return {key: value for key, value in stored.items() if key != name}


def one_layer_more(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    deep = {key.replace(".0.", ".7.", 1): value for key, value in stored.items() if ".0." in key}
    return stored | {key: value.clone() for key, value in deep.items()}


NAMES = {
    "a missing tensor": (without_one, "lacks 1 of the base's .*not complete"),
    "an unknown prefix": (
        lambda stored: {f"student.{k}": v for k, v in stored.items()},
        "stored with 'student",
    ),
    "a layer more": (one_layer_more, r"tensors that the base does not have, e.g. .*\.7\."),
    "the model twice": (
        lambda stored: stored | {f"module.{k}": v.clone() for k, v in stored.items()},
        "holds the model twice",
    ),
    "an adapter not merged": (
        lambda stored: (
            stored | {one_of(stored).replace(".weight", ".lora_A.weight"): torch.ones(2, 2)}
        ),
        "does not have",
    ),
    "another model": (lambda stored: {"weight": torch.ones(2)}, "another architecture"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", NAMES)
def test_names_that_do_not_fit_are_refused(
    family: Family, tmp_path: Path, role: str, kind: str
) -> None:
    change, message = NAMES[kind]
    rewrite(family.directory(role), change)
    with pytest.raises(ModelPoolError, match=message) as caught:
        family.read(role, tmp_path / "scratch")
    assert {"base": "_pretrained_"}.get(role, role) in str(caught.value)


@pytest.mark.parametrize("role", ["base", "expert"])
def test_what_transformers_would_make_up_is_refused(
    family: Family, tmp_path: Path, role: str
) -> None:
    """Formats that only its own loader reads: it fills gaps at random and goes on."""
    directory = family.directory(role)
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(stored, directory / "pytorch_model.bin")
    expected = family.read(role, tmp_path / "a")
    assert expected
    torch.save(without_one(stored), directory / "pytorch_model.bin")
    with pytest.raises(ModelPoolError, match="1 tensors are in none of its files"):
        family.read(role, tmp_path / "b")


def test_parts_of_a_whole_clip_are_named(pico: Pico, clip: Family, tmp_path: Path) -> None:
    models = clip.open(tmp_path / "scratch", expert=str(pico.base))
    assert any("'expert'" in w and "text_model" in w for w in models.warnings)
    assert any("equal the base" in w and "expert" in w for w in models.warnings)
    assert not any("_pretrained_" in w for w in models.warnings)


# --- files ------------------------------------------------------------------------------------


def shard(directory: Path) -> tuple[Path, Path, Path]:
    """Store a checkpoint in two shards; returns them and their index."""
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(stored)
    files = [directory / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, keys in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({key: stored[key] for key in keys}, file, metadata={"format": "pt"})
    weight_map = {key: files[i % 2].name for i, key in enumerate(names)}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files[0], files[1], index


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def lfs_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def index_of_another_save(file: Path) -> None:
    content = json.loads(file.read_text())
    content["weight_map"]["more.weight"] = next(iter(content["weight_map"].values()))
    file.write_text(json.dumps(content))


DAMAGE: dict[str, tuple[bool, int, Callable[[Path], Any], str]] = {
    # whether it is sharded, which file of those is at fault, what is done to it, the message
    "cut off": (False, 0, cut, "cut off or no safetensors"),
    "empty": (False, 0, lambda file: file.write_bytes(b""), "is empty"),
    "an LFS pointer": (False, 0, lfs_pointer, "git lfs pull"),
    "a web page": (False, 0, lambda file: file.write_text("<html>not found</html>"), "cut off or"),
    "a shard cut off": (True, 1, cut, "cut off or no safetensors"),
    "a shard missing": (True, 1, Path.unlink, "is missing: download"),
    "an index cut off": (True, 2, cut, "cut off or no JSON"),
    "an index of nothing": (True, 2, lambda file: file.write_text("{}"), "names no tensors"),
    "an index of another save": (True, 2, index_of_another_save, "of different saves"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named(clip: Family, tmp_path: Path, role: str, kind: str) -> None:
    sharded, which, damage, message = DAMAGE[kind]
    directory = clip.directory(role)
    files = shard(directory) if sharded else (directory / "model.safetensors",)
    damage(files[which])
    with pytest.raises(ModelPoolError, match=message) as caught:
        clip.read(role, tmp_path / "scratch")
    assert str(directory) in str(caught.value)


def test_a_configuration_cut_off_is_named(family: Family, tmp_path: Path) -> None:
    cut(family.directory("base") / "config.json")
    with pytest.raises(ModelPoolError, match=r"config.json is cut off"):
        family.open(tmp_path / "scratch")


@pytest.mark.parametrize("role", ROLES)
def test_of_two_generations_the_loaders_is_read(family: Family, tmp_path: Path, role: str) -> None:
    """An older sharded save beside a whole one: ``from_pretrained`` takes the whole one."""
    directory = family.directory(role)
    whole = (directory / "model.safetensors").read_bytes()
    expected = family.read(role, tmp_path / "a")
    rewrite(directory, lambda stored: {key: value + 1 for key, value in stored.items()})
    shard(directory)
    (directory / "model.safetensors").write_bytes(whole)
    assert differing(expected, family.read(role, tmp_path / "b")) == []


# --- precisions -------------------------------------------------------------------------------

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MERGERS = {
    "average": AVERAGE,
    "task arithmetic": {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm",
                        "scaling_factor": 0.3},
    "ties": {"_target_": "fusion_bench.method.TiesMergingAlgorithm", "scaling_factor": 0.3,
             "threshold": 20, "remove_keys": [], "merge_func": "sum"},
}  # fmt: skip


@pytest.mark.parametrize("merger", MERGERS)
@pytest.mark.parametrize(
    "dtypes",
    [(F32, F16, BF16), (F16, F32, F32), (BF16, F32, F16), (F64, F32, F32), (F32, F64, BF16),
     (BF16, BF16, BF16)],
    ids=str,
)  # fmt: skip
def test_precisions_may_differ(
    family: Family, tmp_path: Path, dtypes: tuple[torch.dtype, ...], merger: str
) -> None:
    pool = family.pool(family)
    exact = MergeOnlyAlgorithm(merger=MERGERS[merger], output_dir=str(tmp_path)).run(pool)
    for role, dtype in zip(("base", "expert", "other"), dtypes, strict=True):
        rewrite(family.directory(role), lambda s, d=dtype: {k: v.to(d) for k, v in s.items()})
        edit_config(family.directory(role), torch_dtype=str(dtype).removeprefix("torch."))
    model = MergeOnlyAlgorithm(merger=MERGERS[merger], output_dir=str(tmp_path)).run(pool)
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, value in model.named_parameters():
        assert value.dtype == dtypes[0] or (kept & set(name.split(".")) and value.dtype == F32)
        off = (value.float() - exact.get_parameter(name).float()).abs() > 0.05
        assert off.float().mean() < (0.2 if merger == "ties" else 1e-6)  # it keeps the largest
    report = RunReport.read(tmp_path / "merge_only_report.json")
    assert any("precisions differ" in w for w in report.warnings) == (len(set(dtypes)) > 1)


def test_precisions_may_differ_among_instances_and_in_calibration(
    pico: Pico, tmp_path: Path
) -> None:
    pool = pico.instance_pool()
    for dtype, model in zip((BF16, F32, F16, F64), pool._models.values(), strict=True):
        model.to(dtype)
    calibrated = FeatCalAlgorithm(
        merger=AVERAGE, n_samples=8, n_heldout=2, output_dir=str(tmp_path)
    ).run(pool)
    assert {value.dtype for value in calibrated.parameters()} == {BF16}
    assert {value.dtype for value in pool._models[pico.tasks[2]].parameters()} == {F64}


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "float8_e4m3fn": lambda value: value.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda value: value.to(torch.float8_e5m2),
    "4 bits in uint8": lambda value: value.flatten()[::2].to(torch.uint8)[:, None],
    "int8": lambda value: value.to(torch.int8),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", STRANGE)
def test_quantised_weights_are_refused(clip: Family, tmp_path: Path, role: str, kind: str) -> None:
    def quantise(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: STRANGE[kind](v) if v.dim() == 2 else v for k, v in stored.items()}

    rewrite(clip.directory(role), quantise)
    with pytest.raises(CalibrationError, match="[Qq]uantised"):
        clip.read(role, tmp_path / "scratch")


@pytest.mark.parametrize("role", ROLES)
def test_quantised_configurations_are_refused(clip: Family, tmp_path: Path, role: str) -> None:
    edit_config(clip.directory(role), quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ModelPoolError, match=r"is quantised \(bitsandbytes\)"):
        clip.read(role, tmp_path / "scratch")


# --- ties -------------------------------------------------------------------------------------


def tie(directory: Path) -> None:
    """Store what a T5 with a tied head is stored as."""
    rewrite(directory, lambda stored: {k: v for k, v in stored.items() if k != "lm_head.weight"})
    edit_config(directory, tie_word_embeddings=True, scale_decoder_outputs=True)


def test_a_tied_family_is_read_as_such(t5: Family, tmp_path: Path) -> None:
    for role in ("base", "expert", "other"):
        tie(t5.directory(role))
    models = t5.open(tmp_path / "scratch")
    assert models.base_model.lm_head.weight is models.base_model.shared.weight
    expected = load_file(t5.directory("expert") / "model.safetensors")["shared.weight"]
    for name in ("shared.weight", "lm_head.weight", "encoder.embed_tokens.weight"):
        assert torch.equal(models.experts["expert"].weights[name], expected)


@pytest.mark.parametrize("which", ["base", "expert"])
def test_ties_that_differ_are_refused(t5: Family, tmp_path: Path, which: str) -> None:
    tie(t5.directory(which))
    with pytest.raises(CalibrationError, match=r"expert.*ties|lacks 1 .*lm_head|tie_word_embed"):
        t5.open(tmp_path / "scratch")


def test_ties_that_differ_in_the_configuration_alone(t5: Family, tmp_path: Path) -> None:
    edit_config(t5.directory("expert"), tie_word_embeddings=True, scale_decoder_outputs=True)
    with pytest.raises(ModelPoolError, match="'expert' .* ties head and embeddings and the base"):
        t5.open(tmp_path / "scratch")


@pytest.mark.parametrize("form", ["file", "instance"])
@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_a_head_of_its_own_on_a_tied_base(
    t5: Family, tmp_path: Path, form: str, value: float
) -> None:
    for role in ("base", "expert", "other"):
        tie(t5.directory(role))
    directory = t5.directory("expert")
    if form == "file":
        rewrite(directory, lambda s: s | {"lm_head.weight": s["shared.weight"] * 0 + value})
        changes = {}
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(directory)
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach() * 0 + value)
        changes = {"expert": model}
        assert not isinstance(t5.pool(t5), nn.Module)
    pool = t5.pool(t5)
    pool._models = dict(pool._models) | changes
    with pytest.raises(WeightsError, match="'expert'.*lm_head.weight and shared.weight"):
        (tmp_path / "scratch").mkdir()
        open_models(pool, tmp_path / "scratch", show_progress=False)


# --- forms ------------------------------------------------------------------------------------


def clip_forms(pico: Pico) -> dict[str, Callable[[Path, Path], Any]]:
    """A whole checkpoint in every form that an entry may have, given it and a free directory."""

    def vision(path: Path) -> nn.Module:
        from transformers import CLIPVisionModel

        return CLIPVisionModel.from_pretrained(path)

    def whole(path: Path) -> CLIPModel:
        clip = CLIPModel.from_pretrained(pico.base)
        tower = vision(path)
        clip.vision_model = getattr(tower, "vision_model", tower)
        return clip

    def projected(path: Path) -> nn.Module:
        model = CLIPVisionModelWithProjection.from_pretrained(pico.base)
        tower = vision(path)
        model.vision_model = getattr(tower, "vision_model", tower)
        return model

    def saved_whole(path: Path, free: Path) -> str:
        whole(path).save_pretrained(free)
        return str(free)

    def inference(path: Path) -> nn.Module:
        with torch.inference_mode():
            model = vision(path)
            for value in model.parameters():
                value.data = value.data.clone()
        return model

    target = "transformers.CLIPVisionModel.from_pretrained"
    return {
        "path": lambda path, free: str(path),
        "pathlib": lambda path, free: path,
        "file": lambda path, free: str(path / "model.safetensors"),
        "config": lambda path, free: {
            "_target_": target, "pretrained_model_name_or_path": str(path)},
        "config with more": lambda path, free: {
            "_target_": target, "pretrained_model_name_or_path": str(path),
            "attn_implementation": "eager"},
        "instance": lambda path, free: vision(path),
        "training": lambda path, free: vision(path).train(),
        "compiled": lambda path, free: torch.compile(vision(path)),
        "parallel": lambda path, free: nn.DataParallel(vision(path)),
        "whole CLIP": lambda path, free: whole(path),
        "projected": lambda path, free: projected(path),
        "path of a whole CLIP": saved_whole,
        "under inference_mode": lambda path, free: inference(path),
    }  # fmt: skip


FORMS = (
    "path", "pathlib", "file", "config", "config with more", "instance", "training", "compiled",
    "parallel", "whole CLIP", "projected", "path of a whole CLIP", "under inference_mode",
)  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_is_read_alike(
    pico: Pico, clip: Family, tmp_path: Path, role: str, form: str
) -> None:
    expected = clip.read(role, tmp_path / "a")
    entry = clip_forms(pico)[form](clip.directory(role), tmp_path / "free")
    before = entry.training if isinstance(entry, nn.Module) else None
    pool = clip.pool(clip)
    pool._models = dict(pool._models)
    if role == "merged":
        pool._models["_merged_"] = entry
    else:
        pool._models["_pretrained_" if role == "base" else "expert"] = entry
    (tmp_path / "scratch").mkdir()
    models = open_models(pool, tmp_path / "scratch", show_progress=False)
    if role == "merged":
        found = floating_tensors(models.load_merged(entry)[0])
    else:
        found = models.base.weights if role == "base" else models.experts["expert"].weights
    assert differing(expected, found) == []
    assert not models.base_model.training
    if isinstance(entry, nn.Module):
        assert entry.training == before
    as_seen = view_for_mergers(models).load_model("_pretrained_" if role == "base" else "expert")
    assert type(as_seen).__name__ == "CLIPVisionModel"


def test_a_plain_pool_takes_paths(family: Family, tmp_path: Path) -> None:
    expected = family.open(tmp_path / "a")
    plain = BaseModelPool(dict(family.pool(family)._models))
    (tmp_path / "b").mkdir()
    found = open_models(plain, tmp_path / "b", show_progress=False)
    assert differing(expected.base.weights, found.base.weights) == []
    assert type(found.base_model) is type(expected.base_model)


def test_what_is_no_model_is_refused(clip: Family, tmp_path: Path) -> None:
    for entry, message in (
        ({"_target_": "builtins.dict"}, "is a dict, not a model"),
        ({"_target_": "nowhere.at.all"}, "cannot be loaded"),
        (str(tmp_path / "nowhere"), "cannot be loaded"),
    ):
        with pytest.raises(ModelPoolError, match=f"'expert' .*{message}"):
            clip.open(tmp_path / "scratch", expert=entry)


# --- what mergers see -------------------------------------------------------------------------


class Looking(BaseAlgorithm):
    """A merger that keeps what it is given and returns the base."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, Tensor]] = {}

    def run(self, modelpool: Any) -> Any:
        for name in ("_pretrained_", *modelpool.model_names):
            model = modelpool.load_model(name)
            self.seen[name] = {k: v.detach().clone() for k, v in model.state_dict().items()}
            for value in model.parameters():
                value.data.zero_()  # as mergers do: into what they were given
        return modelpool.load_model("_pretrained_")


@pytest.mark.parametrize("stale", [False, True])
def test_mergers_see_what_is_calibrated_against(
    family: Family, tmp_path: Path, stale: bool
) -> None:
    rewrite(family.directory("expert"), lambda s: {f"module.{k}": v for k, v in s.items()})
    if stale:
        index = family.directory("other") / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    looking = Looking()
    MergeOnlyAlgorithm(merger=looking, output_dir=str(tmp_path)).run(family.pool(family))
    models = family.open(tmp_path / "scratch")
    for name, checked in (("_pretrained_", models.base), *models.experts.items()):
        assert differing(dict(checked.weights), looking.seen[name]) == []


def test_a_pools_instances_are_not_changed(pico: Pico, tmp_path: Path) -> None:
    pool = pico.instance_pool()
    pool._models["_pretrained_"].train()
    before = {n: [v.clone() for v in m.parameters()] for n, m in pool._models.items()}
    FeatCalAlgorithm(merger=Looking(), n_samples=8, n_heldout=2, output_dir=str(tmp_path)).run(pool)
    for name, model in pool._models.items():
        assert all(map(torch.equal, before[name], model.parameters()))
        assert model.training == (name == "_pretrained_")
        assert all(value.requires_grad for value in model.parameters())


# --- forwards that return more ----------------------------------------------------------------


@pytest.mark.parametrize("flag", ["output_attentions", "output_hidden_states"])
def test_forwards_that_return_more(clip: Family, pico: Pico, tmp_path: Path, flag: str) -> None:
    def calibrated(out: Path) -> nn.Module:
        pool = clip.pool(clip)
        pool._processor = str(pico.base)
        pool._train_datasets = dict.fromkeys(("expert", "other"), str(pico.dataset(pico.tasks[0])))
        return FeatCalAlgorithm(merger=AVERAGE, n_samples=8, n_heldout=2, output_dir=str(out)).run(
            pool
        )

    plain = calibrated(tmp_path / "a")
    shutil.copy(clip.directory("expert") / "config.json", clip.directory("base") / "config.json")
    for role in ("base", "expert", "other"):
        edit_config(clip.directory(role), **{flag: True})
    more = calibrated(tmp_path / "b")
    assert differing(floating_tensors(plain), floating_tensors(more)) == []
    more.save_pretrained(tmp_path / "saved")
    (again,) = [json.loads((tmp_path / "saved/config.json").read_text())]
    warned = any(flag in w for w in RunReport.read(tmp_path / "b/featcal_report.json").warnings)
    assert again.get(flag, False) is not warned
    assert getattr(more.config, flag) is not warned


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


# --- adapters ---------------------------------------------------------------------------------


@pytest.fixture
def adapter(clip: Family, pico: Pico) -> Path:
    """An adapter of the base, which names it, and which is beside weights of another model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    model = get_peft_model(pico.load_base(), config)  # pyright: ignore[reportArgumentType]
    model.peft_config["default"].base_model_name_or_path = str(clip.directory("base"))
    model.save_pretrained(clip.root / "adapter")
    shutil.copy(clip.directory("other") / "model.safetensors", clip.root / "adapter")
    return clip.root / "adapter"


@pytest.mark.parametrize("form", ["path", "AutoPeftModel", "from_pretrained", "instance"])
def test_adapters_are_merged_in_every_form(
    clip: Family, pico: Pico, adapter: Path, tmp_path: Path, form: str
) -> None:
    from peft import PeftModel

    loaded: Any = PeftModel.from_pretrained(pico.load_base(), adapter)
    source = {"pretrained_model_name_or_path": str(adapter)}
    entry = {
        "path": str(adapter),
        "AutoPeftModel": {"_target_": "peft.AutoPeftModel.from_pretrained", **source},
        "from_pretrained": {"_target_": "transformers.CLIPVisionModel.from_pretrained", **source},
        "instance": loaded,
    }[form]
    pool = clip.pool(clip)
    pool._models = dict(pool._models) | {"expert": entry}
    (tmp_path / "scratch").mkdir()
    models = open_models(pool, tmp_path / "scratch", show_progress=False)
    expected = loaded.merge_and_unload().state_dict()
    found = models.experts["expert"].weights
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    assert any("q_proj" in name for name in differing(dict(models.base.weights), found))


def test_an_adapter_may_name_a_base_that_lies_elsewhere(
    clip: Family, adapter: Path, tmp_path: Path
) -> None:
    here = dict(clip.open(tmp_path / "a", expert=str(adapter)).experts["expert"].weights)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": "/elsewhere/base"}))
    models = clip.open(tmp_path / "b", expert=str(adapter))
    assert differing(here, models.experts["expert"].weights) == []
    assert any("/elsewhere/base" in warning for warning in models.warnings)
    file.write_text(json.dumps(config | {"base_model_name_or_path": "/elsewhere/other-base"}))
    with pytest.raises(ModelPoolError, match="'expert' .*other-base"):
        clip.open(tmp_path / "c", expert=str(adapter))
