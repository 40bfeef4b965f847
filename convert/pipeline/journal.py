"""The journal of a working folder: finished tensors, written down beside half-filled shards."""

import json
import os
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lowbit.convert.measure.weights import WeightSums
from lowbit.convert.quantize.store import PREFIX as CALIBRATED
from lowbit.formats.errors import FormatError, ResourceError
from lowbit.formats.file_names import SOURCE_README
from lowbit.formats.files.atomic import abandoned
from lowbit.formats.layout.manifest import MANIFEST_FILE, OutputTensor
from lowbit.formats.layout.records import record
from lowbit.formats.row_folders import ROW_FILES, entries, name_in
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, INDEX_FILE

JOURNAL_FILE = ".journal.jsonl"  # hidden: no file of a source is passed through to its place
# Files of every run; what is passed through from a source is written down in the journal.
ALWAYS_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors"
    rf"|{'|'.join(map(re.escape, (INDEX_FILE, CONFIG_FILE, MANIFEST_FILE, SOURCE_README)))}"
    rf"|{'|'.join(map(re.escape, ROW_FILES))}|{re.escape(JOURNAL_FILE)}|{re.escape(CALIBRATED)}.*"
)


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that is done."""

    step: int  # its number in the plan
    source_sha256: str  # of the source tensor's bytes
    tensors: tuple[OutputTensor, ...]  # those written, with hashes
    sums: WeightSums | None  # of the error; None unless quantized


class Journal:
    """Appends finished steps; a line is a step, the first line names the plan."""

    def __init__(
        self, file: BinaryIO, finished: list[CompletedStep], damaged: bool = False
    ) -> None:
        """Wrap an open, locked file positioned at its end."""
        self._file = file
        self.finished = finished
        self.damaged = damaged  # lines were dropped that no crash cuts short

    def append(self, finished: CompletedStep) -> None:
        """Record a step whose bytes have all been handed to the file system."""
        self._file.write(_line(asdict(finished)))
        self._file.flush()
        self.finished.append(finished)

    def forget(self, steps: Collection[int]) -> None:
        """Do not count steps as finished; what is recorded of one later counts again."""
        self.finished[:] = [row for row in self.finished if row.step not in steps]


@contextmanager
def open_journal(
    folder: Path,
    digest: str,
    overwrite: bool,
    files: Collection[str],
    hint: str,
) -> Iterator[Journal]:
    """Open and lock the journal of a folder, with the steps that earlier runs finished.

    Work of another plan is finished tensors or calibrated layers. Layers without a readable
    journal stay: the run that calibrates reads in each file which plan it is of.

    Args:
        overwrite: throw away the work of another plan.
        files: names that this run will write beside `ALWAYS_OURS`.
        hint: what a user can do about work of another plan.

    Raises:
        ResourceError: another conversion is writing to the folder, one of another plan has
            done work there, or somebody else put something there.
    """
    import fcntl  # not above: Windows, where nothing is converted, has none

    with (folder / JOURNAL_FILE).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another conversion is writing to `{folder}`", hint="wait for it, or stop it"
            ) from None
        file.seek(0)
        plan, named, finished, good = _read(file)
        file.seek(good)
        damaged = b"\n" in file.read()
        _check_owned(folder, named.union(files))
        if plan != digest:
            calibrated = list(folder.glob(f"{CALIBRATED}*"))
            if plan is not None and (finished or calibrated):
                if not overwrite:
                    raise ResourceError(
                        f"`{folder}` holds an interrupted conversion with another recipe or "
                        "source, or by another release",
                        hint=hint,
                    )
                for path in calibrated:
                    path.unlink()
            finished, good = [], 0
        # A line cut short by a crash would swallow the next one.
        file.truncate(good)
        file.seek(0, os.SEEK_END)
        if not good:
            file.write(_line({"plan": digest, "files": sorted(named.union(files))}))
        elif not named.issuperset(files):
            file.write(_line({"files": sorted(files)}))
        file.flush()
        yield Journal(file, finished, damaged)


def _line(content: dict[str, Any]) -> bytes:
    """A line of the journal: a checksum, by which damage is told, and a JSON object."""
    text = json.dumps(content).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(file: BinaryIO) -> tuple[str | None, set[str], list[CompletedStep], int]:
    """Plan, names, finished steps, and their length in bytes, up to the damage of a crash."""
    plan, named, finished, good = None, set[str](), list[CompletedStep](), 0
    for line in file:
        checksum, _, text = line.partition(b" ")
        text = text.removesuffix(b"\n")
        if line != b"%s %s\n" % (checksum, text) or checksum != b"%08x" % zlib.crc32(text):
            break
        try:  # a line may be none of the journal's, whatever its checksum
            row = json.loads(text)
            if "step" in row:
                finished.append(record(CompletedStep, row, JOURNAL_FILE))
            names = row.get("files", ())
            if not all(isinstance(name, str) for name in names):
                break
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError, FormatError):
            break
        plan = row.get("plan") if good == 0 else plan
        named.update(names)
        good += len(line)
    return plan, named, finished, good


def _check_owned(folder: Path, named: Collection[str]) -> None:
    """Refuse a working folder with something in it that no conversion wrote.

    What a killed writer left beside the place of a file is removed.
    """
    for path in sorted(entries(folder)):
        left = abandoned(path)
        name = name_in(folder, path) if left is None else left
        known = name in named or ALWAYS_OURS.fullmatch(name)
        if known and left is not None and path.is_file() and not path.is_symlink():
            path.unlink()
        elif not known or path.is_symlink() or path.is_dir():
            raise ResourceError(
                f"`{path}` was not written by lowbit-convert", hint="move it out of the folder"
            )
