"""The whole export: output folder, refusals, and errors that the proof finds."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.export import gptq
from lowbit.convert.export.export import Target, export
from lowbit.convert.export.proof import Decoded, prove
from lowbit.convert.export.source import open_source
from lowbit.formats.errors import FormatError, ResourceError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import open_any_layout
from tests.convert.export.packed_folders import int4_body, mixed

TARGETS: tuple[Target, ...] = ("gptq", "awq", "mlx", "gguf")


@pytest.fixture
def packed(tmp_path: Path, pack_dense: Any) -> Path:
    made: Path = pack_dense(int4_body)
    return made


def test_the_command_prints_its_proof(packed: Path, tmp_path: Path, cli: Any) -> None:
    done = cli("export", packed, tmp_path / "out", "--to", "gptq", "--json")
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["proof"] == {
        "linears": 14,
        "codes": 86016,
        "scales": 2688,
        "largest_difference": 0.0,
        "copied": 11,
    }
    assert shown["files"] == [
        *("LICENSE", "config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == shown["files"]
    assert shown["folder"] == str(tmp_path / "out")


def test_the_command_prints_its_result(tmp_path: Path, pack_hybrid: Any, cli: Any) -> None:
    packed = pack_hybrid(mixed)
    done = cli("export", packed, tmp_path / "out", "--to", "gguf")
    assert done.exit_code == 0, done.stderr
    assert not done.stderr
    assert "26 linears" in done.stdout
    assert "left out: the vision tower" in done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_two_exports_have_the_same_bytes(
    packed: Path, tmp_path: Path, hashes: Any, target: Target
) -> None:
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        made.append(replace(export(packed, tmp_path / name / "out", target), folder=tmp_path))
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert made[0] == made[1]


def test_a_non_empty_output_folder_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ResourceError, match="is not empty") as caught:
        export(packed, tmp_path / "out", "mlx")
    assert caught.value.hint == "choose another folder"
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_output_inside_the_source_is_refused(packed: Path) -> None:
    with pytest.raises(ResourceError, match="overlap"):
        export(packed, packed / "out", "mlx")


def test_files_of_an_interrupted_export_are_replaced(packed: Path, tmp_path: Path) -> None:
    class Stopped(Exception):  # noqa: N818 - stands for any interruption
        pass

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "prove":
            raise Stopped

    with pytest.raises(Stopped):
        export(packed, tmp_path / "out", "mlx", progress=stop)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out.partial" / "notes.txt").write_text("precious")
    with pytest.raises(ResourceError, match=r"notes.txt` was not written by lowbit-convert"):
        export(packed, tmp_path / "out", "gguf")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "precious"
    (tmp_path / "out.partial" / "notes.txt").unlink()
    export(packed, tmp_path / "out", "gguf")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["LICENSE", "out.gguf"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(4, 32, symmetric=False), "zero points are not exported"),
        (Scheme(3, 32), "3-bit codes have no place there"),
    ],
)
def test_other_schemes_are_refused_by_name(
    tmp_path: Path, pack_dense: Any, target: Target, scheme: Scheme, message: str
) -> None:
    packed = pack_dense(lambda spec: None if spec.role == "head" else scheme)
    with pytest.raises(FormatError, match=rf"`model.layers.0.self_attn.q_proj` .*{message}"):
        export(packed, tmp_path / "out", target)
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_without_packed_weights_is_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(FormatError, match="holds no packed weight"):
        export(tiny, tmp_path / "out", "mlx")


def test_an_original_is_refused_with_the_container_that_takes_one(
    tmp_path: Path, tiny: Path
) -> None:
    with pytest.raises(FormatError) as error:
        export(tiny, tmp_path / "out", "gptq")
    assert error.value.hint is not None
    assert "GGUF takes an original" in error.value.hint


@pytest.mark.parametrize("what", ["codes", "scales", "values", "rows", "copy"])
def test_the_proof_finds_one_wrong_number(packed: Path, tmp_path: Path, what: str) -> None:
    export(packed, tmp_path / "out", "gptq")
    source, made = open_source(packed), open_any_layout(tmp_path / "out")
    victim = source.linears[5]

    def damaged(linear: Any) -> Iterator[Decoded]:
        for part in gptq.decode(source, made, linear):
            if linear is not victim or what == "copy":
                yield part
                continue
            codes, scales, values = (x.clone() for x in (part.codes, part.scales, part.values))
            if what == "codes":
                codes[3, 7] ^= 1
            elif what == "scales":
                scales[1, 1] += 2**-20
            elif what == "values":
                values[2, 5] += 2**-20
            else:
                codes, scales, values = codes[:-1], scales[:-1], values[:-1]
            yield Decoded(part.start, codes, scales, values)

    good, bad = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.0000001])
    copies = [("norm", [good], [bad if what == "copy" else good])]
    pattern = "`norm` reads back" if what == "copy" else f"`{victim.module}`.*{what}"
    with pytest.raises(FormatError, match=pattern):
        prove(source, source.linears, damaged, copies, lambda count: None)
