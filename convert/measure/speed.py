"""Speed on this machine and scores on tasks of a packed folder, as `lowbit-run` measures them.

The runtime is another program. It is started here, or by the user: `lowbit-run bench DIR --json >
DIR/bench.json`.
"""

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from lowbit.convert.measure.ranges import check_ranges
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, ResourceError
from lowbit.formats.file_names import BENCH_FILE
from lowbit.formats.files.atomic import check_place, replace_file
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.layout.records import load_object, record
from lowbit.formats.tasks import TASKS_FILE

SCHEMA = 1  # of the object of `lowbit-run bench`
PROGRAM = "lowbit.runtime"


@dataclass(frozen=True, slots=True)
class Speed:
    """Figures of `lowbit-run bench`.

    Attributes:
        device: that it ran on.
        prompt_tokens: before the first token.
        new_tokens: decoded after it.
        context: tokens that the cache has room for.
        first_token_s: from the prompt to the first token.
        decode_tokens_per_s: afterwards.
        weight_bytes: of the loaded weights.
        peak_bytes: of memory in all.
    """

    device: str
    prompt_tokens: int
    new_tokens: int
    context: int
    first_token_s: float
    decode_tokens_per_s: float
    weight_bytes: int
    peak_bytes: int


def read_speed(folder: Path) -> Speed | None:
    """The speed of a packed folder; None where it was not kept.

    Raises:
        FormatError: malformed, no file, older than lowbit.json, of a model that was quantized while
            it was loaded, or measured with speculation.
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
    names = {field.name for field in fields(Speed)}
    found = record(Speed, {k: v for k, v in content.items() if k in names}, str(path))
    check_ranges(found, str(path))
    return found


def measure_speed(folder: Path, device: str) -> None:
    """Measure the speed on this machine, and keep it in bench.json.

    Raises:
        ResourceError: it cannot be measured, or the file cannot be written.
    """
    check_place(folder / BENCH_FILE)
    replace_file(folder / BENCH_FILE, _run("bench", folder, "--device", device))


def score_tasks(folder: Path, tasks: str, device: str) -> None:
    """Score a folder on tasks, with commas between them, and keep the results in tasks.json.

    Raises:
        ResourceError: a task that is not known, or a library that is missing.
    """
    check_place(folder / TASKS_FILE)
    _run("evaluate", folder, "--tasks", tasks, "--device", device)


def _run(command: str, folder: Path, *options: str) -> bytes:
    """Output of a command with --json; its messages go to stderr as they come."""
    words = [sys.executable, "-m", PROGRAM, command, str(folder), *options, "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise ResourceError(
            f"`lowbit-run {command} {folder}` ended with {done.returncode}",
            hint="its message is above",
        )
    return done.stdout
