"""Files that a later run takes up: whole and of the same identity, or not at all."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lowbit.formats.safetensors.sealed import open_sealed, write_sealed

TENSORS = {
    "codes": torch.arange(12, dtype=torch.int32).view(3, 4),
    "scale": torch.tensor([[1.5], [-2.0], [0.0]], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "single": torch.tensor(7.25),
}
FACTS = {"columns": {"a": 4}, "error": None}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kept.safetensors"
    write_sealed(path, TENSORS, FACTS, "identity")
    return path


def test_what_was_written_is_read(file: Path) -> None:
    found = open_sealed(file, "identity")
    assert found is not None
    assert found.facts == FACTS
    for name, tensor in TENSORS.items():
        assert torch.equal(found.content.read(name), tensor)
    assert torch.equal(found.content.read_rows("codes", 1, 3), TENSORS["codes"][1:])
    theirs = load_file(file)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in TENSORS.items())


def test_the_seal_is_a_hash_of_all_in_the_file(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    rows = sorted(
        [name, dtype, list(TENSORS[name].shape), digest]
        for name, dtype, digest in (
            ("codes", "I32", hashlib.sha256(TENSORS["codes"].numpy().tobytes()).hexdigest()),
            ("scale", "BF16", hashlib.sha256(b"\xc0\x3f\x00\xc0\x00\x00").hexdigest()),
            ("none", "F32", hashlib.sha256(b"").hexdigest()),
            ("single", "F32", hashlib.sha256(b"\x00\x00\xe8\x40").hexdigest()),
        )
    )
    text = json.dumps(["identity", json.dumps(FACTS), rows])
    assert metadata["seal"] == hashlib.sha256(text.encode()).hexdigest()


def test_another_identity(file: Path) -> None:
    assert open_sealed(file, "another") is None


def test_any_flipped_bit_is_told(file: Path) -> None:
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + header].rstrip()
    draw = random.Random(0)
    data = range(8 + header, len(whole))
    for place in (*range(8), *draw.sample(range(8, 8 + len(text)), 200), *data):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        found = open_sealed(file, "identity")
        # A bit of a header that changes none of its meaning: the name of an unread key.
        assert found is None or found.facts == FACTS, place
        if found is not None:
            assert all(torch.equal(found.content.read(n), t) for n, t in TENSORS.items()), place


def test_any_cut_is_told(file: Path) -> None:
    whole = file.read_bytes()
    for length in (*range(20), len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert open_sealed(file, "identity") is None


def test_a_file_without_a_seal(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    for metadata in (None, {"facts": "{}"}, {"seal": ""}):
        save_file(TENSORS, path, metadata)
        assert open_sealed(path, "identity") is None
    with pytest.raises(FileNotFoundError):
        open_sealed(tmp_path / "none", "identity")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    assert open_sealed(tmp_path / "pipe", "identity") is None
