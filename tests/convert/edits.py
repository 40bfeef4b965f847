"""Changes that tests make to folders, and interruptions of work on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from lowbit.convert.original.progress import Progress
from lowbit.formats.layout.manifest import Manifest, read_manifest
from tests.convert.fixture_types import Edit


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def set_config(folder: Path, **values: Any) -> None:
    """Give keys of config.json other values."""
    edit_json(folder / "config.json", lambda content: content.update(values))


def edit_tensors(folder: Path, edit: Edit) -> None:
    """Rewrite the one shard of a folder, with tensors that are edited in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def stop_at(phase: str) -> Progress:
    """Progress that stops the work like Ctrl-C when a phase is reached."""

    def stop(now: str, done: int, total: int) -> None:
        if now == phase:
            raise KeyboardInterrupt

    return stop
