"""A hub mirror: FusionBench's true configs run against it, offline and unchanged."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Value, load_dataset
from forks import run_forked
from hub_mirror import main, parse_arguments
from huggingface_hub import scan_cache_dir, snapshot_download
from mirror import Mirror, MirrorError, MirrorSettings, Selection, build
from mirror.glue import GLUE
from mirror.home import WARNING, Home
from mirror.needs import DatasetNeed, ModelNeed, Needs, read_needs
from mirror.sets import CORRUPTIONS, SETS
from pico import run_fusion_bench
from places import ROOT, SUPPORT
from random_models import checkpoints
from random_models.shapes import SHAPES
from random_models.words import write_clip_processor
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoTokenizer, CLIPModel, CLIPProcessor

from featcal_fusionbench.pools.seq2seq_modelpool import load_lora_model
from featcal_fusionbench.report import RunReport

PICO = MirrorSettings(size="pico", rows=16, image_size=24)  # a batch of FusionBench's for GLUE
B32 = "openai/clip-vit-base-patch32"
B16 = "openai/clip-vit-base-patch16"
L14 = "openai/clip-vit-large-patch14"
TWO = Selection("CLIPVisionModelPool/clip-vit-base-patch32_svhn_and_mnist",
                "CLIPVisionModelTaskPool/clip-vit-base-patch32_svhn_and_mnist")  # fmt: skip
# Runs that a test looks at, by name; the last part of a name is the number of tasks.
RUNS = {
    **dict(zip(("clip 8", "clip 14", "clip 20"), SETS["clip-b32"], strict=True)),
    **dict(zip(("clean 4", "corrupted 4"), SETS["robustness"], strict=True)),
    "lora 8": SETS["clip-b16-lora"][0],
    "glue 8": SETS["flan-t5-base"][0],
}


# Seven runs of one process share what they have in common.
ONCE = f"""
import functools, sys, yaml
yaml.SafeLoader = yaml.CSafeLoader
sys.path.insert(0, {str(SUPPORT)!r})
from quick import prompts_once, without_workers
del sys.path[0]
without_workers(), prompts_once()
import fusion_bench.scripts.cli
from featcal_fusionbench.method import featcal, preparation, recorder
preparation.measure_matmul_rate = functools.cache(preparation.measure_matmul_rate)
recorder.write_figure = lambda path, figure: path.touch()
"""


def write(directory: Path, *selections: Selection, settings: MirrorSettings = PICO) -> Mirror:
    mirror = Mirror(directory, selections, settings)
    with Progress(disable=True) as progress:
        mirror.write(progress)
    return mirror


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Mirror:
    """A mirror of all that is run here. Treat it as read-only."""
    return write(tmp_path_factory.mktemp("mirror") / "home", *RUNS.values())


def snapshot(mirror: Mirror, name: str) -> Path:
    """Where the hub's own library finds a model."""
    cache = mirror.home.directory / "hub"
    return Path(snapshot_download(name, cache_dir=cache, local_files_only=True))


# --- the true configs, through the real command -----------------------------------------------


@pytest.fixture(scope="module")
def runs(mirror: Mirror, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the runs were made, one process for all; results lie by name."""
    cwd = tmp_path_factory.mktemp("runs")
    commands = []
    for name, selection in RUNS.items():
        own = name.startswith(("clip", "lora"))
        workers = "dataloader_kwargs.num_workers" if own else "num_workers"
        commands.append(
            [
                f"method={selection.method}",
                *selection.arguments,
                "method.n_samples=4",
                "method.n_heldout=2",
                f"method.output_dir={cwd}/{name}",
                f"report_save_path={cwd}/{name}/program_report.json",
                "print_config=false",
                # spares the tests' machine; the 8 workers of the configs run as well
                f"taskpool.{workers}=0",
            ]
        )
    done = run_fusion_bench(*commands, cwd=cwd, env=mirror.home.environment, before=ONCE)
    assert done.returncode == 0, done.stdout[-3000:]
    return cwd


@pytest.mark.cli
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_true_configs_run_unchanged_and_offline(runs: Path, mirror: Mirror, name: str) -> None:
    scores = json.loads((runs / name / "program_report.json").read_text())
    report = RunReport.read(runs / name / "featcal_report.json")
    count = int(name.split()[-1])
    tasks = [model.name for model in report.models if model.role == "expert"]
    assert report.status == "complete" and len(tasks) == count
    assert len(scores.keys() - {"model_info", "average"}) == count

    sources = {m.source for m in report.models if m.role != "merged"}
    if name == "lora 8":
        sources = {re.sub(r"the adapter (\S+) on .*", r"\1", source) for source in sources}
    assert sources <= mirror.needs.models.keys() and len(sources) == count + 1
    assert report.modules_calibrated == (46 if name == "glue 8" else 16)
    drift = (report.mean_drift_before, report.mean_drift_after)
    assert all(value is not None and math.isfinite(value) and value > 0 for value in drift)
    if name != "glue 8":
        assert name[:4] != "clip" or tasks == [task for task in scores if task in tasks]
        losses = [score["loss"] for task, score in scores.items() if task != "model_info"]
        assert all(map(math.isfinite, losses))
    if name == "corrupted 4":
        assert {data.split for data in report.data} == {"train"}


# --- what the configs name ---------------------------------------------------------------------


def test_ids_are_read_from_the_composed_config() -> None:
    needs = read_needs(SETS["clip-b32-8"])
    tasks = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")
    assert needs.models == {B32: ModelNeed(B32, "base")} | {
        f"tanganke/clip-vit-base-patch32_{task}": ModelNeed(B32, "expert") for task in tasks
    }
    splits = ("test", "train")
    assert needs.datasets.pop(("svhn", "cropped_digits")) == DatasetNeed("svhn", splits)
    assert needs.datasets.pop(("mnist", "default")) == DatasetNeed("mnist", splits)
    assert needs.datasets == {
        (f"tanganke/{task.replace('-', '_')}", "default"): DatasetNeed(task, splits)
        for task in tasks
        if task not in ("svhn", "mnist")
    }


def test_odd_loaders_are_read_too() -> None:
    tall = read_needs(SETS["clip-b32"][2:])
    assert tall.datasets["clip-benchmark/wds_fer2013", "default"].task == "fer2013"
    assert tall.datasets["ethz/food101", "default"].splits == ("train", "validation")
    pool = "CLIPVisionModelPool/clip-vit-base-patch32_TA8_model_only"
    held_out = Selection(pool, "CLIPVisionModelTaskPool/clip-vit-classification_TA8_val")
    assert read_needs([held_out]).datasets["tanganke/dtd", "default"].splits == ("train",)


def test_one_corruption_brings_all() -> None:
    clean, corrupted = (read_needs([selection]) for selection in SETS["robustness"])
    key = ("tanganke/gtsrb", "default")
    assert clean.datasets[key].splits == ("test", "train")
    assert corrupted.datasets[key].splits == tuple(sorted([*CORRUPTIONS, "train"]))


def test_adapters_and_tokenizers_are_told_from_models() -> None:
    needs = read_needs(SETS["flan-t5-large-lora"])
    kinds = {name: need.kind for name, need in needs.models.items()}
    assert kinds.pop("google/flan-t5-large") == "base"
    assert kinds.pop("google/flan-t5-base") == "processor"
    assert set(kinds.values()) == {"adapter"} and len(kinds) == 8
    assert set(needs.datasets) == {("glue", task) for task in GLUE}
    both = read_needs([*SETS["flan-t5-large-lora"], *SETS["flan-t5-base"]])
    assert both.models["google/flan-t5-base"].kind == "base"


def test_a_task_pool_with_another_text_tower_brings_it() -> None:
    pool = "CLIPVisionModelPool/clip-vit-large-patch14_TALL20"
    plain = Selection(pool, "CLIPVisionModelTaskPool/clip-vit-classification_TALL20")
    assert read_needs([plain]).models.keys() >= {L14, B32}
    assert B32 not in read_needs(SETS["clip-l14"][2:]).models


@pytest.mark.parametrize("name", SETS)
def test_sets_compose_and_their_shapes_are_known(name: str, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "new", SETS[name], PICO)
    assert mirror.missing_models and mirror.missing_datasets
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "modelpool, taskpool, message",
    [
        ("CLIPVisionModelPool/nonsense", "dummy", "cannot be composed with .*nonsense"),
        ("CLIPVisionModelPool/featcal_embedded", "dummy", "is not an id on the hub"),
        ("CLIPVisionModelPool/clip-vit-base-patch16_individual_lora", "dummy", "no `_pretrained_`"),
        ("CLIPVisionModelPool/clip-vit-base-patch32_robustness_corrupted", "dummy", "corruption"),
        (TWO.modelpool, "gpt-2_glue", "load_gpt2_dataset is unknown here"),
        (TWO.modelpool, "nyuv2_taskpool", "NYUv2TaskPool is unknown here"),
        ("CausalLMPool/mistral-7b", "dummy", "the shape of .* is unknown"),
    ],
)
def test_what_cannot_be_made_up_is_named(
    tmp_path: Path, modelpool: str, taskpool: str, message: str
) -> None:
    with pytest.raises(MirrorError, match=message):
        Mirror(tmp_path / "new", [Selection(modelpool, taskpool)], PICO)
    assert not (tmp_path / "new").exists()


def test_one_id_cannot_be_two_models() -> None:
    needs = Needs()
    needs.add_model("a/b", ModelNeed("x", "expert"))
    with pytest.raises(MirrorError, match="a/b is expert of x .* and expert of y"):
        needs.add_model("a/b", ModelNeed("y", "expert"))


# --- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base, parameters",
    [
        # as published
        (B32, 151_277_313),
        (B16, 149_620_737),
        (L14, 427_616_513),
        ("google/flan-t5-base", 247_577_856),
        ("google/flan-t5-large", 783_150_080),
    ],
)
def test_true_shapes_have_the_published_number_of_parameters(base: str, parameters: int) -> None:
    model = SHAPES["true"][base].model()
    assert sum(value.numel() for value in model.parameters()) == parameters


def test_experts_depart_from_the_base_each_in_its_own_direction(mirror: Mirror) -> None:
    base = load_file(snapshot(mirror, B32) / "model.safetensors")
    one, two = (
        load_file(snapshot(mirror, f"tanganke/clip-vit-base-patch32_{task}") / "model.safetensors")
        for task in ("svhn", "dtd")
    )
    assert one.keys() == {name for name in base if name.startswith("vision_model.")}
    name = "vision_model.encoder.layers.1.mlp.fc2.weight"
    steps = torch.stack([(expert[name] - base[name]).flatten() for expert in (one, two)])
    assert torch.allclose(steps.norm(dim=1) / base[name].norm(), torch.tensor(0.2), atol=0.01)
    assert abs(float(torch.cosine_similarity(steps[0], steps[1], dim=0))) < 0.1


def test_the_whole_base_loads_with_its_processor(mirror: Mirror) -> None:
    path = snapshot(mirror, B32)
    model = CLIPModel.from_pretrained(path)
    stored = load_file(path / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in model.named_parameters())
    processor = CLIPProcessor.from_pretrained(path)
    inputs = processor(text=["a photo of a cat"], images=[np.zeros((30, 40, 3), np.uint8)],
                       return_tensors="pt")  # fmt: skip
    assert torch.isfinite(model(**inputs).logits_per_image).all()
    assert len(AutoTokenizer.from_pretrained(snapshot(mirror, "google/flan-t5-base"))) < 256


@pytest.mark.parametrize("size", ["pico", "true"])
def test_every_prompt_of_fusionbench_fits_into_the_text_tower(size: Any, tmp_path: Path) -> None:
    from fusion_bench.tasks.clip_classification import get_classnames_and_templates

    shape: Any = SHAPES[size][B32]
    write_clip_processor(tmp_path, shape)
    words = CLIPProcessor.from_pretrained(tmp_path).tokenizer
    assert len(words) == shape.config().text_config.vocab_size
    for task in {need.task for need in read_needs(SETS["clip-b32"][2:]).datasets.values()}:
        names, templates = get_classnames_and_templates(task)
        for template in templates:
            assert max(map(len, words([template(n) for n in names])["input_ids"])) <= 77


def test_precision_is_that_asked_for(tmp_path: Path) -> None:
    half = MirrorSettings(size="pico", dtype="bfloat16", rows=2, image_size=8)
    mirror = write(tmp_path / "half", TWO, settings=half)
    svhn = snapshot(mirror, "tanganke/clip-vit-base-patch32_svhn")
    weights = load_file(svhn / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_adapters_load_onto_their_base(tmp_path: Path) -> None:
    pool = "Seq2SeqLMPool/flan-t5-base_glue_lora16_featcal"
    mirror = write(tmp_path / "lora", Selection(pool, "dummy"))
    base = str(snapshot(mirror, "google/flan-t5-base"))
    adapter = str(snapshot(mirror, "tanganke/flan-t5-base_glue-cola_lora-16"))
    merged = load_lora_model(base, adapter).state_dict()
    stored = load_file(Path(base, "model.safetensors"))
    changed = {name for name, value in stored.items() if not torch.equal(value, merged[name])}
    assert changed == {n for n in stored if n.endswith((".q.weight", ".v.weight"))}


# --- data --------------------------------------------------------------------------------------


def read(mirror: Mirror, path: str, name: str | None = None) -> Any:
    """Read a data set of the mirror as FusionBench does, from the hub's cache and offline."""
    return load_dataset(path, name, cache_dir=str(mirror.home.directory / "datasets"))


def test_data_sets_have_the_published_columns(mirror: Mirror) -> None:
    from fusion_bench.tasks.clip_classification import get_classnames

    gtsrb = read(mirror, "tanganke/gtsrb")
    assert set(gtsrb) == {"train", "test", *CORRUPTIONS}
    assert all(len(split) == PICO.rows for split in gtsrb.values())
    assert gtsrb["train"].features["label"].names == get_classnames("gtsrb")
    assert gtsrb["train"][0]["image"].size == (24, 24)
    assert gtsrb["train"][3]["image"].tobytes() != gtsrb["test"][3]["image"].tobytes()
    assert read(mirror, "mnist")["train"][0]["image"].mode == "L"
    assert read(mirror, "1aurent/PatchCamelyon")["test"].features["label"] == Value("bool")
    assert isinstance(read(mirror, "svhn", "cropped_digits")["test"].features["label"], ClassLabel)
    fer2013 = read(mirror, "clip-benchmark/wds_fer2013")["train"]
    assert set(fer2013.column_names) == {"__key__", "__url__", "jpg", "cls"}


def test_every_image_data_set_has_labels_of_its_task(mirror: Mirror) -> None:
    from fusion_bench.tasks.clip_classification import get_num_classes

    for (dataset, config), need in mirror.needs.datasets.items():
        if dataset == "glue":
            continue
        data = read(mirror, dataset, None if config == "default" else config)
        assert set(data) == set(need.splits)
        column = "cls" if "cls" in data["train"].column_names else "label"
        labels = {int(label) for label in data["train"][column]}
        assert labels == set(range(min(PICO.rows, get_num_classes(need.task))))


def test_classes_are_separable_patterns(mirror: Mirror) -> None:
    """The nearest spectrum among the training images, shifts left out, tells the class."""

    def features(split: Any) -> np.ndarray:
        images = np.stack([np.asarray(image, dtype=float) for image in split["image"]])
        return np.abs(np.fft.rfft2(images, axes=(1, 2))).reshape(len(images), -1)

    data = read(mirror, "tanganke/resisc45")
    train, test = features(data["train"]), features(data["test"])
    nearest = ((test[:, None] - train[None]) ** 2).sum(-1).argmin(1)
    found = np.asarray(data["train"]["label"])[nearest]
    assert (found == np.asarray(data["test"]["label"])).mean() == 1


def test_glue_has_the_published_splits(mirror: Mirror) -> None:
    mnli = read(mirror, "glue", "mnli")
    assert set(mnli) == {
        "train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched",
    }  # fmt: skip
    assert mnli["train"].column_names == ["premise", "hypothesis", "label", "idx"]
    assert set(mnli["train"]["label"]) == {0, 1, 2} and set(mnli["test_matched"]["label"]) == {-1}
    stsb = read(mirror, "glue", "stsb")["validation"]
    assert stsb.features["label"] == Value("float32") and 0 <= min(stsb["label"])


# --- the directory -----------------------------------------------------------------------------


def test_the_hubs_library_sees_a_sound_cache(mirror: Mirror) -> None:
    cache = scan_cache_dir(mirror.home.directory / "hub")
    # transformers 4 puts a file of its own there
    assert not [warning for warning in cache.warnings if "version.txt" not in str(warning)]
    found = {repo.repo_id: repo for repo in cache.repos}
    assert found.keys() == mirror.needs.models.keys() | {name for name, _ in mirror.needs.datasets}
    for repo in found.values():
        (revision,) = repo.revisions
        assert revision.refs == {"main"}
        assert WARNING in (revision.snapshot_path / "README.md").read_text()
    assert WARNING in (mirror.home.directory / "featcal_mirror.json").read_text()


def real_cache(path: Path) -> None:
    (path / "hub/models--openai--clip-vit-base-patch32/snapshots").mkdir(parents=True)


def a_file(path: Path) -> None:
    path.write_text("mine")


def half_a_marker(path: Path) -> None:
    path.mkdir()
    (path / "featcal_mirror.json").write_text('{"warning"')


@pytest.mark.parametrize(
    "occupy, message",
    [
        (real_cache, "is not a mirror"),
        (a_file, "is not a mirror"),
        (half_a_marker, "damaged: delete .*home"),
    ],
)
def test_a_directory_of_someone_elses_is_left_alone(
    tmp_path: Path, occupy: Callable[[Path], None], message: str
) -> None:
    occupy(tmp_path / "home")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MirrorError, match=message):
        write(tmp_path / "home", TWO)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_will_do_and_an_equal_mirror_is_equal(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    weights = [
        next((write(tmp_path / name, TWO).home.directory / "hub").rglob("*svhn/**/*.safetensors"))
        for name in ("one", "two")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # older releases of datasets lock, and patch, modules that define builders
    assert not list(Path(build.__file__).parents[1].rglob("*.lock"))


def test_an_interrupted_mirror_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(path: Path, *args: Any) -> None:
        calls.append(path)
        (path / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints, "write_expert", interrupted)
        write(tmp_path / "home", TWO)
    assert len(calls) == 1
    again = Mirror(tmp_path / "home", [TWO], PICO)
    assert len(again.missing_models) == 2 and len(again.missing_datasets) == 2
    base = snapshot(again, B32) / "model.safetensors"
    written = base.stat().st_mtime_ns
    write(tmp_path / "home", TWO)
    assert base.stat().st_mtime_ns == written
    assert not Mirror(tmp_path / "home", [], PICO).missing_models
    leftovers = [p for p in (tmp_path / "home/hub").rglob(".*") if p.is_dir()]
    assert not leftovers


def test_what_a_mirror_holds_is_kept(tmp_path: Path) -> None:
    cars = "CLIPVisionModelTaskPool/clip-vit-single-task_mnist"
    individual = Selection("CLIPVisionModelPool/clip-vit-base-patch32_individual", cars)
    first = write(tmp_path / "home", individual)
    assert set(read(first, "mnist")) == {"test"}
    held_out = "CLIPVisionModelTaskPool/clip-vit-classification_TA8_val"
    more = write(tmp_path / "home", Selection(individual.modelpool, held_out))
    assert set(read(more, "mnist")) == {"test", "train"}
    revisions = more.home.directory / "datasets/mnist/default/0.0.0"
    assert len([path for path in revisions.iterdir() if path.is_dir()]) == 1
    with pytest.raises(MirrorError, match="is a mirror with size=pico, dtype=float32, rows=16"):
        Mirror(tmp_path / "home", [TWO], MirrorSettings(size="pico", rows=17, image_size=24))


def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**30))
    with pytest.raises(MirrorError, match=r"5\.3 GiB are needed .* 1\.0 GiB are free"):
        write(tmp_path / "home", SETS["clip-l14"][0], settings=MirrorSettings(dtype="float16"))
    assert not any((tmp_path / "home").iterdir())


def test_the_environment_shuts_out_all_other_caches(mirror: Mirror) -> None:
    environment = mirror.home.environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert {os.path.dirname(environment[key]) for key in ("HF_HUB_CACHE", "HF_DATASETS_CACHE")} == {
        environment["HF_HOME"]
    }
    assert Home(Path("somewhere")).directory.is_absolute()


# --- the command line --------------------------------------------------------------------------


def test_the_command_says_how_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "my home"
    options = ["--size", "pico", "--rows", "2", "--image-size", "8"]
    main([str(home), "--modelpool", TWO.modelpool, "--taskpool", TWO.taskpool, *options])
    out = capsys.readouterr().out
    assert WARNING in out and f"export HF_HOME='{home}'\n" in out
    assert f"fusion_bench method=featcal modelpool={TWO.modelpool} taskpool={TWO.taskpool}\n" in out
    with pytest.raises(SystemExit, match="error: .* is a mirror with size=pico"):
        main([str(home), "--size", "true"])


def test_pools_and_sets_add_up() -> None:
    plain = parse_arguments(["x"])
    assert plain.selections == SETS["clip-b32-8"] and plain.settings == MirrorSettings()
    arguments = ["x", "--set", "clip-b16", "--modelpool", "a", "--taskpool", "b"]
    both = parse_arguments([*arguments, "--override", "taskpool.base_model=c"])
    assert both.selections[:3] == SETS["clip-b16"]
    assert both.selections[3:] == [Selection("a", "b", ("taskpool.base_model=c",))]
    everything = parse_arguments(["x", "--set", "all"]).selections
    assert len(everything) == sum(map(len, SETS.values()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--modelpool", "a"], "come in pairs"),
        (["--override", "a=b"], "--override belongs to"),
        (["--rows", "0"], "rows=0: it must be at least 1"),
        (["--set", "nonsense"], "invalid choice"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["directory", *arguments])
    assert message in capsys.readouterr().err


_WRITE = """
from pathlib import Path
from random_models.checkpoints import write_processor
from random_models.shapes import SHAPES
for base in ("openai/clip-vit-base-patch32", "google/flan-t5-base"):
    write_processor(Path(base), SHAPES["pico"][base])
"""


@pytest.mark.cli
@pytest.mark.slow
def test_tokenizers_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Also in one that orders sets differently."""
    scripts = str(ROOT / "scripts")
    environment = {**os.environ, "PYTHONPATH": scripts, "PYTHONHASHSEED": "1"}
    forked, started = tmp_path / "forked", tmp_path / "started"
    forked.mkdir()
    started.mkdir()
    # not in this process, where other tests have made tasks known
    run = run_forked(f"import sys; sys.path.insert(0, {scripts!r})\n{_WRITE}", cwd=forked)
    assert run.returncode == 0, run.stdout
    subprocess.run([sys.executable, "-c", _WRITE], cwd=started, env=environment, check=True)
    written = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (forked, started)
    ]
    assert len(written[0]) == 8
    assert written[0] == written[1]
