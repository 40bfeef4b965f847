"""Finished layers of a calibration: a file for each, beside the half-made shards.

A file is there whole or not at all, so that an interrupted calibration goes on after the last
finished layer, and is sealed: a layer whose file is damaged, or follows from other weights, is
calibrated again. Codes are kept packed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.original.progress import Note
from lowbit.convert.quantize.linear import QuantizedLinear
from lowbit.formats.errors import ResourceError
from lowbit.formats.layout.packing import pack, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.formats.safetensors.hashing import hash_tensor
from lowbit.formats.safetensors.sealed import Sealed, open_sealed, write_sealed

PREFIX = ".calibrated-"  # hidden, as the journal is
HEAD = "head"


def layer_name(number: int) -> str:
    """File name of a decoder layer."""
    return f"layer-{number:03d}"


@dataclass(frozen=True, slots=True)
class LayerError:
    """Error of a layer's output against the original's, on windows held out.

    Relative to what the original's layer adds to its input, root of mean squares. Errors of the
    layers before are part of it, except with `weighted`, which looks at each layer alone.
    """

    layer: int  # number, from 0
    rtn: float  # with this layer's linears rounded to nearest
    chosen: float  # with the codes chosen
    # As `chosen`, on as many windows that were learned from; None with `weighted`, and where the
    # windows are too few to hold any out: the others are of all windows then.
    learned: float | None = None
    expert_tokens: tuple[int, ...] = ()  # that every expert learned from; empty without experts


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Codes and scales that are already chosen."""

    files: Mapping[str, Checkpoint]  # holding each linear's, by module name
    errors: tuple[LayerError, ...]  # of every layer

    def rows(
        self, module: str, scheme: Scheme, K: int, rows: slice, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Codes [rows, K] int8 and scales [rows, K/G] bfloat16 of some rows of a linear."""
        words, scale = (
            self.files[module].read_rows(f"{module}.{part}", rows.start, rows.stop).to(device)
            for part in ("codes", "scale")
        )
        return unpack(words, scheme.bits, K), scale

    def packed_sha256(self, module: str) -> tuple[str, str]:
        """Hashes of the tensors that a linear is written to: of packed codes and of scales."""
        file = self.files[module]
        codes, scale = (file.tensors[f"{module}.{part}"] for part in ("codes", "scale"))
        return (
            hash_tensor(file.folder / codes.file, codes),
            hash_tensor(file.folder / scale.file, scale),
        )


# Takes the linears of a layer, or of the head, once their file is there.
Finished = Callable[[Calibrated], None]


def ignored(linears: Calibrated) -> None:
    """Leave all linears to `Store.finished`."""


@dataclass(slots=True)
class Store:
    """Calibrated linears in a folder.

    Identities name all that a layer's codes follow from; a file of another is as good as absent.
    """

    folder: Path  # where the conversion is built
    note: Note  # told of files that are there and are not used
    on_finished: Finished = ignored
    _identities: dict[str, str] = field(default_factory=dict)  # of the files of this run, by name

    def save(
        self,
        name: str,
        identity: str,
        chosen: Mapping[str, QuantizedLinear],
        schemes: Mapping[str, Scheme],
        error: LayerError | None,
    ) -> None:
        """Keep the linears of a layer, by module name."""
        tensors: dict[str, Tensor] = {}
        columns = {}
        for module, linear in chosen.items():
            tensors[f"{module}.codes"] = pack(linear.codes, schemes[module].bits).cpu()
            tensors[f"{module}.scale"] = linear.scale.cpu()
            columns[module] = linear.codes.shape[1]
        facts = {"columns": columns, "error": error and asdict(error)}
        write_sealed(self._path(name), tensors, facts, f"{identity} {name}")
        self._identities[name] = identity
        if self.on_finished is not ignored:
            self.on_finished(_calibrated([self._read_back(name)]))

    def load(
        self, name: str, identity: str, schemes: Mapping[str, Scheme]
    ) -> dict[str, QuantizedLinear] | None:
        """The linears of a layer by module name, None where it is not finished."""
        path = self._path(name)
        if not path.exists():
            return None
        file = open_sealed(path, f"{identity} {name}")
        if file is None:
            self.note(f"! `{path}` is damaged or of other weights: {name} is calibrated again")
            return None
        self._identities[name] = identity
        linears = {}
        for module, K in file.facts["columns"].items():
            codes = unpack(file.content.read(f"{module}.codes"), schemes[module].bits, K)
            linears[module] = QuantizedLinear(codes, file.content.read(f"{module}.scale"))
        self.on_finished(_calibrated([file]))
        return linears

    def finished(self) -> Calibrated:
        """All linears of finished layers, for the conversion to write.

        Raises:
            ResourceError: the disk returns other bytes than this run has written or read.
        """
        with ThreadPoolExecutor(core_count()) as pool:
            return _calibrated(pool.map(self._read_back, sorted(self._identities)))

    def _read_back(self, name: str) -> Sealed:
        path = self._path(name)
        file = open_sealed(path, f"{self._identities[name]} {name}") if path.exists() else None
        if file is None:
            raise ResourceError(
                f"`{path}` reads back with other bytes than were written",
                hint="check the disk, then run the same command again",
            )
        return file

    def _path(self, name: str) -> Path:
        return self.folder / f"{PREFIX}{name}.safetensors"


def _calibrated(files: Iterable[Sealed]) -> Calibrated:
    """The linears of some layers' files."""
    modules: dict[str, Checkpoint] = {}
    errors: list[LayerError] = []
    for file in files:
        modules |= dict.fromkeys(file.facts["columns"], file.content)
        if (error := file.facts["error"]) is not None:
            tokens = tuple(error["expert_tokens"])
            errors.append(LayerError(**{**error, "expert_tokens": tokens}))
    return Calibrated(modules, tuple(sorted(errors, key=lambda row: row.layer)))


def extended(identity: str, source: Checkpoint, names: Iterable[str]) -> str:
    """Identity of what follows from another one, and from the bytes of some tensors."""
    rows = [
        [name, info.dtype_name, list(info.shape), hash_tensor(source.folder / info.file, info)]
        for name, info in ((name, source.tensors[name]) for name in sorted(names))
    ]
    return hashlib.sha256(json.dumps([identity, rows]).encode()).hexdigest()
