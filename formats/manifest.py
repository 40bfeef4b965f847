"""`lowbit.json`: what was made from what, and the hash of every part. SPEC.md describes it.

Holds no time, path, device or thread count: the same recipe on the same source gives the same
bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from lowbit.formats.errors import FormatError

MANIFEST_FILE = "lowbit.json"
FORMAT_VERSION = 1

Fate = Literal["quantized", "copied", "dropped"]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source and what became of it.

    Attributes:
        dtype: safetensors name, `BF16`.
        fate: quantized, copied (bytes unchanged), or dropped.
        reason: why it was dropped or left unquantized; empty otherwise.
        sha256: of its bytes in the source.
        bits: of its codes; None unless quantized.
        group_size: weights that share a scale; None unless quantized in groups.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fate: Fate
    reason: str
    sha256: str
    bits: int | None = None
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the packed checkpoint.

    Attributes:
        scale_min: smallest value, for scales only.
        scale_max: largest value, for scales only.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str
    scale_min: float | None = None
    scale_max: float | None = None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the packed checkpoint, the manifest and quality files aside."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights came from: hashes always, hub id and commit when there is one."""

    repo: str | None
    commit: str | None
    config_sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of lowbit.json."""

    lowbit_version: str
    source: Source
    recipe: dict[str, Any]
    source_tensors: tuple[SourceTensor, ...]
    tensors: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        return (json.dumps(content, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a packed folder; None where there is none, as in other tools' files.

    Raises:
        FormatError: malformed, or of a version this release does not know.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"`{path}` is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"`{path}` does not hold a JSON object")
    version = content.pop("format_version", None)
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatError(
            f"`{path}`: format version {version}, this release reads {FORMAT_VERSION}",
            hint="use the release of lowbit that wrote it, or convert again",
        )
    where = str(path)
    for key, kind in (
        ("source_tensors", SourceTensor),
        ("tensors", OutputTensor),
        ("files", OutputFile),
    ):
        rows = content.get(key)
        if not isinstance(rows, list):
            raise FormatError(f"`{where}`: `{key}` is not a list")
        content[key] = tuple(_row(kind, row, f"{where}: {key}") for row in rows)
    content["source"] = _row(Source, content.get("source"), f"{where}: source")
    manifest = _row(Manifest, content, where)
    for name in (*(file.name for file in manifest.files), *(row.file for row in manifest.tensors)):
        relative = PurePosixPath(name)
        if relative.is_absolute() or not relative.parts or ".." in relative.parts:
            raise FormatError(f"`{where}`: file `{name}` is not inside the folder")
    return manifest


def _row(kind: type[Row], content: Any, where: str) -> Row:
    """A dataclass from a JSON object that has exactly its fields."""
    if not isinstance(content, dict):
        raise FormatError(f"`{where}` is not an object")
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if content.keys() != kinds.keys():
        missing, extra = kinds.keys() - content.keys(), content.keys() - kinds.keys()
        raise FormatError(
            f"`{where}`: missing keys {sorted(missing)}, unknown keys {sorted(extra)}"
        )
    if isinstance(content.get("shape"), list):
        content = {**content, "shape": tuple(content["shape"])}
    for name, value in content.items():
        if not _fits(value, kinds[name]):
            raise FormatError(f"`{where}`: `{name}` cannot be {json.dumps(value)[:80]}")
    return kind(**content)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type: no bool for an int, no text for a list."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin is UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is (origin or kind)


def weights_digest(tensors: Iterable[SourceTensor]) -> str:
    """One hash over every source tensor, whatever shards it came in."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        row = [tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON as lowbit writes it into a checkpoint: two spaces, UTF-8, final newline."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
