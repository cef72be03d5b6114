"""Corruptions of calibration images."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageFilter
from torch.utils.data import Dataset

from featcal_fusionbench.benchmark.image.corruptions import CORRUPTIONS, CorruptedImages, corrupt

SIDE = 42


def picture(seed: int = 0) -> Image.Image:
    """A smooth picture with edges: shapes, as the benchmark's are."""
    rng = np.random.default_rng(seed)
    noise = Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    smooth = np.asarray(noise.filter(ImageFilter.GaussianBlur(4)), dtype=float)
    return Image.fromarray(np.where(smooth > smooth.mean(), 220, 30).astype(np.uint8))


def values(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.float64) / 255


class Pictures(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": picture(), "label": index}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_changes_but_can_still_be_recognised(name: str) -> None:
    clean = picture()
    found = corrupt(clean, name, seed=0)
    assert found.mode == "RGB" and found.size == clean.size
    difference = np.abs(values(found) - values(clean)).mean()
    assert 0.005 < difference < 0.35
    if name not in ("contrast", "spatter"):
        correlation = np.corrcoef(values(found).ravel(), values(clean).ravel())[0, 1]
        assert correlation > 0.7
    assert values(clean).tolist() == values(picture()).tolist()  # the original is left alone


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_seed_gives_the_same_image(name: str) -> None:
    one, two = (values(corrupt(picture(), name, seed=3)) for _ in range(2))
    assert np.array_equal(one, two)


def test_sizes_of_effects() -> None:
    flat = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    noisy = values(corrupt(flat, "gaussian_noise", seed=0))
    assert noisy.std() == pytest.approx(0.18, rel=0.1)
    struck = values(corrupt(flat, "impulse_noise", seed=0))
    assert np.isin(struck, (0, 1)).mean() == pytest.approx(0.09, rel=0.2)
    clean, faint = values(picture()), values(corrupt(picture(), "contrast", seed=0))
    assert faint.std((0, 1)) == pytest.approx(0.2 * clean.std((0, 1)), rel=0.05)
    blocks = values(corrupt(picture(), "pixelate", seed=0)).reshape(21, 2, 21, 2, 3)
    assert np.ptp(blocks, axis=(1, 3)).max() == 0


def test_a_blur_moves_no_light_and_blurs_along_a_line() -> None:
    dot = Image.new("RGB", (SIDE, SIDE))
    dot.putpixel((21, 21), (255, 255, 255))
    blurred = values(corrupt(dot, "motion_blur", seed=1))[..., 0]
    assert blurred.sum() == pytest.approx(1, abs=0.1)
    rows, columns = np.nonzero(blurred > 0.02)
    assert np.ptp(columns) >= 3 and np.ptp(columns) >= np.ptp(rows)
    flat = Image.new("RGB", (SIDE, SIDE), (90, 90, 90))
    assert np.ptp(values(corrupt(flat, "motion_blur", seed=1))) == 0  # no dark border moves in


def test_images_of_a_data_set_are_corrupted_each_in_its_own_way() -> None:
    data = CorruptedImages(Pictures(), "gaussian_noise")
    first, second = data[0], data[1]
    assert len(data) == 3 and second["label"] == 1
    assert not np.array_equal(values(first["image"]), values(second["image"]))
    assert np.array_equal(values(first["image"]), values(data[0]["image"]))


def test_an_unknown_corruption_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="'fog'.* contrast, gaussian_noise"):
        CorruptedImages(Pictures(), "fog")
