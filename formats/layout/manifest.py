"""`lowbit.json`, the manifest: recipe, source, and the hash of every part. SPEC.md describes it.

It holds no time, path, device or thread count, so the same recipe on the same source gives the same
bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lowbit.formats.errors import FormatError
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.layout.records import parse_object, record

MANIFEST_FILE = "lowbit.json"
FORMAT_VERSION = 1
FREQUENT = "frequent_rows"  # key of the record that few folders have

Fate = Literal["quantized", "copied", "rotated", "dropped"]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source and its fate."""

    name: str
    dtype: str  # safetensors name, `BF16`
    shape: tuple[int, ...]
    # quantized, copied (bytes unchanged), rotated (written in another basis, unquantized), or
    # dropped
    fate: Fate
    reason: str  # why it was dropped or left unquantized; empty otherwise
    sha256: str  # of its bytes in the source
    bits: int | None = None  # width of its codes; None unless quantized
    group_size: int | None = None  # weights that share a scale; None unless quantized in groups


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the packed checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str
    scale_min: float | None = None  # smallest value; None unless it holds scales
    scale_max: float | None = None  # largest value; None unless it holds scales


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the packed checkpoint other than the manifest and the reports."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the weights: hashes, and Hub id and commit if they came from the Hub."""

    repo: str | None
    commit: str | None
    config_sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Text and machine of a calibrated method, which together with the recipe decide the codes."""

    text: str  # name of the text
    text_sha256: str  # of its bytes
    samples: int  # number of windows that were used
    length: int  # tokens of a window
    chat: bool  # True if the chat template was applied
    device: str  # `cpu`, or the GPU's name
    threads: int  # CPU threads; 0 on a GPU
    torch_version: str  # version of torch that computed
    transformers_version: str  # version of transformers whose modules were used


@dataclass(frozen=True, slots=True)
class CountedRows:
    """Choice of some of a head's rows: a draft head, or frequent rows."""

    rows: int  # how many
    group_size: int | None  # weights that share a scale; None for a whole row
    # name of the text that tokens were counted on; None where they were taken by id alone
    text: str | None
    text_sha256: str | None  # of its content
    tokens: int  # of the text
    coverage: float  # share of them that have a row
    # share that would have one in the half of the text that was left out of a count
    held_out: float


@dataclass(frozen=True, slots=True)
class MtpTraining:
    """Training of the head for multi-token prediction after the conversion."""

    text: str  # name of the text
    text_sha256: str  # of its content
    steps: int  # windows of text that were learned from
    device: str  # `cpu`, or the GPU's name
    before: float  # tokens a round on windows held out, before
    after: float  # same after


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of lowbit.json; calibration is None for round-to-nearest, draft_head without one.

    A key of frequent rows is written where there are some, so that other folders keep their bytes.
    With mtp_training, tensors of the head for multi-token prediction are not those of the source.
    """

    lowbit_version: str
    source: Source
    recipe: dict[str, Any]
    source_tensors: tuple[SourceTensor, ...]
    tensors: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    calibration: Calibration | None = None
    draft_head: CountedRows | None = None
    mtp_training: MtpTraining | None = None
    frequent_rows: CountedRows | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        if self.frequent_rows is None:
            del content[FREQUENT]
        return (json.dumps(content, indent=1) + "\n").encode()


def is_rotated(manifest: Manifest | None) -> bool:
    """Tell whether a folder's hidden states are in another basis than its original's."""
    if manifest is None:
        return False
    method = manifest.recipe.get("method")  # also of a recipe that another release knows
    return isinstance(method, str) and "rotate" in method.split("+")


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a packed folder; None where there is none, as in other tools' files.

    Raises:
        CheckpointError: not a regular file, or a link out of the folder or to nothing.
        FormatError: malformed, or of a version this release does not know.
    """
    return read_hashed_manifest(folder)[0]


def read_hashed_manifest(folder: Path) -> tuple[Manifest | None, str | None]:
    """`read_manifest`, with the SHA-256 of the bytes that were read.

    Raises:
        CheckpointError, FormatError: as `read_manifest`.
    """
    path = folder / MANIFEST_FILE
    try:
        raw = read_bytes(path)
    except FileNotFoundError:
        return None, None
    hint = "use the release of lowbit that wrote it, or convert again"
    content = parse_object(raw, path, "format_version", FORMAT_VERSION, hint)
    manifest = record(Manifest, {FREQUENT: None, **content}, str(path))
    for name in (*(file.name for file in manifest.files), *(row.file for row in manifest.tensors)):
        relative = PurePosixPath(name)
        if relative.is_absolute() or not relative.parts or ".." in relative.parts:
            raise FormatError(f"`{path}`: file `{name}` is not inside the folder")
    return manifest, hashlib.sha256(raw).hexdigest()


def weights_digest(tensors: Iterable[SourceTensor]) -> str:
    """One hash over all source tensors, independent of their shards."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        row = [tensor.name, tensor.dtype, list(tensor.shape), tensor.sha256]
        digest.update(json.dumps(row).encode() + b"\n")
    return digest.hexdigest()


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON as lowbit writes it into a checkpoint: two spaces, UTF-8, final newline."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
