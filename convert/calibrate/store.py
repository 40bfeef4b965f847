"""Finished layers of a calibration: a file for each, beside the half-made shards.

A file is there whole or not at all, so that an interrupted calibration goes on after the last
finished layer. Codes are kept packed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from lowbit.convert.calibrate.linear import Chosen
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.layout.packing import pack, unpack
from lowbit.formats.layout.scheme import Scheme

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

    files: Mapping[str, Path]  # where each linear's are, by module name
    errors: tuple[LayerError, ...]  # of every layer

    def rows(
        self, module: str, scheme: Scheme, K: int, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Codes [rows, K] int8 and scales [rows, K/G] bfloat16 of some rows of a linear."""
        with safe_open(self.files[module], "pt") as file:
            words = file.get_slice(f"{module}.codes")[start:stop]
            scale = file.get_slice(f"{module}.scale")[start:stop]
        return unpack(words, scheme.bits, K), scale


@dataclass(frozen=True, slots=True)
class Store:
    """Calibrated linears in a folder."""

    folder: Path  # where the conversion is built
    digest: str  # identifies plan, text and method; files of another are as good as absent

    def save(
        self,
        name: str,
        chosen: Mapping[str, Chosen],
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
        metadata = {"digest": self.digest, "facts": json.dumps(facts)}
        content = {key: value.contiguous() for key, value in tensors.items()}
        replace_file(self._path(name), serialize(content, metadata))

    def load(self, name: str, schemes: Mapping[str, Scheme]) -> dict[str, Chosen] | None:
        """The linears of a layer by module name, None where it is not finished."""
        path = self._path(name)
        facts = self._facts(path)
        if facts is None:
            return None
        found = {}
        with safe_open(path, "pt") as file:
            for module, K in facts["columns"].items():
                words = file.get_tensor(f"{module}.codes")
                codes = unpack(words, schemes[module].bits, K)
                found[module] = Chosen(codes, file.get_tensor(f"{module}.scale"))
        return found

    def finished(self, names: Iterable[str]) -> Calibrated:
        """All linears of finished layers, for the conversion to write."""
        files: dict[str, Path] = {}
        errors: list[LayerError] = []
        for name in names:
            path = self._path(name)
            facts = self._facts(path) or {"columns": {}, "error": None}
            files |= dict.fromkeys(facts["columns"], path)
            if facts["error"] is not None:
                error = facts["error"]
                tokens = tuple(error["expert_tokens"])
                errors.append(LayerError(**{**error, "expert_tokens": tokens}))
        return Calibrated(files, tuple(errors))

    def _path(self, name: str) -> Path:
        return self.folder / f"{PREFIX}{name}.safetensors"

    def _facts(self, path: Path) -> dict[str, Any] | None:
        """Facts of a file besides its tensors; None where this calibration has no such file."""
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError:
            return None
        if metadata.get("digest") != self.digest:
            return None
        facts: dict[str, Any] = json.loads(metadata["facts"])
        return facts
