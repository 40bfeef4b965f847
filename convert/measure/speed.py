"""Speed of a packed folder, as `lowbit-run bench DIR --json > DIR/bench.json` has measured it."""

from dataclasses import dataclass, fields
from pathlib import Path

from lowbit.convert.measure.ranges import check_ranges
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError
from lowbit.formats.file_names import BENCH_FILE
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.layout.records import load_object, record

SCHEMA = 1  # of the object of `lowbit-run bench`


@dataclass(frozen=True, slots=True)
class Speed:
    """Figures of `lowbit-run bench`."""

    device: str  # that it ran on
    prompt_tokens: int  # before the first token
    new_tokens: int  # decoded after it
    context: int  # tokens that the cache has room for
    first_token_s: float  # from the prompt to the first token
    decode_tokens_per_s: float  # afterwards
    weight_bytes: int  # of the loaded weights
    peak_bytes: int  # of memory in all


def read_speed(folder: Path) -> Speed | None:
    """The speed of a packed folder; None where it was not kept.

    Raises:
        FormatError: malformed, no file, older than lowbit.json, of a model that was quantized while
            it was loaded, or measured with speculation or rounded activations.
    """
    if not (folder / BENCH_FILE).exists():
        return None
    hint = f"run `lowbit-run bench {folder} --json` again, or remove the file"
    try:
        return _read(folder / BENCH_FILE, folder / MANIFEST_FILE, hint)
    except (CheckpointError, FormatError) as error:
        raise FormatError(str(error), hint=hint) from None


def known_speed(folder: Path) -> Speed | None:
    """The speed of a packed folder; None without a bench.json that can be read."""
    try:
        return read_speed(folder)
    except LowbitError:
        return None


def _read(path: Path, manifest: Path, hint: str) -> Speed:
    if manifest.exists() and path.stat().st_mtime < manifest.stat().st_mtime:
        raise FormatError(f"`{path}` is older than {MANIFEST_FILE}: it is of an earlier conversion")
    content = load_object(path, "schema", SCHEMA, hint)
    if content.get("quantized_at_load") is not None:
        raise FormatError(f"`{path}`: measured on the original, quantized at load")
    if content.get("speculation") is not None:
        raise FormatError(f"`{path}`: measured with --speculate, on a text of no meaning")
    if (activations := content.get("activations", "exact")) != "exact":
        raise FormatError(f"`{path}`: measured with --activations {activations}, not exact ones")
    names = {field.name for field in fields(Speed)}
    speed = record(Speed, {k: v for k, v in content.items() if k in names}, str(path))
    check_ranges(speed, str(path))
    return speed
