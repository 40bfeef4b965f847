"""Bytes by part and precision; they add up to the folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.convert import Conversion, Recipe
from lowbit.convert.measure.build import measure_sizes
from lowbit.convert.report.html import render_html
from lowbit.convert.report.space import SizeShare, where_bytes_went
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.report.pages import Page
from tests.convert.report.samples import make_report


def shares_of(folder: Path) -> tuple[list[SizeShare], int]:
    total = measure_sizes(open_packed(folder)).folder_bytes
    return where_bytes_went(open_packed(folder), total), total


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Conversion:
    return convert(tiny, tmp_path_factory.mktemp("space") / "packed", Recipe())


def test_bytes_add_up_to_the_folder(packed: Conversion) -> None:
    shares, total = shares_of(packed.folder)
    assert sum(share.after for share in shares) == total
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert [share.after for share in shares] == sorted((s.after for s in shares), reverse=True)


def test_parts_against_the_headers(packed: Conversion, tiny: Path) -> None:
    found = {(share.part, share.precision): share for share in shares_of(packed.folder)[0]}
    after, before = open_checkpoint(packed.folder).tensors, open_checkpoint(tiny).tensors
    mlp = found["MLP", "INT4 g128"]
    assert mlp.after == sum(info.nbytes for name, info in after.items() if ".mlp." in name)
    assert mlp.before == sum(info.nbytes for name, info in before.items() if ".mlp." in name)
    attention = found["attention", "INT4 g128"]
    projections = [info for name, info in before.items() if "_proj" in name and "attn" in name]
    assert attention.before == sum(info.nbytes for info in projections)
    # The head of a tied model is made from the embedding, which stays.
    head = found["head", "INT8 g128"]
    assert head.before is None
    assert head.after == sum(info.nbytes for name, info in after.items() if "lm_head" in name)
    embedding = found["embedding", "BF16"]
    assert embedding.before == embedding.after


def test_without_a_manifest(packed: Conversion) -> None:
    manifest = packed.folder / "lowbit.json"
    content = manifest.read_bytes()
    manifest.unlink()
    try:
        shares, total = shares_of(packed.folder)
    finally:
        manifest.write_bytes(content)
    assert all(share.before is None for share in shares)
    assert sum(share.after for share in shares) == total


def test_a_hybrid(tmp_path: Path, hybrid: Path) -> None:
    folder = convert(hybrid, tmp_path / "packed", Recipe()).folder
    shares, total = shares_of(folder)
    assert sum(share.after for share in shares) == total
    parts = {(share.part, share.precision) for share in shares}
    assert {
        ("DeltaNet", "INT4 g128"),
        ("DeltaNet", "INT8 g128"),
        ("multi-token prediction", "INT4 g128"),
        ("vision tower", "BF16"),
    } <= parts
    # What is small shares the last row.
    assert "norms" in shares[-1].part
    assert sum(share.share < 0.005 for share in shares) <= 1


def test_the_vision_tower_has_a_tile() -> None:
    full = make_report()
    assert "Vision tower" not in Page(render_html(full, None, "m")).text
    kept = replace(full.sizes, vision_bytes=921_460_000, vision_dtypes="BF16<b>")
    text = Page(render_html(replace(full, sizes=kept), None, "m")).text
    assert "Vision tower 921.46 MB of the size, not quantized: BF16<b>" in text
    dropped = replace(full.sizes, vision_dropped=921_460_000)
    text = Page(render_html(replace(full, sizes=dropped), None, "m")).text
    assert "Vision tower left out 921.46 MB of the original: text only" in text
