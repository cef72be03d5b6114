"""Every form in which data may be given: read as the plain form is, or refused by name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf
from pico import Pico
from pico_t5 import tokenizer
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data import IterableDataset as TorchStream
from transformers import CLIPImageProcessor, T5Config, T5ForConditionalGeneration

from featcal_fusionbench.architectures import Architecture
from featcal_fusionbench.architectures.clip_vision import ClipVision
from featcal_fusionbench.architectures.t5 import T5, T5Settings
from featcal_fusionbench.calibration import CalibrationSettings
from featcal_fusionbench.data.draws import Batches, draw_from_stream
from featcal_fusionbench.errors import CalibrationDataError, CalibrationError, SettingsError
from featcal_fusionbench.method.featcal import FeatCalAlgorithm
from featcal_fusionbench.method.samples import Samples, draw_samples
from featcal_fusionbench.report.codec import dumps, from_json, to_json

COUNT = 8


# --- helpers ----------------------------------------------------------------------------------


class Clip:
    """A pico CLIP, its processor, images, and what the processor makes of each of them."""

    def __init__(self, pico: Pico) -> None:
        self.model = pico.load_base()
        self.processor = ClipVision().load_processor(pico.instance_pool())
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (COUNT, 24, 20, 3), generator=generator).to(torch.uint8)
        self.images = [Image.fromarray(p.numpy()) for p in pixels]
        self.expected = self.processed(self.images)

    def processed(self, images: Sequence[Image.Image]) -> Tensor:
        return self.processor(images=list(images), return_tensors="pt")["pixel_values"]


@pytest.fixture(scope="module")
def clip(pico: Pico) -> Clip:
    return Clip(pico)


def words_and_t5() -> tuple[Any, nn.Module]:
    words = tokenizer()
    config = T5Config(vocab_size=len(words), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return words, T5ForConditionalGeneration(config)


def pool_of(sources: Mapping[str, Any], role: str = "train", kind: Any = BaseModelPool) -> Any:
    return kind({"_pretrained_": nn.Identity()}, **{f"{role}_datasets": dict(sources)})


def sampled(
    pool: Any, architecture: Architecture, processor: Any, model: nn.Module, **settings: Any
) -> Samples:
    tasks = list(pool._train_datasets or pool._val_datasets)
    chosen = CalibrationSettings(**{"n_samples": 5, "n_heldout": 2, "batch_size": 3, **settings})
    return draw_samples(pool, tasks, architecture, processor, model, chosen, show_progress=False)


def read_pixels(clip: Clip, source: Any, pool: Any = None, **settings: Any) -> Samples:
    pool = pool_of({"a": source}) if pool is None else pool
    processor = settings.pop("processor", clip.processor)
    return sampled(pool, ClipVision(), processor, clip.model, **settings)


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = CalibrationError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def require_the_same(samples: Samples, key: str, expected: Sequence[Tensor]) -> None:
    """The inputs drawn are those of the plain form at the same positions."""
    (of,) = samples.inputs.values()
    for batches, indices in (
        (of.calibration, of.data.indices),
        (of.heldout, of.data.heldout_indices),
    ):
        rows = [row for batch in batches for row in batch[key]]
        assert len(rows) == len(indices) > 0
        for row, index in zip(rows, indices, strict=True):
            assert torch.equal(row, expected[index]), index


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def hugging_face(images: Sequence[Image.Image], column: str = "image") -> datasets.Dataset:
    features = datasets.Features({column: datasets.Image()})
    return datasets.Dataset.from_dict({column: list(images)}, features=features)


def files(images: Sequence[Image.Image], root: Path, kind: type = str) -> list[Any]:
    for i, image in enumerate(images):
        image.save(root / f"{i}.png")
    return [kind(root / f"{i}.png") for i in range(len(images))]


class Streamed(TorchStream):
    """A stream of PyTorch, which knows its length and has an inherited item access."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class OnlyIterable:
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class FailingAt:
    """A data set some of whose items cannot be read."""

    def __init__(self, items: Sequence[Any], *places: int) -> None:
        self.items, self.places = items, places

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if index in self.places:
            raise OSError(f"image file at 0x{index} is truncated")  # as PIL names what it read
        return self.items[index]


# --- images -----------------------------------------------------------------------------------

Images = Sequence[Image.Image]
IMAGE_FORMS: dict[str, Callable[[Images, Path], Any]] = {
    "images": lambda images, root: list(images),
    "pairs": lambda images, root: [(image, 3) for image in images],
    "rows": lambda images, root: [{"image": image, "label": 3} for image in images],
    "datasets": lambda images, root: hugging_face(images),
    "not decoded": lambda images, root: hugging_face(images).cast_column(
        "image", datasets.Image(decode=False)
    ),
    "numpy format": lambda images, root: hugging_face(images).with_format("numpy"),
    "torch format": lambda images, root: hugging_face(images).with_format("torch"),
    "a function as format": lambda images, root: hugging_face(images).with_transform(
        lambda rows: {"img": rows["image"]}
    ),
    "one column of a data set": lambda images, root: hugging_face(images)["image"],
    "stream": lambda images, root: hugging_face(images).to_iterable_dataset(),
    "formatted stream": lambda images, root: (
        hugging_face(images).to_iterable_dataset().with_format("torch")
    ),
    "torch stream": lambda images, root: Streamed(images),
    "iterable": lambda images, root: OnlyIterable(images),
    "splits": lambda images, root: datasets.DatasetDict(
        {"test": hugging_face(images[:1]), "train": hugging_face(images)}
    ),
    "the only split": lambda images, root: {"whole": list(images)},
    "splits of streams": lambda images, root: datasets.IterableDatasetDict(
        {"train": hugging_face(images).to_iterable_dataset()}
    ),
    "paths": lambda images, root: files(images, root),
    "Paths": lambda images, root: [{"image": path} for path in files(images, root, Path)],
    "bytes": lambda images, root: [{"image": png(image)} for image in images],
    "undecoded alone": lambda images, root: [{"bytes": png(i), "path": None} for i in images],
    "height, width, channels": lambda images, root: [np.asarray(image) for image in images],
    "channels, height, width": lambda images, root: [
        {"image": np.asarray(image).transpose(2, 0, 1)} for image in images
    ],
    "tensors": lambda images, root: TensorDataset(
        torch.stack([torch.tensor(np.asarray(i)).permute(2, 0, 1) for i in images])
    ),
    "64-bit numbers": lambda images, root: [
        {"image": np.asarray(image).astype(np.int64)} for image in images
    ],
    "nested lists": lambda images, root: [{"image": np.asarray(i).tolist()} for i in images],
    "with opaque alpha": lambda images, root: [np.asarray(i.convert("RGBA")) for i in images],
    "img": lambda images, root: hugging_face(images, "img"),
    "webdataset": lambda images, root: [
        {"jpg": png(image), "cls": b"3", "__key__": "7"} for image in images
    ],
    "whole pixel_values": lambda images, root: [{"pixel_values": np.asarray(i)} for i in images],
    "image before others": lambda images, root: [
        {"img": images[0], "image": image, "pixel_values": 0} for image in images
    ],
    "subset": lambda images, root: Subset(hugging_face(images), range(COUNT)),  # pyright: ignore
}


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_images_of_every_form_are_the_same_pixels(clip: Clip, tmp_path: Path, form: str) -> None:
    samples = read_pixels(clip, IMAGE_FORMS[form](clip.images, tmp_path))
    require_the_same(samples, "pixel_values", list(clip.expected))
    assert samples.warnings == ()
    assert samples.example["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("column", ["photo", {"a": "photo"}])
def test_the_column_can_be_set(clip: Clip, column: Any) -> None:
    rows = [{"photo": image, "image": clip.images[0]} for image in clip.images]
    samples = read_pixels(clip, rows, input_column=column)
    require_the_same(samples, "pixel_values", list(clip.expected))


def test_processed_pixels_are_used_as_they_are_also_beside_images(clip: Clip) -> None:
    ready = clip.expected + 0.25
    rows: list[Any] = [{"pixel_values": pixels.numpy().tolist()} for pixels in ready]
    expected = list(ready)
    for i in (1, 4, 6):
        rows[i], expected[i] = {"image": clip.images[i]}, clip.expected[i]
    require_the_same(read_pixels(clip, rows), "pixel_values", expected)


def test_cameras_images_are_upright_as_datasets_makes_them(clip: Clip) -> None:
    def held(image: Image.Image, column: bool) -> Any:
        exif = Image.Exif()
        exif[0x0112] = 6
        buffer = io.BytesIO()
        image.save(buffer, "png", exif=exif)
        return {"image": buffer.getvalue()} if column else buffer.getvalue()

    turned = [ImageOps.exif_transpose(Image.open(io.BytesIO(held(i, False)))) for i in clip.images]
    assert turned[0].size == clip.images[0].size[::-1]
    samples = read_pixels(clip, [held(image, True) for image in clip.images])
    require_the_same(samples, "pixel_values", list(clip.processed(turned)))


def torch_format(images: Sequence[Image.Image]) -> datasets.Dataset:
    return hugging_face(images).with_format("torch")


MODES: list[tuple[str, Any, tuple[int, int, int] | None]] = [
    ("1", 1, (255, 255, 255)),
    ("L", 100, (100, 100, 100)),
    ("LA", (100, 7), (100, 100, 100)),
    ("P", (30, 60, 90), (30, 60, 90)),
    ("RGB", (30, 60, 90), (30, 60, 90)),
    ("RGBA", (30, 60, 90, 7), (30, 60, 90)),
    ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ("I;16", 40000, None),
    ("I", 70000, None),
    ("F", 0.5, None),
]


# PNG, in which `datasets` stores images, does not have all modes.
@pytest.mark.parametrize(
    "mode, colour, rgb, source",
    [(*mode, list) for mode in MODES]
    + [(*mode, torch_format) for mode in MODES if mode[0] not in ("CMYK", "F", "I")],
)
def test_modes_of_images(clip: Clip, mode: str, colour: Any, rgb: Any, source: Any) -> None:
    if mode == "P":  # an index into a palette that is not grey
        image = Image.new("RGB", (20, 20), colour).convert("P", palette=Image.Palette.ADAPTIVE)
    else:
        image = Image.new(mode, (20, 20), colour)
    if rgb is None:
        refused(
            lambda: read_pixels(clip, source([image] * COUNT)),
            "task a", f"mode {mode}", "8 bits per channel", "items ", "and 2 more",
        )  # fmt: skip
        return
    samples = read_pixels(clip, source([image] * COUNT))
    expected = clip.processed([Image.new("RGB", (20, 20), rgb)])[0]
    require_the_same(samples, "pixel_values", [expected] * COUNT)
    assert any("7 of 7 images drawn are transparent" in w for w in samples.warnings) == (
        mode in ("LA", "RGBA")
    )


def array(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED_IMAGES: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "several columns": ({"img": 0, "png": 0}, {}, ("img, png", "method.input_column")),
    "no known column": ({"photo": 0}, {}, ("'image'", "photo", "method.input_column")),
    "no such column": ({"photo": 0}, {"input_column": "foto"}, ("'foto'", "did you mean photo?")),
    "no columns at all": ((0, 1), {"input_column": "img"}, ("tuple", "input_column=img")),
    "ambiguous axes": (array(3, 20, 4), {}, ("(3, 20, 4)", "channels")),
    "no channels": (array(5, 20, 7), {}, ("(5, 20, 7)", "channels")),
    "too many axes": (array(1, 3, 20, 20), {}, ("(1, 3, 20, 20)",)),
    "fractions": (array(3, 16, 16, dtype=np.float32), {}, ("float32", "pixel_values")),
    "16 bits": ({"image": array(20, 20, dtype=np.uint16) + 300}, {}, ("from 300 to 300",)),
    "truth values": ({"image": array(20, 20, dtype=bool)}, {}, ("bool numbers",)),
    "ragged lists": ({"image": [[1, 2], [3]]}, {}, ("unlike lengths",)),
    "pixels of another size": (
        {"pixel_values": torch.zeros(3, 20, 20)}, {}, ("(3, 20, 20)", "(3, 16, 16)"),
    ),
    "pixels with an axis more": ({"pixel_values": torch.zeros(1, 3, 16, 16)}, {}, ("(1, 3, 16,",)),
    "pixels that are NaN": (
        {"pixel_values": torch.full((3, 16, 16), torch.nan)}, {}, ("NaN or Inf",),
    ),
    "nothing": ({"image": None}, {}, ("NoneType is no image",)),
    "neither bytes nor path": ({"image": {"bytes": None, "path": None}}, {}, ("neither",)),
    "missing file": ({"image": "/nowhere/1.png"}, {}, ("FileNotFoundError", "/nowhere/1.png")),
    "no image file": ({"image": b"text"}, {}, ("UnidentifiedImageError",)),
    "truncated file": (
        {"image": png(Image.effect_noise((60, 60), 50))[:900]}, {}, ("OSError", "truncated"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED_IMAGES)
def test_other_images_are_refused_by_name(clip: Clip, form: str) -> None:
    item, settings, words = REFUSED_IMAGES[form]
    good = {"photo": clip.images[0]} if "input_column" in settings else clip.images[0]
    every = form in ("no such column", "no columns at all")
    items = [item if every or i == 3 else good for i in range(7)]
    place = () if every else ("in item 3",)
    refused(lambda: read_pixels(clip, items, **settings), "task a", *place, *words)


def test_all_items_at_fault_of_all_tasks_are_named_at_once(clip: Clip) -> None:
    broken = {"image": b"text"}
    pool = pool_of({
        "a": FailingAt(clip.images[:7], 2, 5),
        "b": [broken if i in (0, 6) else {"image": clip.images[i]} for i in range(7)],
        "c": clip.images,
    })  # fmt: skip
    with pytest.raises(CalibrationDataError) as caught:
        read_pixels(clip, None, pool)
    of_a, of_b = sorted(str(caught.value).splitlines())
    assert "task a" in of_a and "image file is truncated" in of_a
    assert "items 2, 5. " in of_a and "modelpool.train_datasets.a" in of_a
    assert "task b" in of_b and "items 0, 6." in of_b


def test_a_batch_names_exactly_the_items_at_fault() -> None:
    def prepare(items: Sequence[int]) -> dict[str, Any]:
        if {7, 2} & set(items):
            raise OSError("truncated")
        if 4 in items and len(items) > 1:
            raise ValueError("unlike sizes")
        return {"x": items}

    for indices, words in (
        ((1, 7, 3, 2), "items [7, 2] of task dtd cannot be turned into inputs: OSError: trunc"),
        ((3, 4), "items [3, 4] of task dtd cannot together be turned into inputs: ValueError"),
    ):
        batches = Batches(range(9), indices, 4, prepare, "dtd")
        refused(lambda batches=batches: list(batches), words)


# --- transforms and processors ----------------------------------------------------------------


def as_tensor(image: Any) -> Tensor:
    return torch.tensor(np.asarray(image.convert("RGB").resize((16, 16)))).permute(2, 0, 1) / 255


PROCESSORS: dict[str, Callable[[Clip], Any]] = {
    "a CLIPProcessor": lambda clip: clip.processor,
    "an image processor": lambda clip: clip.processor.image_processor,
    "a function": lambda clip: as_tensor,
}


@pytest.mark.parametrize("form", PROCESSORS)
@pytest.mark.parametrize("kind", [CLIPVisionModelPool, BaseModelPool])
def test_processors_may_be_objects(clip: Clip, kind: Any, form: str) -> None:
    pool, processor = pool_of({"a": clip.images}, kind=kind), PROCESSORS[form](clip)
    pool._processor = processor
    assert ClipVision().load_processor(pool) is processor
    expected = clip.expected if form != "a function" else [as_tensor(i) for i in clip.images]
    samples = read_pixels(clip, None, pool, processor=processor)
    require_the_same(samples, "pixel_values", list(expected))


def test_transforms_get_items_in_the_data_set_s_own_format(clip: Clip) -> None:
    source = hugging_face([image.resize((16, 16)) for image in clip.images]).with_format("torch")
    samples = read_pixels(clip, source, processor=lambda tensor: tensor / 255)
    expected = [as_tensor(image) for image in clip.images]
    require_the_same(samples, "pixel_values", expected)


@pytest.mark.parametrize(
    "result, words",
    [
        ({"pixel_values": torch.zeros(3, 16, 16)}, ("a dict",)),
        ([torch.zeros(3, 16, 16)], ("a list",)),
        (torch.zeros(1, 3, 16, 16), ("(1, 3, 16, 16)", "(3, 16, 16)")),
        (torch.zeros(3, 20, 20), ("(3, 20, 20)", "(3, 16, 16)")),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), ("dtype torch.uint8",)),
        (torch.full((3, 16, 16), torch.inf), ("NaN or Inf",)),
    ],
)
def test_what_a_transform_returns_is_checked(clip: Clip, result: Any, words: Any) -> None:
    def transform(image: Any) -> Any:
        return result

    call = lambda: read_pixels(clip, clip.images, processor=transform)  # noqa: E731
    refused(call, "task a", "modelpool.processor (transform)", *words)


def test_a_processor_of_another_model_is_refused(clip: Clip) -> None:
    larger = CLIPImageProcessor(size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20})
    call = lambda: read_pixels(clip, clip.images, processor=larger)  # noqa: E731
    refused(call, "task a", "modelpool.processor", "(3, 20, 20)", "(3, 16, 16)")


def test_a_pool_without_a_processor_is_told_what_to_write(clip: Clip) -> None:
    pool = pool_of({"a": clip.images})
    words = ("BaseModelPool", "CLIPVisionModelPool(models, processor=", "modelpool.processor")
    refused(lambda: ClipVision().load_processor(pool), *words)
    pool._processor = 7
    refused(lambda: ClipVision().load_processor(pool), "modelpool.processor is of type int")


# --- what a pool's entry may be -----------------------------------------------------------------


class Untouchable(BaseAlgorithm):
    def run(self, modelpool: Any) -> Any:
        raise AssertionError("the merger was run although only a plan was asked for")


def test_a_pool_of_plain_objects_runs(pico: Pico, clip: Clip, tmp_path: Path) -> None:
    models: Any = {"_pretrained_": clip.model} | {t: pico.load_expert(t) for t in pico.tasks}
    sources: Any = {t: hugging_face(clip.images) for t in pico.tasks}
    pool = CLIPVisionModelPool(models, processor=clip.processor, train_datasets=sources)
    plan = FeatCalAlgorithm(
        merger=Untouchable(), plan_only=True, n_samples=4, n_heldout=2, output_dir=str(tmp_path)
    )
    assert plan.run(pool) is None


@pytest.mark.parametrize("kind", [CLIPVisionModelPool, BaseModelPool])
@pytest.mark.parametrize("entry", ["path", "Path", "config", "OmegaConf", "stream", "validation"])
def test_entries_of_pools(clip: Clip, tmp_path: Path, kind: Any, entry: str) -> None:
    split = "validation" if entry == "validation" else "train"
    hugging_face(clip.images).to_parquet(tmp_path / f"{split}.parquet")
    hugging_face(clip.images[:1]).to_parquet(tmp_path / "test.parquet")
    config = {"_target_": "datasets.load_dataset", "path": str(tmp_path)}
    source = {
        "path": str(tmp_path),
        "Path": tmp_path,
        "config": config,  # all splits: the role's is taken
        "stream": {**config, "streaming": True},
        "OmegaConf": OmegaConf.create({**config, "split": split}),
        "validation": str(tmp_path),
    }[entry]
    pool = pool_of({"a": source}, "val" if entry == "validation" else "train", kind)
    samples = read_pixels(clip, None, pool)
    require_the_same(samples, "pixel_values", list(clip.expected))
    assert samples.inputs["a"].data.source == str(tmp_path) + ", train" * (entry == "OmegaConf")


def test_a_loader_that_a_user_wrote_is_used(clip: Clip) -> None:
    class Own(BaseModelPool):
        def load_train_dataset(self, dataset_name: str, *args: Any, **kwargs: Any) -> Any:
            return list(reversed(self._train_datasets[dataset_name]))  # pyright: ignore

    samples = read_pixels(clip, None, pool_of({"a": clip.images}, kind=Own))
    require_the_same(samples, "pixel_values", list(clip.expected.flip(0)))


@pytest.mark.parametrize(
    "source, words",
    [
        ({"path": "/x", "split": "train"}, ("no _target_", "datasets.load_dataset")),
        ({"left": [1], "right": [2]}, ("left, right", "train", "split: …")),
        (DataLoader(TensorDataset(torch.zeros(1))), ("DataLoader", ".dataset")),
        (iter([1, 2]), ("list_iterator", "once", "a list")),
        (7, ("a int, which is no data set",)),
        ([], ("empty",)),
        (OnlyIterable([]), ("empty",)),
        (OnlyIterable, ("a type, which is no data set",)),
        (datasets.DatasetDict(), ("(none)",)),
    ],
)
def test_other_entries_are_refused_by_name(clip: Clip, source: Any, words: Any) -> None:
    refused(lambda: read_pixels(clip, source), "a", "modelpool.train_datasets.a", *words)


# --- streams ----------------------------------------------------------------------------------


def from_stream(stream: Any, seed: int = 0) -> Any:
    return draw_from_stream(stream, "a", "s", "train", n_samples=5, n_heldout=2, seed=seed)


def test_streams_are_drawn_from_at_random_up_to_a_stated_limit() -> None:
    read = 0

    def endless() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield 10 * (read - 1)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    data, items = from_stream(endless())
    assert torch.equal(torch.get_rng_state(), before)
    both = [*data.indices, *data.heldout_indices]
    assert read == 28 and data.available is None
    assert len(data.indices) == 5 and len(data.heldout_indices) == 2 and len(set(both)) == 7
    assert items == {index: 10 * index for index in both}
    assert max(both) >= 7 and max(both) < 28
    assert "first 28 items" in data.note and "shuffle" in data.note
    assert from_stream(range(100))[0] == data
    assert from_stream(range(100), seed=1)[0] != data


def test_places_in_a_stream_are_drawn_alike() -> None:
    counts = torch.zeros(2, 28)
    for seed in range(400):
        data, _ = from_stream(range(100), seed=seed)
        counts[0, list(data.indices)] += 1
        counts[1, list(data.heldout_indices)] += 1
    # binomial: 400 · 5/28 = 71 with a deviation of 7.7, and 400 · 2/28 = 29 with 5.2
    assert counts[0].min() > 40 and counts[0].max() < 105
    assert counts[1].min() > 8 and counts[1].max() < 52


def test_a_short_stream_is_used_as_a_whole_and_said_to_be_short(clip: Clip) -> None:
    samples = read_pixels(clip, OnlyIterable(clip.images[:4]))
    data = samples.inputs["a"].data
    assert sorted(data.indices) == [0, 1, 2, 3] and data.available == 4 and not data.note
    assert "has only 4 items" in samples.warnings[0] and "0 instead of n_heldout" in str(
        samples.warnings
    )


def test_a_longer_stream_says_what_was_read_of_it(clip: Clip) -> None:
    samples = read_pixels(clip, OnlyIterable(clip.images * 4))
    assert "task a: OnlyIterable is a stream" in samples.warnings[0]
    assert "first 28 items" in samples.warnings[0]
    require_the_same(samples, "pixel_values", [*clip.expected] * 4)


def test_a_stream_that_fails_is_named() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ConnectionError("the hub is gone")

    words = ("task a", "modelpool.train_datasets.a", "after 1 items", "the hub is gone")
    refused(lambda: from_stream(failing()), *words)


# --- texts ------------------------------------------------------------------------------------

TEXTS = [f"the film is good number {word}" for word in "one two three is the film".split()] + [
    "is the question answered by the text or not",
    "not good",
]


def tokens(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def padded(ids: Sequence[int]) -> dict[str, list[int]]:
    more = 30 - len(ids)
    return {"input_ids": [*ids, *[0] * more], "attention_mask": [*[1] * len(ids), *[0] * more]}


TEXT_FORMS: dict[str, Callable[[list[str]], Any]] = {
    "texts": list,
    "text": lambda texts: [{"text": text} for text in texts],
    "input_text": lambda texts: [{"input_text": text, "text": "other"} for text in texts],
    "sentence": lambda texts: [{"sentence": text, "label": 1} for text in texts],
    "inputs": lambda texts: datasets.Dataset.from_dict({"inputs": texts, "targets": texts}),
    "question": lambda texts: OnlyIterable([{"question": text, "answer": ""} for text in texts]),
    "ids": lambda texts: [{"input_ids": tokens(text)} for text in texts],
    "one list in a list": lambda texts: [{"input_ids": [tokens(text)]} for text in texts],
    "tensors": lambda texts: [{"input_ids": torch.tensor([tokens(text)])} for text in texts],
    "whole floats": lambda texts: [{"input_ids": np.array(tokens(t), float)} for t in texts],
    "padded": lambda texts: [padded(tokens(text)) for text in texts],
    "true and false": lambda texts: [
        {k: torch.tensor(v, dtype=torch.bool if "mask" in k else torch.long)
         for k, v in padded(tokens(text)).items()}
        for text in texts
    ],
    "numpy format": lambda texts: datasets.Dataset.from_list(
        [padded(tokens(text)) for text in texts]
    ).with_format("numpy"),
    "torch format": lambda texts: datasets.Dataset.from_list(
        [padded(tokens(text)) for text in texts]
    ).with_format("torch"),
    "splits": lambda texts: datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"text": texts})}
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_texts_of_every_form_are_the_same_ids(form: str) -> None:
    words, model = words_and_t5()
    pool = pool_of({"a": TEXT_FORMS[form](TEXTS)})
    samples = sampled(pool, T5(), words, model, batch_size=1)
    (of,) = samples.inputs.values()
    read = {tuple(batch["input_ids"][0].tolist()) for batch in of.calibration}
    assert read == {tuple(tokens(TEXTS[index])) for index in of.data.indices}
    assert len(read) == 5 and samples.warnings == ()
    assert all(int(batch["attention_mask"].min()) == 1 for batch in of.calibration)


LABELS = {"decoder_inputs": "labels"}
REFUSED_ROWS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "shorter mask": ({"input_ids": [5, 6, 1], "attention_mask": [1, 1]}, {}, ("2 for 3",)),
    "longer mask": ({"input_ids": [5, 1], "attention_mask": [1, 1, 1]}, {}, ("3 for 2",)),
    "weights for a mask": (
        {"input_ids": [5, 6, 1], "attention_mask": [1, 2, 1]}, {}, ("other values than 0 and 1",),
    ),
    "halves for a mask": (
        {"input_ids": [5, 1], "attention_mask": [0.5, 1]}, {}, ("attention_mask", "whole numbers"),
    ),
    "fractions": ({"input_ids": [5.7, 1]}, {}, ("'input_ids'", "whole numbers")),
    "infinity": ({"input_ids": [float("inf"), 1]}, {}, ("whole numbers",)),
    "truth values": ({"input_ids": [True, False]}, {}, ("whole numbers",)),
    "gaps": ({"input_ids": [5, None, 1]}, {}, ("whole numbers",)),
    "digits": ({"input_ids": ["5", "1"]}, {}, ("whole numbers",)),
    "two lists": ({"input_ids": [[5, 1], [6, 1]]}, {}, ("(2, 2)",)),
    "unlike lists": ({"input_ids": [[5, 1], [6]]}, {}, ("unlike lengths",)),
    "one number": ({"input_ids": 5}, {}, ("int",)),
    "several texts": (
        {"question": "raw", "sentence": "raw"}, {}, ("question, sentence", "method.input_column"),
    ),
    "half an input": (
        {"question": "raw", "context": "raw"}, {}, ("context, question", "method.input_column"),
    ),
    "unknown column": ({"review": "raw"}, {}, ("review", "method.input_column")),
    "no text": ({"text": None}, {}, ("'text'", "NoneType")),
    "labels of a classifier": ({"input_ids": [5, 1], "labels": 3}, LABELS, ("'labels'", "int")),
    "labels as text": ({"input_ids": [5, 1], "labels": "no"}, LABELS, ("'labels'", "str")),
    "labels that are fractions": (
        {"input_ids": [5, 1], "labels": [0.5, 1]}, LABELS, ("'labels'", "whole numbers"),
    ),
    "labels of another vocabulary": (
        {"input_ids": [5, 1], "labels": [99999, 1]}, LABELS, ("labels beyond",),
    ),
    "an image": (7, {}, ("int",)),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED_ROWS)
def test_other_rows_are_refused_by_name(form: str) -> None:
    item, settings, said = REFUSED_ROWS[form]
    words, model = words_and_t5()
    good = {"input_ids": [5, 6, 1], "labels": [7, 1]}
    pool = pool_of({"a": [item if i == 3 else good for i in range(7)], "b": [good] * 7})
    refused(
        lambda: sampled(pool, T5(T5Settings(**settings)), words, model),
        "task a",
        "in item 3",
        *said,
    )


def test_labels_that_are_not_read_may_be_anything() -> None:
    words, model = words_and_t5()
    for labels in (3, "no", [0.5]):
        rows = [{"text": text, "labels": labels} for text in TEXTS]
        assert sampled(pool_of({"a": rows}), T5(), words, model).warnings == ()
    rows = [{"text": text, "labels": np.array([5, 1])} for text in TEXTS]  # and arrays are read
    assert "the same label" in sampled(pool_of({"a": rows}), T5(), words, model).warnings[0]


def test_texts_that_are_cut_off_are_warned_of() -> None:
    words, model = words_and_t5()
    long = "good " * 400
    pool = pool_of({"a": [long if i == 3 else TEXTS[i] for i in range(7)]})
    (warning,) = sampled(pool, T5(), words, model).warnings
    assert "task a" in warning and "model_max_length 256" in warning and "item 3" in warning


def test_rows_of_all_tasks_are_looked_through(clip: Clip) -> None:
    words, model = words_and_t5()
    good, bad = {"text": "good"}, {"input_ids": [5.5]}
    pool = pool_of({"a": [good] * 6 + [bad], "b": [bad] + [good] * 6, "c": [good] * 7})
    call = lambda: sampled(pool, T5(), words, model)  # noqa: E731
    refused(call, "task a", "in item 6", "task b", "in item 0")


# --- the setting ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "img", {"mnist": "img"}, {}])
def test_the_setting_survives_json_and_omegaconf(value: Any) -> None:
    given = OmegaConf.create({"column": value}).column
    settings = CalibrationSettings(input_column=given)
    assert settings.input_column == value and type(settings.input_column) is type(value)
    assert CalibrationSettings(**json.loads(json.dumps(settings.as_dict()))) == settings
    assert from_json(CalibrationSettings, json.loads(dumps(to_json(settings)))) == settings
    assert isinstance(hash(settings), int)
    assert settings.column_of("mnist") == ("img" if value else None)
    assert FeatCalAlgorithm(input_column=given).settings == settings


@pytest.mark.parametrize("value", ["", 3, ["img"], {"mnist": None}, {"mnist": ""}, {3: "img"}])
def test_other_columns_are_refused(value: Any) -> None:
    refused(
        lambda: CalibrationSettings(input_column=value), "input_column", "mnist: img",
        kind=SettingsError,
    )  # fmt: skip


def test_columns_of_unknown_tasks_are_refused(clip: Clip) -> None:
    call = lambda: read_pixels(clip, clip.images, input_column={"aa": "img"})  # noqa: E731
    refused(call, "input_column", "aa", "did you mean a?", kind=SettingsError)
