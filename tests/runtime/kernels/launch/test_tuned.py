"""The file of tuned launches: what is read is what was kept, and nothing damaged or foreign is."""

import ast
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.errors import FormatError
from lowbit.runtime.backends import cuda
from lowbit.runtime.cli import notes
from lowbit.runtime.kernels import linear
from lowbit.runtime.kernels.launch import tuned
from lowbit.runtime.kernels.launch.linear import GemvLaunch, measured, several_measured
from lowbit.runtime.kernels.launch.tuned import (
    Launches,
    MeasuredCard,
    content_of,
    keep_launches,
    kernels_version,
    line_of,
    of_other_kernels,
    path_for,
    read_launches,
)
from lowbit.runtime.weights.linear import PackedLinear

CARD = MeasuredCard("NVIDIA GeForce RTX 4090", 89, "0123456789ab")
QKV = (4, 384, 32, False)
ONE = GemvLaunch(2, 2, 8, early=True, registers=128, shared=32)
SEVERAL = GemvLaunch(2, 2, 16, early=True, registers=128, warp_groups=2)
FOUND = Launches(CARD, "2026-11-26", {QKV: ((1, ONE), (4, SEVERAL))})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_what_was_kept_is_read() -> None:
    assert read_launches(CARD) is None
    path = keep_launches(FOUND)
    assert read_launches(CARD) == FOUND
    assert path.name == "NVIDIA-GeForce-RTX-4090-sm_89-0123456789ab.json"
    head = (8, 9496, 64, False)
    launch = GemvLaunch(1, 8, 4)
    keep_launches(Launches(CARD, "2026-11-27", {head: ((1, launch),)}))
    both = {**FOUND.linears, head: ((1, launch),)}
    assert read_launches(CARD) == Launches(CARD, "2026-11-27", both)
    keep_launches(Launches(CARD, "2026-11-28", {QKV: ((1, launch),)}))
    again = read_launches(CARD)
    assert again is not None
    assert again.of(QKV) == ((1, launch),)
    assert again.of((4, 384, 32, True)) == ()


def test_other_cards_and_other_kernels_find_nothing() -> None:
    path = keep_launches(FOUND)
    changes: tuple[dict[str, Any], ...] = ({"name": "X"}, {"capability": 90}, {"kernels": "0" * 12})
    others = [replace(CARD, **change) for change in changes]
    assert [read_launches(card) for card in others] == [None, None, None]
    assert of_other_kernels(CARD) == []
    assert of_other_kernels(others[2]) == [path]
    assert of_other_kernels(others[0]) == []


def test_launches_of_other_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuned, "card_here", lambda: CARD)
    notes.note_older_launches()
    assert capsys.readouterr().err == ""
    keep_launches(replace(FOUND, card=replace(CARD, kernels="0" * 12)))
    notes.note_older_launches()
    assert "are of other kernels and not used: lowbit-run tune" in capsys.readouterr().err


def test_linears_keep_the_launches_of_their_size() -> None:
    codes, scales = torch.zeros(6144, 512, dtype=torch.int32), torch.ones(6144, 32)
    w = PackedLinear(codes, scales.bfloat16(), 4, 128)
    here = partial(cuda.prepare, w, launches=FOUND)
    made: list[Any] = [here(), here(paired=True), here(inputs="int8"), cuda.prepare(w)]
    assert [each.tuned for each in made] == [FOUND.linears[QKV], (), (), ()]
    assert [each.activations for each in made] == ["exact", "exact", "int8", "exact"]


def test_another_name_does_not_make_a_file_of_another_card_fit() -> None:
    other = replace(CARD, name="NVIDIA GeForce RTX 4060")
    path_for(CARD).parent.mkdir()
    path_for(CARD).write_bytes(content_of(replace(FOUND, card=other)))
    with pytest.raises(FormatError, match="is for `NVIDIA GeForce RTX 4060`, compute capability"):
        read_launches(CARD)


def changed(**changes: Any) -> Any:
    """A change of the entry for several tokens, or of its launch where it has such a field."""

    def change(content: dict[str, Any]) -> None:
        entry = content["linears"][1]
        for name, value in changes.items():
            (entry["launch"] if name in entry["launch"] and name != "tokens" else entry)[name] = (
                value
            )

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.update(schema=2), "`schema` must be"),
        (lambda it: it.update(more=1), 'unknown key "more"'),
        (lambda it: it.pop("date"), "lacks `date`"),
        (lambda it: it.update(linears={}), "`linears` must be a list"),
        (lambda it: it["linears"].append(7), r"linears\[2\] must be an object with a `launch`"),
        (lambda it: it["linears"][0].pop("paired"), r"linears\[0\] lacks `paired`"),
        (changed(bits=9), "`bits` must be an integer from 2 to 8, got 9"),
        (changed(bits=True), "`bits` must be"),
        (changed(tokens=3), "`tokens` must be a power of two"),
        (changed(tokens=64), "`tokens` must be an integer from 1 to 32"),
        (changed(warps=12), "12 warps, 2 warp groups"),
        (changed(warps=10**30), "`warps` must be an integer from 1 to 16"),
        (changed(warps=8), r"divides K into 4 parts, expected 8 as for one token"),
        (changed(registers=1), "`registers` must be"),
        (changed(shared=49), "`shared` must be an integer from 0 to 48"),
        (changed(rounds=16), "no kernel has such a launch for 4 tokens"),
        (changed(tokens=1, staged=False), "no kernel has such a launch for 1 tokens"),
        (changed(tokens=1, split=16), "no kernel has such a launch for 1 tokens"),
        (changed(tokens=1, warp_groups=16, split=2), "no kernel has such a launch for 1 tokens"),
        (lambda it: it["linears"].append(it["linears"][1] | {"launch": it["linears"][0]["launch"]}),
         "two launches of"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(change: Any, words: str) -> None:
    content = json.loads(content_of(FOUND))
    change(content)
    path_for(CARD).parent.mkdir()
    path_for(CARD).write_text(json.dumps(content))
    with pytest.raises(FormatError, match=words) as refused:
        read_launches(CARD)
    assert str(path_for(CARD)) in str(refused.value)
    assert refused.value.hint == tuned.HINT


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"date": 1, "date": 1}', b"\xff", b"[" * 99])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    path_for(CARD).parent.mkdir()
    path_for(CARD).write_bytes(raw)
    with pytest.raises(FormatError):
        read_launches(CARD)


def test_a_pipe_is_refused() -> None:
    import os

    path_for(CARD).parent.mkdir()
    os.mkfifo(path_for(CARD))
    with pytest.raises(FormatError, match="is a pipe"):
        read_launches(CARD)


def test_the_version_is_that_of_the_sources() -> None:
    """Of all that kernels of linears are made of; `launch` is measured, `rows` is not."""
    assert len(kernels_version()) == tuned.DIGITS
    rooms = tuple(
        f"lowbit.runtime.kernels.{name}" for name in ("linear", "ptx", "codec", "launch", "rows")
    )
    for path in Path(linear.__path__[0]).glob("*.py"):
        names = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        kernels = [name for name in names if name.startswith("lowbit.runtime.kernels.")]
        assert all(name.startswith(rooms) for name in kernels), path


def test_lines_read_as_the_launch() -> None:
    for launch in (*measured("one").values(), *several_measured().values()):
        assert eval(line_of(launch)) == launch
