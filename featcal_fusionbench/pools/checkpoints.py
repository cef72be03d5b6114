"""Checkpoints on disk: which file holds which tensor, what is damaged, under which names it lies.

Only names and types are read here, from the files' headers; a tensor is read when it is asked for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fusion_bench.utils.modelscope import resolve_file_path
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelPoolError

__all__ = [
    "Checkpoint",
    "Place",
    "SafetensorsWeights",
    "check_files",
    "find_file",
    "open_checkpoint",
    "read_config",
    "read_header",
    "some",
    "stored_weights",
    "tied_names",
]

# In the order of `from_pretrained`: where both are there, an older save has left the second.
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# What wrappers and whole models put before the names of the model inside.
_WRAPPERS = re.compile(
    r"(?:(?:module|_orig_mod|model|clip|base_model\.model|vision_model|vision_tower)\.)*"
)
# CLIP's vision tower has this prefix in the nested layout of transformers before 5.6.
_TOWER = "vision_model."
_NOT_QUANTISED = (
    "quantised models cannot be merged or calibrated. Give the model from before it was quantised."
)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Place:
    """Where one tensor is stored.

    Attributes:
        path: The file.
        key: The tensor's name in it.
        dtype: Its type as safetensors writes it, such as ``BF16``.
        shape: Its shape.
        start: Where its bytes begin in the file.
        stop: Where they end.
        file: Which file was there, to be told from one that is written to the same path later.
    """

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: FileIdentity


class FileIdentity(NamedTuple):
    """What tells a file from its successors: number, size in bytes, and time of the last change."""

    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """That of the file that lies there now."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class SafetensorsWeights(Mapping[str, Tensor]):
    """Tensors of safetensors files under other names; each read when it is asked for.

    A file is open only while a tensor is read: what was read of an open file counts as this
    process's memory, and of twenty experts that is a lot.

    Args:
        places: Where each tensor is, by the name it is known as here.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if FileIdentity.of(place.path) != place.file:
            raise ModelPoolError(
                f"{place.path} was written anew while a run reads it: run again once it is whole."
            )
        if place.dtype not in _DTYPES:
            with safe_open(place.path, framework="pt") as file:
                return file.get_tensor(place.key)
        # the library would read the header, which names all tensors, for each one again
        data = torch.UntypedStorage.from_file(str(place.path), False, place.file.size)
        empty: Any = torch.empty(0, dtype=_DTYPES[place.dtype], device="cpu")
        return empty.set_(data[place.start : place.stop], 0, place.shape)

    def __contains__(self, name: object) -> bool:  # a mapping's own would read the tensor
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype_of(self, name: str) -> torch.dtype:
        """A tensor's precision, without reading it."""
        return _DTYPES[self._places[name].dtype]

    def are_one(self, first: str, second: str) -> bool:
        """Whether two names are the same stored tensor."""
        return self._places[first] == self._places[second]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors under the names of a reference model.

    Attributes:
        weights: The tensors.
        prefix: What stands before the names in the files; ``""`` or one of CLIP's are usual.
        left_out: Groups of stored tensors that the model has no part for, with their counts.
    """

    weights: SafetensorsWeights
    prefix: str
    left_out: Mapping[str, int]

    @property
    def wrapper(self) -> str:
        """The part of the prefix that loaders do not know: all but CLIP's own."""
        return self.prefix.removesuffix(_TOWER)


def find_file(source: str, filename: str, platform: str) -> Path | None:
    """A file of a checkpoint, from disk or the hub; None where the checkpoint does not have it.

    Args:
        source: Directory or hub id.
        filename: Name in it.
        platform: Hub that ids refer to, as FusionBench names it.
    """
    try:
        path = Path(resolve_file_path(source, filename, platform=platform))  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError):  # hub errors are OSErrors: not found, offline, not cached
        return None
    return path if path.is_file() else None


def read_config(source: str, platform: str, filename: str = "config.json") -> dict[str, Any] | None:
    """A JSON file of a checkpoint as it is written; None where there is none.

    Raises:
        ModelPoolError: It is cut off or no JSON.
    """
    directory = str(Path(source).parent) if Path(source).is_file() else source
    path = find_file(directory, filename, platform)
    return None if path is None else _read_json(path)


def check_files(source: str, *, name: str, platform: str = "hf") -> None:
    """Find what makes a checkpoint unreadable before a library meets it.

    Args:
        source: Directory, safetensors file, or hub id.
        name: The model's name in the pool, for messages.
        platform: Hub that ids refer to.

    Raises:
        ModelPoolError: A file is damaged or missing, or the weights are quantised.
    """
    config = read_config(source, platform)
    if config is not None and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ModelPoolError(f"model {name!r} ({source}) is quantised ({method}): {_NOT_QUANTISED}")
    _stored_tensors(source, platform)


def open_checkpoint(
    source: str, reference: Mapping[str, Tensor], *, name: str, platform: str = "hf"
) -> Checkpoint | None:
    """Find a checkpoint's safetensors tensors under the names of a reference model.

    Names may have lost or gained CLIP's ``vision_model.`` and the prefixes of known wrappers, and
    the checkpoint may hold more than the model (a whole CLIP with its text tower). Of tensors that
    are tied in the reference (T5's embeddings) it may hold one.

    Args:
        source: Directory, safetensors file, or hub id.
        reference: The base's tensors.
        name: The model's name in the pool, for messages.
        platform: Hub that ids refer to.

    Returns:
        The tensors, or None where there are no safetensors files.

    Raises:
        ModelPoolError: A file is damaged or missing, tensors are missing or too many, or they are
            not floating-point weights; the message names them.
    """
    stored = _stored_tensors(source, platform)
    if stored is None:
        return None
    check_files(source, name=name, platform=platform)
    tied, label = tied_names(reference), f"model {name!r} ({source})"
    prefix = _prefix(stored, reference, label)

    def key(wanted: str) -> str:
        return prefix + wanted.removeprefix(_TOWER)

    places: dict[str, Place] = {}
    for wanted in reference:
        found = [key(other) for other in (wanted, *tied[wanted]) if key(other) in stored]
        if found:
            places[wanted] = stored[found[0]]
    missing = [wanted for wanted in reference if wanted not in places]
    if missing:
        raise ModelPoolError(
            f"{label} lacks {len(missing)} of the base's {len(reference)} tensors, e.g. "
            f"{some(missing)}. {_remedy_for_missing(stored, reference, places)}"
        )
    strange = {w: p.dtype for w, p in places.items() if p.dtype not in _DTYPES}
    if strange:
        raise ModelPoolError(
            f"{label} holds weights that are not float32, float16, bfloat16 or float64: "
            f"{some(f'{wanted} {dtype}' for wanted, dtype in strange.items())}; {_NOT_QUANTISED}"
        )
    used = {key(wanted) for wanted in reference}
    left_out = _left_out(stored, used, reference, prefix, label)
    return Checkpoint(SafetensorsWeights(places), prefix, left_out)


def stored_weights(source: str, platform: str) -> SafetensorsWeights:
    """All tensors of a checkpoint under the names that they are stored with."""
    return SafetensorsWeights(_stored_tensors(source, platform) or {})


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each tensor the names of all that are the same memory, itself among them, in order."""
    same: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        has_memory = tensor.numel() > 0 and not tensor.is_meta
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if has_memory else name
        same.setdefault(where, []).append(name)
    return {name: names for names in same.values() for name in names}


def some(items: Iterable[str], limit: int = 3) -> str:
    """The first few of some names, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _prefix(stored: Mapping[str, Place], reference: Iterable[str], label: str) -> str:
    """What stands before the model's names in the files."""
    wanted = {name.removeprefix(_TOWER) for name in reference}
    counts = Counter(
        start
        for key in stored
        for start in _starts(key)
        if key[len(start) :] in wanted and _WRAPPERS.fullmatch(start)
    )
    best = counts.most_common(2)
    if len(best) == 2 and best[1][1] * 2 >= len(wanted):
        raise ModelPoolError(
            f"{label} holds the model twice, with {best[0][0]!r} and {best[1][0]!r} before the "
            "names: save one of them alone."
        )
    return best[0][0] if best else ""


def _starts(key: str) -> Iterator[str]:
    """All beginnings of a name that end where one of its parts does, from the empty one on."""
    yield ""
    for found in re.finditer(r"\.", key):
        yield key[: found.end()]


def _remedy_for_missing(
    stored: Mapping[str, Place], reference: Iterable[str], places: Mapping[str, Place]
) -> str:
    wanted = {name.removeprefix(_TOWER) for name in reference}
    if len(places) * 2 < len(wanted):
        counts = Counter(
            start for key in stored for start in _starts(key) if key[len(start) :] in wanted
        )
        for start, count in counts.most_common(1):
            if count * 2 >= len(wanted):
                return f"They are stored with {start!r} before their names: rename the tensors."
        return (
            "It is of another architecture than the base, or of none that is known here: every "
            "expert must be fine-tuned from the base."
        )
    return "The checkpoint is not complete: save the model again with save_pretrained."


def _left_out(
    stored: Mapping[str, Place],
    used: set[str],
    reference: Iterable[str],
    prefix: str,
    label: str,
) -> dict[str, int]:
    """What is stored besides the model, by group.

    Raises:
        ModelPoolError: It belongs into parts that the base has, such as a thirteenth layer.
    """
    parts = {name.removeprefix(_TOWER).partition(".")[0] for name in reference}
    more, groups = [], Counter[str]()
    for key, place in stored.items():
        if key in used or place.dtype not in _DTYPES:  # position ids and the like
            continue
        inner = key.removeprefix(prefix)
        part = inner.partition(".")[0]
        if part in parts and (key.startswith(prefix) or not prefix):
            more.append(key)
        else:
            groups[part] += 1
    if more:
        raise ModelPoolError(
            f"{label} holds {len(more)} tensors that the base does not have, e.g. {some(more)}: it "
            "is of another architecture, or holds parts of an adapter that was not merged. Every "
            "expert must be fine-tuned from the base."
        )
    return dict(groups)


def _stored_tensors(source: str, platform: str) -> dict[str, Place] | None:
    if Path(source).is_file():
        return read_header(Path(source)) if source.endswith(".safetensors") else None
    if (single := find_file(source, _SINGLE, platform)) is not None:
        return read_header(single)
    index = find_file(source, _INDEX, platform)
    if index is None:
        return None
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelPoolError(f"{index} names no tensors: it is damaged, download the model again.")
    places: dict[str, Place] = {}
    for shard in sorted(set(shards.values())):
        path = find_file(source, shard, platform)
        if path is None:
            raise ModelPoolError(
                f"the shard {shard} that {index} names is missing: download the model again, whole."
            )
        places |= read_header(path)
    if absent := [key for key in shards if key not in places]:
        raise ModelPoolError(
            f"{index} names {len(absent)} tensors that its shards do not hold, e.g. "
            f"{some(absent)}: index and shards are of different saves; download the model again."
        )
    return {key: places[key] for key in shards}


def read_header(path: Path) -> dict[str, Place]:
    """What a safetensors file holds.

    Raises:
        ModelPoolError: It is empty, cut off, or something else.
    """
    try:
        identity = FileIdentity.of(path)
        with safe_open(path, framework="pt") as checked:
            keys = list(checked.keys())
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelPoolError(f"{path} {_what_is_wrong(path, error)}") from error
    places = {}
    for key in keys:
        start, stop = (8 + length + offset for offset in header[key]["data_offsets"])
        shape = tuple(header[key]["shape"])
        places[key] = Place(path, key, header[key]["dtype"], shape, start, stop, identity)
    return places


def _what_is_wrong(path: Path, error: Exception) -> str:
    try:
        with open(path, "rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as reason:
        return f"cannot be read ({reason}): check its permissions and the disk."
    if not start:
        return "is empty: download or save the model again."
    if start == _LFS_POINTER:
        return "is a Git LFS pointer, not the weights: run `git lfs pull` where it was cloned."
    return (
        f"is cut off or no safetensors file ({error}): download or save the model again, and "
        "compare its size."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:  # also undecodable bytes
        raise ModelPoolError(
            f"{path} is cut off or no JSON ({error}): download or save the model again."
        ) from error
    if not isinstance(content, dict):
        raise ModelPoolError(f"{path} holds no JSON object: download or save the model again.")
    return content
