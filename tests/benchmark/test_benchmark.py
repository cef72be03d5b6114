"""The embedded image benchmark, and what it shares with the text benchmark.

The real build takes minutes and is left to `python -m featcal_fusionbench.benchmark`; here a pico
tower and random digits stand in for the downloaded files.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import json
import math
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import cell
from forks import run_forked
from matplotlib.ft2font import FT2Font
from pico import Pico
from PIL import Image
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor, CLIPVisionConfig, CLIPVisionModel

from featcal_fusionbench.benchmark import __main__ as driver
from featcal_fusionbench.benchmark import fetch, storage
from featcal_fusionbench.benchmark.cache import ExpertRecipe
from featcal_fusionbench.benchmark.demo import COLOURS, Demo
from featcal_fusionbench.benchmark.fetch import Package
from featcal_fusionbench.benchmark.image import build as build_module
from featcal_fusionbench.benchmark.image import images, tower
from featcal_fusionbench.benchmark.image.build import Build, build
from featcal_fusionbench.benchmark.image.checkpoint import save_tower
from featcal_fusionbench.benchmark.image.glyphs import ALPHABETS, font_path, glyph_splits
from featcal_fusionbench.benchmark.image.recipe import Recipe, TextRecipe
from featcal_fusionbench.benchmark.image.tasks import TASKS, load_processor, load_split
from featcal_fusionbench.benchmark.image.text_side import learn_merges
from featcal_fusionbench.benchmark.image.train import normalise
from featcal_fusionbench.sweeps import in_process
from featcal_fusionbench.sweeps.experiment import load_experiment

PICO = Recipe(
    image_size=28,
    train_size=40,
    test_size=20,
    projection_dim=16,
    text=TextRecipe(width=64, layers=1, steps=2, batch_size=16, images_per_class=1),
    expert=ExpertRecipe(steps=2, batch_size=8, learning_rate=1e-3),
)


def pico_tower(image_size: int = 28) -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=14,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIPVisionModel(config).eval()


def random_digits() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (80, 8, 8), dtype=np.uint8), np.arange(80) % 10


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEATCAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_pico_parts(patch: pytest.MonkeyPatch) -> None:
    """Let builds use a pico tower and random digits; nothing is downloaded."""
    patch.setattr(build_module, "pretrained_tower", pico_tower)
    patch.setattr(images, "_READERS", dict.fromkeys(images._READERS, random_digits))


@pytest.fixture
def pico_parts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_pico_parts(monkeypatch)
    return cache


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEATCAL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        use_pico_parts(patch)
        return build(PICO).directory


@pytest.fixture
def built(pico_parts: Path, made_once: Path) -> Build:
    """A build that is complete, in a cache of the test's own."""
    shutil.copytree(made_once, PICO.directory(), symlinks=True)
    return Build(PICO.directory())


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# --- data ---


@pytest.mark.parametrize("task", ALPHABETS)
def test_no_glyph_of_a_font_is_in_both_splits(task: str) -> None:
    pairs = {
        split: {(glyph.character, glyph.font) for glyph in glyphs}
        for split, glyphs in glyph_splits(task).items()
    }
    assert pairs["train"] and pairs["test"]
    assert pairs["train"].isdisjoint(pairs["test"])


@pytest.mark.parametrize("task", ALPHABETS)
def test_every_class_is_in_both_splits_and_in_every_font(task: str) -> None:
    for glyphs in glyph_splits(task).values():
        assert {glyph.label for glyph in glyphs} == set(range(len(TASKS[task].classnames)))
        for glyph in glyphs:  # a missing one would be drawn as an empty box
            font = FT2Font(str(font_path(glyph.font)))
            assert ord(glyph.character) in font.get_charmap(), glyph


def test_class_names_of_a_task_are_distinct() -> None:
    for task in TASKS.values():
        assert len(set(task.classnames)) == len(task.classnames)


def test_duplicates_do_not_reach_both_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits, labels = random_digits()
    doubled = (np.concatenate([digits, digits]), np.concatenate([labels, labels]))
    monkeypatch.setitem(images._READERS, "mnist5k", lambda: doubled)
    recipe = dataclasses.replace(PICO, image_size=8, train_size=60)
    arrays = images.task_arrays(TASKS["mnist5k"], recipe)
    train, test = ({image.tobytes() for image in arrays[f"{s}_images"]} for s in ("train", "test"))
    assert len(train) == 60 and len(test) == 20
    assert train.isdisjoint(test)


def test_images_are_the_same_for_one_seed_and_others_for_another() -> None:
    first, again, other = (
        images.task_arrays(TASKS["latin"], dataclasses.replace(PICO, seed=seed))
        for seed in (0, 0, 1)
    )
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    assert (first["train_images"] != other["train_images"]).any()


def test_training_sees_what_the_processor_hands_over(built: Build) -> None:
    split = load_split("cyrillic", "test", built.directory)
    processor = load_processor(built.directory)
    item = split[3]
    assert isinstance(item["image"], Image.Image) and item["label"] == split.labels[3]
    expected = processor(images=[item["image"]], return_tensors="pt")["pixel_values"]
    pixels = normalise(torch.from_numpy(split.images[3:4]), tower.IMAGE_MEAN, tower.IMAGE_STD)
    torch.testing.assert_close(pixels, expected, atol=1e-6, rtol=0)


def test_an_unbuilt_benchmark_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--build-only"):
        load_split("latin", "train", tmp_path)
    with pytest.raises(ValueError, match="tasks: mnist5k"):
        load_split("nosuch", "train", tmp_path)


# --- fetching ---


class Evil:
    def __reduce__(self) -> tuple:
        return (exec, ("raise SystemExit",))


def test_unpickler_reads_arrays_and_refuses_everything_else() -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    read = fetch.unpickle_array(gzip.compress(pickle.dumps(array, protocol=4)))
    np.testing.assert_array_equal(read, array)
    for bad in (Evil(), Path("x"), np.array([Evil()], dtype=object)):
        with pytest.raises(pickle.UnpicklingError, match="refused"):
            fetch.unpickle_array(gzip.compress(pickle.dumps(bad)))
    for bad in ([array], np.array([None])):
        with pytest.raises(pickle.UnpicklingError, match="no plain numpy array"):
            fetch.unpickle_array(gzip.compress(pickle.dumps(bad)))


def fake_wheel(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/data.txt", "hello")


def test_wheel_with_another_hash_is_refused(cache: Path) -> None:
    package = Package("some-thing", "1.0", "0" * 64)
    path = fetch.archive_path(package)
    fake_wheel(path)
    with pytest.raises(fetch.FetchError, match="SHA-256") as caught:
        fetch.read_member(package, "thing/data.txt")
    assert str(path) in str(caught.value) and "Delete the file" in str(caught.value)
    right = dataclasses.replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert fetch.read_member(right, "thing/data.txt") == b"hello"


def test_offline_is_an_error_with_a_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = Package("some-thing", "1.0", "0" * 64)
    with pytest.raises(fetch.FetchError, match="pip download --no-deps some-thing==1.0"):
        fetch.fetch(package)
    assert not fetch.archive_path(package).exists()


# --- storage and recipe ---


def test_atomic_directory_leaves_nothing_half_written(tmp_path: Path) -> None:
    target = tmp_path / "part"
    with pytest.raises(RuntimeError), storage.atomic_directory(target) as scratch:
        (scratch / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with storage.atomic_directory(target) as scratch:
        (scratch / "whole").write_text("x")
        assert not target.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["part", "whole"]


def test_a_changed_recipe_has_a_directory_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = [
        Recipe(),
        Recipe(seed=1),
        Recipe(text=TextRecipe(steps=7)),
        Recipe(expert=dataclasses.replace(Recipe().expert, learning_rate=7e-5)),
    ]
    assert len({recipe.directory() for recipe in recipes}) == len(recipes)
    assert Recipe().directory() == Recipe().directory()
    assert Recipe().directory().is_relative_to(cache)
    before = Recipe().digest()
    monkeypatch.setattr(Recipe, "format_version", Recipe.format_version + 1)
    assert Recipe().digest() != before


# --- builds ---


def test_builds_of_one_seed_are_equal_and_of_two_seeds_are_not(
    pico_parts: Path, built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built.directory
    contents = files_of(first)
    monkeypatch.setenv("FEATCAL_CACHE_DIR", str(pico_parts.with_name("elsewhere")))
    second = build(PICO).directory
    assert first != second
    again = files_of(second)
    assert contents.keys() == again.keys()
    weights = [name for name in contents if name.endswith(".safetensors")]
    assert len(weights) == 1 + len(TASKS)
    for name in contents:
        assert contents[name] == again[name], name
    other = files_of(build(dataclasses.replace(PICO, seed=1)).directory)
    assert all(contents[name] != other[name] for name in weights)
    # only the default recipe is what the YAML files point to
    assert not Recipe.default_link().exists()


def test_an_interrupted_build_resumes_where_it_stopped(
    pico_parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune, tuned = build_module.tune_expert, []

    def interrupted(*arguments: object, **keywords: object) -> None:
        if len(tuned) == 2:
            raise KeyboardInterrupt
        tuned.append(None)
        tune(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "tune_expert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(PICO)
    parts = Build(PICO.directory())
    done = sorted(path.name for path in (parts.directory / "experts").iterdir())
    assert done == sorted(list(TASKS)[:2])
    before = files_of(parts.directory)

    retuned = []

    def counting(*arguments: object, **keywords: object) -> None:
        retuned.append(None)
        tune(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "tune_expert", counting)
    build(PICO)
    assert len(retuned) == len(TASKS) - 2
    after = files_of(parts.directory)
    assert {name: after[name] for name in before} == before
    # a complete build is only read
    build(PICO)
    assert len(retuned) == len(TASKS) - 2
    assert files_of(parts.directory) == after


def test_default_recipe_is_linked_for_the_yaml_files(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recipe, "__eq__", lambda *_: True)
    assert build(PICO) == built
    assert Recipe.default_link().is_symlink()
    assert Recipe.default_link().resolve() == built.directory.resolve()
    build(PICO)  # replacing the link works too
    assert load_split("latin", "test", Recipe.default_link()).images.shape == (20, 28, 28)


# --- checkpoints ---
# Equal up to rounding: transformers 4 maps files into memory, where tensors are aligned otherwise.


def load_completely(kind: Any, directory: Path) -> Any:
    """Load a model of which no weight may be missing or left over."""
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def test_checkpoints_load_with_equal_outputs_and_prefixed_keys(built: Build) -> None:
    from safetensors import safe_open

    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    base = load_completely(CLIPModel, built.clip)
    vision = CLIPVisionModel.from_pretrained(built.clip)
    with torch.no_grad():
        outputs = [
            model(pixel_values=pixels).pooler_output
            for model in (pico_tower(), base.vision_model.eval(), vision.eval())
        ]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[2], outputs[0], atol=1e-5, rtol=0)

    with safe_open(built.expert("greek") / "model.safetensors", "pt") as file:
        assert all(name.startswith("vision_model.") for name in file.keys())  # noqa: SIM118
    expert = load_completely(CLIPVisionModel, built.expert("greek"))
    with torch.no_grad():
        tuned = expert.eval()(pixel_values=pixels).pooler_output
    assert (tuned - outputs[0]).abs().max() > 1e-4


# Each way to begin in a process of its own, forks of one that has started.
_LOAD_AND_LIST = """
import os
from featcal_fusionbench.sweeps.compose import compose_config
from fusion_bench import instantiate
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
known = set(CLIPTemplateFactory._dataset_mapping)
for load in (["load_model", "_pretrained_"], ["load_processor"]):
    if os.fork() == 0:
        config = compose_config(["modelpool=CLIPVisionModelPool/featcal_embedded"])
        pool = instantiate(config.modelpool)
        getattr(pool, load[0])(*load[1:])
        print(load[0], *sorted(set(CLIPTemplateFactory._dataset_mapping) - known), flush=True)
        break
    os.wait()
"""


@pytest.mark.cli
@pytest.mark.slow
def test_tasks_are_known_once_a_method_has_loaded_anything_it_starts_with(
    pico: Pico, tmp_path: Path
) -> None:
    (tmp_path / "clip").symlink_to(pico.base)
    finished = run_forked(
        _LOAD_AND_LIST, cwd=tmp_path, env={"FEATCAL_BENCHMARK_DIR": str(tmp_path)}
    )
    for load in ("load_model", "load_processor"):
        assert f"{load} {' '.join(sorted(TASKS))}" in finished.stdout, finished.stdout


def test_a_saved_tower_gives_the_same_outputs(tmp_path: Path) -> None:
    model = pico_tower()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    save_tower(model, tmp_path)
    loaded = CLIPVisionModel.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(pixel_values=pixels).pooler_output,
            model(pixel_values=pixels).pooler_output,
            atol=1e-5,
            rtol=0,
        )


def test_prompts_are_whole_words_and_end_in_the_end_token(built: Build) -> None:
    processor = CLIPProcessor.from_pretrained(built.clip)
    tokenizer = processor.tokenizer
    for task in TASKS.values():
        for template in task.templates:
            prompt = template(task.classnames[-1])
            ids = tokenizer(prompt)["input_ids"]
            assert len(ids) == len(prompt.split()) + 2, prompt
            assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
            assert tokenizer.unk_token_id not in ids[1:-1]


def test_merges_are_most_frequent_first() -> None:
    assert learn_merges(["aab aab", "ab"])[0] == ("a", "b</w>")
    assert learn_merges(["x"]) == []


# --- the converted tower ---


def dinov2_weights(width: int, hidden: int, layers: int) -> dict[str, Tensor]:
    """Random weights by DINOv2's names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3 + 0.1

    weights = {
        "embeddings.cls_token": random(1, 1, width),
        "embeddings.patch_embeddings.projection.weight": random(width, 3, 14, 14) * 0.2,
        "embeddings.patch_embeddings.projection.bias": random(width),
        "position": random(1 + 5 * 5, width),
        "layernorm.weight": random(width),
        "layernorm.bias": random(width),
    }
    for index in range(layers):
        block = f"encoder.layer.{index}."
        for norm in ("norm1", "norm2"):
            weights[f"{block}{norm}.weight"] = random(width)
            weights[f"{block}{norm}.bias"] = random(width)
        for name, shape in (
            ("attention.attention.query", (width, width)),
            ("attention.attention.key", (width, width)),
            ("attention.attention.value", (width, width)),
            ("attention.output.dense", (width, width)),
            ("mlp.fc1", (hidden, width)),
            ("mlp.fc2", (width, hidden)),
        ):
            weights[f"{block}{name}.weight"] = random(*shape)
            weights[f"{block}{name}.bias"] = random(shape[0])
        for scale in ("layer_scale1", "layer_scale2"):
            weights[f"{block}{scale}.lambda1"] = random(width)
    return weights


def test_conversion_computes_what_dinov2_computes() -> None:
    """Against transformers' own DINOv2, with the same weights."""
    from transformers import Dinov2Config, Dinov2Model

    width, hidden, layers, size = 128, 512, 2, 70
    weights = dinov2_weights(width, hidden, layers)
    reference = Dinov2Model(
        Dinov2Config(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // tower.HEAD_SIZE,
            image_size=size,
            patch_size=14,
            layer_norm_eps=tower.LAYER_NORM_EPS,
        )
    ).eval()
    # transformers 5 renamed the attention's modules
    renamed = {"attention.attention.query": "attention.q_proj"}
    renamed |= {"attention.attention.key": "attention.k_proj"}
    renamed |= {"attention.attention.value": "attention.v_proj"}
    renamed |= {"attention.output.dense": "attention.o_proj"}
    known = reference.state_dict()
    state = {}
    for name, value in weights.items():
        for old, new in renamed.items():
            name = name if name in known else name.replace(old, new)
        state[name] = value
    del state["position"]
    state["embeddings.position_embeddings"] = weights["position"][None]
    state["embeddings.mask_token"] = torch.zeros(1, width)
    reference.load_state_dict(state, strict=True)
    converted = tower.convert(weights, size)
    pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference(pixels).pooler_output
        found = converted(pixel_values=pixels).pooler_output
    torch.testing.assert_close(found[:, :width], expected, atol=2e-3, rtol=2e-3)
    assert not found[:, width:].any()


def test_no_input_of_a_converted_linear_is_dead() -> None:
    """RegMean inverts the Gram matrix of every Linear's inputs."""
    converted = tower.convert(dinov2_weights(128, 512, 2), 28)
    energies: dict[str, Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor]) -> None:
            energies[name] = inputs[0].square().mean((0, 1))

        module.register_forward_pre_hook(hook)

    for name, module in converted.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(name, module)
    with torch.no_grad():
        converted(pixel_values=torch.randn(4, 3, 28, 28))
    assert len(energies) == 2 * 6
    for name, energy in energies.items():
        assert energy.min() > 1e-6 * energy.mean(), name


def test_positions_are_kept_where_the_grid_is_the_same() -> None:
    position, bias = torch.randn(1 + 9, 4), torch.randn(4)
    resampled = tower.resample_positions(position, bias, grid=3)
    torch.testing.assert_close(resampled[0], position[0])
    torch.testing.assert_close(resampled[1:], position[1:] + bias)
    assert tower.resample_positions(position, bias, grid=2).shape == (5, 4)


# --- results ---


def demo_of(levels: dict[str, float], *more: tuple[str, int, float]) -> Demo:
    """A demo whose rows have the same score on every task, for seed 0 and what is given beside."""
    demo = Demo("image", load_experiment("demo_image"), [0, 1], list(COLOURS))
    for row, seed, score in [(row, 0, score) for row, score in levels.items()] + [*more]:
        where = ("merged", row) if row.startswith("featcal") else (row, "none")
        result = cell(*where, dict.fromkeys(TASKS, score), seed, tasks=tuple(TASKS))
        demo.add(result.cell, result, kept=row != "featcal-module")
    return demo


def test_lines_are_means_over_tasks_and_seeds() -> None:
    levels = {"featcal-module": 0.6, "merged": 0.3, "experts": 0.9}
    demo = demo_of(levels, ("featcal-module", 1, 0.8))
    lines = demo.lines()
    assert list(lines.index) == ["experts", "merged", "featcal-module"]
    featcal = lines.loc["featcal-module"]
    assert featcal.latin == featcal.average == pytest.approx(0.7)
    assert featcal.deviation == pytest.approx(math.sqrt(0.02))
    assert featcal.share == pytest.approx((0.7 - 0.3) / (0.9 - 0.3))
    assert featcal.seconds == 24 * 3600
    assert math.isnan(lines.seconds["merged"]) and math.isnan(lines.deviation["experts"])
    assert math.isnan(demo_of({"featcal-module": 0.6}).lines().share["featcal-module"])


# --- the demo, through FusionBench ---


@pytest.mark.slow
def test_the_demo_runs_its_rows_and_keeps_those_that_depend_on_the_build_alone(
    built: Build,
    in_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe_module = importlib.import_module(Recipe.__module__)
    monkeypatch.setattr(recipe_module, "Recipe", lambda seed: dataclasses.replace(PICO, seed=seed))
    assert driver.main(["--rows", "experts", "merged", "featcal-module"]) == 0
    printed = capsys.readouterr().out
    variable = f"FEATCAL_BENCHMARK_DIR={PICO.directory()} "
    assert f"{variable}fusion_bench method=featcal method.granularity=module" in printed
    output = in_tmp_path / "outputs/featcal_benchmark/image"
    document = json.loads((output / "table.json").read_text())
    assert [row["row"] for row in document["rows"]] == ["experts", "merged", "featcal-module"]
    for run in document["runs"]:
        assert list(run["accuracies"]) == list(TASKS) and run["seconds"] > 0
        assert all(0 <= accuracy <= 1 for accuracy in run["accuracies"].values())
    assert (output / "table.png").is_file()

    def run_again(overrides: list[str], config_dir: Path | None, log_dir: Path) -> None:
        raise RuntimeError(f"no luck with {log_dir.parents[2].name}")

    monkeypatch.setattr(in_process, "run_program", run_again)
    assert driver.main(["--rows", "experts", "merged"]) == 1
    assert "failed: merged/none/seed0: RuntimeError: no luck with merged" in capsys.readouterr().out
    (kept,) = json.loads((output / "table.json").read_text())["runs"]
    assert kept == {**document["runs"][0], "seconds": None}


def test_figure_and_table_show_every_row(tmp_path: Path) -> None:
    from rich.console import Console

    levels = dict(zip(COLOURS, (0.4, 0.9, 0.5, 0.7, 0.75, 0.8), strict=True))
    demo = demo_of(levels)
    console = Console(record=True, width=200)
    console.print(demo.write(tmp_path / "new"))
    with Image.open(tmp_path / "new" / "table.png") as image:
        assert image.width > 1000
    text = console.export_text()
    assert all(demo.title_of(row) in text for row in COLOURS)
    assert "75.0 %" in text  # (0.8 - 0.5) / (0.9 - 0.5)
