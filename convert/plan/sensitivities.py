"""Measured sensitivities as a JSON file."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.convert.plan.sets import BITS
from lowbit.formats.errors import FormatError
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.layout.records import parse_object, record, records
from lowbit.formats.layout.scheme import GROUP_SIZES, Scheme

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One choice for one set.

    Attributes:
        name: of the fused set.
        modules: its linears.
        weights: how many it has.
        bits: of its codes.
        group_size: weights that share a scale.
        size_bytes: of its packed tensors, scales included.
        kl: mean KL divergence from the original, in nats a token, where only this set is
            quantized; infinite where the model then gives no finite logits.
    """

    name: str
    modules: tuple[str, ...]
    weights: int
    bits: int
    group_size: int
    size_bytes: int
    kl: float

    @property
    def scheme(self) -> Scheme:
        """Bits and group size together."""
        return Scheme(self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """KL that each precision of each set costs, and the model and text it was measured on.

    Attributes:
        lowbit_version: of this tool.
        torch_version: which computed.
        transformers_version: whose modules computed.
        device: `cpu` or `cuda`.
        config_sha256: of the original's config.json.
        weights_sha256: of all of the original's tensors, as in lowbit.json.
        text_name: for people.
        text_sha256: of the text.
        window: tokens of a window.
        windows: how many were taken of the text.
        scale_rule: how scales were chosen.
        rows: in the order of the forward pass.
    """

    lowbit_version: str
    torch_version: str
    transformers_version: str
    device: str
    config_sha256: str
    weights_sha256: str
    text_name: str
    text_sha256: str
    window: int
    windows: int
    scale_rule: str
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of the file; infinity becomes null."""
        content = asdict(self)
        for row in content["rows"]:
            row["kl"] = row["kl"] if math.isfinite(row["kl"]) else None
        return {"schema": SCHEMA, **content}

    def to_bytes(self) -> bytes:
        """The file itself."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()


def by_set(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of every set, by its name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return found


def read_sensitivities(path: Path) -> Sensitivities:
    """Read a file that `lowbit-convert sensitivity` wrote.

    Raises:
        FormatError: malformed, or of a schema this release does not know.
        RequestError: the file cannot be read.
    """
    hint = "measure again with `lowbit-convert sensitivity`"
    raw = read_user_file(path, "sensitivities")
    content = parse_object(raw, path, "schema", SCHEMA, hint)
    content["rows"] = records(Row, content.get("rows"), f"{path}: rows")
    for row in content["rows"]:
        if row.bits not in BITS or row.group_size not in GROUP_SIZES:
            raise FormatError(
                f"`{path}`: `{row.name}` has {row.bits} bits in groups of {row.group_size}, "
                "which are not to choose from",
                hint=hint,
            )
    return record(Sensitivities, content, str(path))
