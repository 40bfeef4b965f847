"""What an interrupted conversion has finished, tensor by tensor, beside its half-filled shards."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lowbit.convert.quality.weights import WeightQuality
from lowbit.formats.errors import ResourceError
from lowbit.formats.manifest import OutputTensor

JOURNAL_FILE = ".journal.jsonl"  # hidden: no file of a source is passed through to its place


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that is done.

    Attributes:
        step: its number in the plan.
        source_sha256: of the source tensor's bytes.
        tensors: what was written, with hashes.
        quality: None unless quantized.
    """

    step: int
    source_sha256: str
    tensors: tuple[OutputTensor, ...]
    quality: WeightQuality | None


class Journal:
    """Appends finished steps; a line is a step, the first line names the plan."""

    def __init__(self, file: BinaryIO, finished: list[Finished]) -> None:
        """Wrap an open, locked file positioned at its end."""
        self._file = file
        self.finished = finished

    def append(self, finished: Finished) -> None:
        """Record a step whose bytes have all been handed to the file system."""
        self._file.write(json.dumps(asdict(finished)).encode() + b"\n")
        self._file.flush()
        self.finished.append(finished)


@contextmanager
def open_journal(folder: Path, digest: str, overwrite: bool) -> Iterator[Journal]:
    """The journal of a folder, with what earlier runs of the same plan finished.

    Args:
        folder: where the shards are built.
        digest: of the plan.
        overwrite: whether to throw away what a run of another plan finished.

    Raises:
        ResourceError: another conversion is writing to the folder, or one of another plan has
            finished tensors there.
    """
    with (folder / JOURNAL_FILE).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another conversion is writing to `{folder}`", hint="wait for it, or stop it"
            ) from None
        file.seek(0)
        first = json.dumps({"plan": digest}).encode() + b"\n"
        finished: list[Finished] = []
        good = 0  # bytes of the lines that hold
        begun = file.readline()
        if begun == first:
            good = len(first)
            for line in file:
                row = _parse(line)
                if row is None:
                    break
                finished.append(row)
                good += len(line)
        elif not overwrite and begun.startswith(b'{"plan":') and _parse(file.readline()):
            raise ResourceError(
                f"`{folder}` holds an interrupted conversion with another recipe or source, or by "
                "another release",
                hint="finish it with the command that began it, or start over with --overwrite",
            )
        # A line cut short by a crash would swallow the next one.
        file.truncate(good)
        file.seek(0, os.SEEK_END)
        if not good:
            file.write(first)
            file.flush()
        yield Journal(file, finished)


def _parse(line: bytes) -> Finished | None:
    """A finished step, or None for a line that a crash has damaged."""
    try:
        return _finished(json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _finished(content: dict[str, Any]) -> Finished:
    tensors = tuple(
        OutputTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in content["tensors"]
    )
    quality = content["quality"] and WeightQuality(**content["quality"])
    return Finished(content["step"], content["source_sha256"], tensors, quality)
