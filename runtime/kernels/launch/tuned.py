"""Launches that `lowbit-run tune` has measured on one card, and the file that keeps them.

The file lies in a folder of Triton's kernel cache, named after the card and the kernels' sources:
so another card, or other kernels, never find it. `load` reads it once for a model, and every
linear of the model keeps its own launches.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.fields import Field, read_fields, shown
from lowbit.formats.files.atomic import disk_errors, replace_file
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import object_of
from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.kernels.launch.linear import MOST_PARTS, GemvLaunch, Tuned, gemv_launch
from lowbit.runtime.thresholds import GEMV_TOKENS

FOLDER = "lowbit-launches"  # in Triton's cache, whose other entries are named by hashes
SCHEMA = 1
DIGITS = 12  # of the hash of the kernels' sources
MOST_BYTES = 1_000_000
MOST_SUMS = 64 << 10  # bytes of shared memory for the sums of a program
TOKENS = tuple(1 << n for n in range(GEMV_TOKENS.bit_length()))  # 1, 2, 4, ..., GEMV_TOKENS
HINT = "remove the file, or measure again with lowbit-run tune MODEL"

Size = tuple[int, int, int, bool]  # bits, tiles, steps, paired: the arguments of `gemv_launch`


@dataclass(frozen=True, slots=True)
class MeasuredCard:
    """A GPU and the kernels that run on it."""

    name: str  # of the GPU
    capability: int  # 90 for compute capability 9.0
    kernels: str  # version of the kernels of linears


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches that were measured on a card."""

    card: MeasuredCard  # that they are for
    date: str  # of the newest, `2026-05-31`
    linears: Mapping[Size, Tuned]  # launches by the size of a linear

    def of(self, size: Size) -> Tuned:
        """Launches of a linear, empty where none was measured."""
        return self.linears.get(size, ())


def card_here() -> MeasuredCard:
    """The current GPU, with the kernels of this version."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return MeasuredCard(torch.cuda.get_device_name(), 10 * major + minor, kernels_version())


@cache
def kernels_version() -> str:
    """Hash of the sources that decide how fast a launch is."""
    kernels = Path(__file__).parents[1]
    rooms = sorted(path for name in ("linear", "ptx") for path in (kernels / name).glob("*.py"))
    whole = sha256()
    for path in (kernels / "codec.py", *rooms):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:DIGITS]


def folder() -> Path:
    """The folder of all tables."""
    from triton import knobs

    return Path(knobs.cache.dir) / FOLDER


def path_for(card: MeasuredCard) -> Path:
    """The file that keeps the launches of a card."""
    return folder() / f"{_stem(card)}{card.kernels}.json"


def of_other_kernels(card: MeasuredCard) -> list[Path]:
    """Files of the card that were measured with other kernels, which nothing reads."""
    found = folder().glob(f"{_stem(card)}*.json")
    return sorted(path for path in found if path != path_for(card))


def read_launches(card: MeasuredCard) -> Launches | None:
    """The launches of a card; None where none were measured.

    Raises:
        FormatError: the file is damaged, or for another card.
    """
    path = path_for(card)
    try:
        raw = read_bytes(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        raise FormatError(str(error), hint=HINT) from None
    try:
        return _parsed(object_of(raw, path, FormatError), card, f"`{path}`")
    except FormatError as error:
        raise FormatError(str(error), hint=HINT) from None


def keep_launches(launches: Launches) -> Path:
    """Write the launches of a card; those of other linears that its file has stay.

    Raises:
        ResourceError: the file cannot be written.
        FormatError: see `read_launches`.
    """
    path, before = path_for(launches.card), read_launches(launches.card)
    linears = {} if before is None else dict(before.linears)
    linears.update(launches.linears)
    with disk_errors(path=path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content_of(Launches(launches.card, launches.date, linears)))
    return path


def content_of(launches: Launches) -> bytes:
    """Content of the file that keeps launches."""
    rows = [
        {
            **dict(zip(("bits", "tiles", "steps", "paired"), size, strict=True)),
            "tokens": tokens,
            "launch": asdict(launch),
        }
        for size, tuned in sorted(launches.linears.items())
        for tokens, launch in tuned
    ]
    head = {"schema": SCHEMA, **asdict(launches.card), "date": launches.date}
    return (json.dumps(head | {"linears": rows}, indent=1) + "\n").encode()


def line_of(launch: GemvLaunch) -> str:
    """A launch as the tables of `launch.linear` have it."""
    names = [field.name for field in fields(launch)]
    positional = [str(getattr(launch, name)) for name in names[:3]]
    named = [
        f"{name}={value}"
        for name in names[3:]
        if (value := getattr(launch, name)) != getattr(_PLAIN, name)
    ]
    return f"GemvLaunch({', '.join(positional + named)})"


_PLAIN = GemvLaunch(1, 1, 1)
_SIZE = (
    Field("bits", least=2, most=8),
    Field("tiles", least=1, most=2**22),
    Field("steps", least=1, most=2**16),
    Field("paired", "flag"),
    Field("tokens", least=1, most=GEMV_TOKENS),
)
_LAUNCH = (
    Field("tiles", least=1, most=8),
    Field("steps", least=1, most=32),
    Field("warps", least=1, most=16),
    Field("early", "flag"),
    Field("registers", least=32, most=255, default=None, nullable=True),
    Field("warp_groups", least=1, most=16),
    Field("shared", least=0, most=STATIC_SHARED >> 10),
    Field("rounds", least=1, most=128),
    Field("split", least=1, most=16),
    Field("staged", "flag"),
)
_HEAD = (
    Field("schema", least=SCHEMA, most=SCHEMA),
    Field("name", "text"),
    Field("capability", least=0, most=10_000),
    Field("kernels", "text"),
    Field("date", "text"),
)


def _stem(card: MeasuredCard) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", card.name).strip("-")[:60]
    return f"{name}-sm_{card.capability}-"


def _parsed(content: dict[str, Any], card: MeasuredCard, where: str) -> Launches:
    head = _exactly(content, _HEAD, where, beside={"linears"})
    found = MeasuredCard(head["name"], head["capability"], head["kernels"])
    if found != card:
        raise FormatError(
            f"{where} is for `{found.name}`, compute capability {found.capability / 10:.1f} and "
            f"kernels {found.kernels}, expected `{card.name}`, {card.capability / 10:.1f} and "
            f"{card.kernels}"
        )
    rows = content.get("linears")
    if not isinstance(rows, list):
        raise FormatError(f"{where}: `linears` must be a list, got {shown(rows)}")
    linears: dict[Size, dict[int, GemvLaunch]] = {}
    for number, row in enumerate(rows):
        size, tokens, launch = _row(row, f"{where}: linears[{number}]")
        if launch != linears.setdefault(size, {}).setdefault(tokens, launch):
            raise FormatError(f"{where}: two launches of {size} for {tokens} tokens")
    for size, by_tokens in linears.items():
        _check_parts(size, by_tokens, where)
    tuned = {size: tuple(sorted(each.items())) for size, each in linears.items()}
    return Launches(card, head["date"], tuned)


def _row(row: Any, where: str) -> tuple[Size, int, GemvLaunch]:
    if not isinstance(row, dict) or not isinstance(row.get("launch"), dict):
        raise FormatError(f"{where} must be an object with a `launch`, got {shown(row)}")
    about = _exactly(row, _SIZE, where, beside={"launch"})
    tokens, values = about.pop("tokens"), _exactly(row["launch"], _LAUNCH, f"{where}.launch")
    launch = GemvLaunch(**values)
    if tokens not in TOKENS:
        raise FormatError(f"{where}: `tokens` must be a power of two, got {tokens}")
    shared = launch.split == 1 or launch.shares(about["bits"])
    alone = launch.staged and shared and launch.parts <= MOST_PARTS
    if launch.warps & (launch.warps - 1) or launch.warps % launch.warp_groups:
        raise FormatError(f"{where}: {launch.warps} warps, {launch.warp_groups} warp groups")
    if launch.sums_bytes(tokens) > MOST_SUMS or (tokens == 1 and not alone):
        raise FormatError(f"{where}: no kernel has such a launch for {tokens} tokens")
    return (about["bits"], about["tiles"], about["steps"], about["paired"]), tokens, launch


def _check_parts(size: Size, by_tokens: Mapping[int, GemvLaunch], where: str) -> None:
    """Refuse launches that would give a token other bits in company than alone."""
    bits, tiles, steps, paired = size
    one = gemv_launch(bits, tiles, steps, 1, paired, tuple(by_tokens.items()))
    for tokens, launch in by_tokens.items():
        if launch.parts != one.parts:
            raise FormatError(
                f"{where}: {size} for {tokens} tokens divides K into {launch.parts} parts, "
                f"expected {one.parts} as for one token"
            )


def _exactly(
    content: Mapping[str, Any], known: tuple[Field, ...], where: str, beside: set[str] | None = None
) -> dict[str, Any]:
    names = {field.key for field in known} | (beside or set())
    for key in content:
        if key not in names:
            raise FormatError(f"{where}: unknown key {shown(key)}")
    for field in known:
        if field.key not in content:
            raise FormatError(f"{where} lacks `{field.key}`")
    return read_fields(content, known, where, FormatError)
