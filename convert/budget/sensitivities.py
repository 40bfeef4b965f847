"""Sensitivities of a checkpoint as a JSON file."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.convert.plan.sets import BITS
from lowbit.formats.errors import FormatError
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.layout.records import broken_seal, parse_object, record, sealed, take_seal
from lowbit.formats.layout.scheme import GROUP_SIZES, Scheme

SCHEMA = 5  # of the file


@dataclass(frozen=True, slots=True)
class Row:
    """One scheme for one fused set."""

    name: str
    # Its linears; one for the same linear of all experts, `*` for its number.
    modules: tuple[str, ...]
    weights: int
    bits: int
    group_size: int  # weights that share a scale
    size_bytes: int  # bytes of its packed tensors, scales included
    # Mean KL divergence from the original, in nats a token, with only this set quantized: measured,
    # or of round-to-nearest estimated to second order (the head's measured); infinite where a
    # rounded weight is not finite.
    kl: float

    @property
    def scheme(self) -> Scheme:
        """Bits and group size together."""
        return Scheme(self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """KL that each precision of each set costs, with the model and the text they are of."""

    lowbit_version: str
    torch_version: str
    transformers_version: str  # whose modules computed
    device: str  # `cpu` or `cuda`
    config_sha256: str  # hash of the original's config.json
    weights_sha256: str  # hash of all tensors of the original, as in lowbit.json
    text_name: str  # name of the text, for people
    text_sha256: str
    window: int  # tokens of a window
    windows: int  # number of windows taken of the text, to measure on
    learned: int  # number of windows that codes were learned from, 0 where estimated
    draws: int  # tokens drawn from the model's distribution at each position, 0 where measured
    scale_rule: str  # by which scales were chosen
    rotated: bool  # True where they are of the model with its residual stream rotated
    method: str  # that chose the codes; `rtn` where estimated
    rows: tuple[Row, ...]  # in the order of the forward pass

    @property
    def conditions(self) -> str:
        """`gptq+rotate, signed scales`, or `rtn of the rotated model, signed scales`."""
        turned = " of the rotated model" if self.rotated and "rotate" not in self.method else ""
        return f"{self.method}{turned}, {self.scale_rule} scales"

    def to_json(self) -> dict[str, Any]:
        """Content of the file, sealed; infinity becomes null."""
        content = asdict(self)
        for row in content["rows"]:
            row["kl"] = row["kl"] if math.isfinite(row["kl"]) else None
        return {"schema": SCHEMA, **sealed(content)}

    def to_bytes(self) -> bytes:
        """Bytes of the file."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()


def by_set(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of every set, by the set's name."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return by_name


def read_sensitivities(path: Path) -> Sensitivities:
    """Read a file that `lowbit-convert sensitivity` wrote.

    Raises:
        FormatError: malformed, of a schema this release does not know, or changed since it was
            written.
        RequestError: the file cannot be read.
    """
    hint = "compute them again with `lowbit-convert sensitivity`"
    raw = read_user_file(path, "sensitivities")
    content = parse_object(raw, path, "schema", SCHEMA, hint)
    intact = take_seal(content)
    sensitivities = record(Sensitivities, content, str(path))
    for row in sensitivities.rows:
        if row.bits not in BITS or row.group_size not in GROUP_SIZES:
            raise FormatError(
                f"`{path}`: `{row.name}` has {row.bits} bits in groups of {row.group_size}, "
                "which are not to choose from",
                hint=hint,
            )
    if not intact:
        raise broken_seal(path, hint)
    return sensitivities
