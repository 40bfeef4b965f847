"""Safetensors files made by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteRaw = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


@pytest.fixture
def write_raw(folder: Path) -> WriteRaw:
    """Write a safetensors file from a header, however wrong, and data bytes."""

    def write(header: Any, data: bytes = b"", file: str = "model.safetensors") -> Path:
        if isinstance(header, bytes):
            raw = header
        else:
            raw = (header if isinstance(header, str) else json.dumps(header)).encode()
        path = folder / file
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        return path

    return write
