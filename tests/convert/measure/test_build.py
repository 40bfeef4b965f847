"""Sizes, hash, date and original of a report."""

import hashlib
import json
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
import torch

from lowbit.convert.measure.build import build_report, measure_sizes, parameters
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.report.formatting import size, tower_text
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.short_models import SHORT_VOCABULARY


def test_sizes(short: Path, packed: Path, packed_tied: Path) -> None:
    found = measure_sizes(open_packed(packed), open_checkpoint(short))
    assert found.folder_bytes == sum(path.stat().st_size for path in packed.iterdir())
    source = sum(path.stat().st_size for path in short.iterdir())
    assert found.source_bytes == pytest.approx(source, abs=5000)  # headers and config differ
    # 4 + 16/128 bits in 2 layers of 786,432 weights, 8 + 16/128 in a head of 1024 x 256, two int64
    # of shape a linear, and BF16 in the embedding; norms and headers are below 1 %.
    body, head = 2 * 786_432, SHORT_VOCABULARY * 256
    count = parameters(json.loads((short / "config.json").read_text()))
    # Nothing in a folder without lowbit.json says that its head was tied: it counts apart.
    expected = (body * 4.125 + head * (8.125 + 16) + 15 * 128) / (count + head)
    assert found.bits_per_weight == pytest.approx(expected, rel=0.01)
    size = (packed / "model.safetensors").stat().st_size
    assert found.bits_per_weight == 8 * size / (count + head)
    tied = measure_sizes(open_packed(packed_tied))
    assert tied.source_bytes is None
    expected = (body * 4.125 + head * 16 + 42 * 128) / count
    assert tied.bits_per_weight == pytest.approx(expected, rel=0.01)
    assert tied.bits_per_weight == 8 * (packed_tied / "model.safetensors").stat().st_size / count


def test_the_vision_tower_is_counted_kept_or_left_out(hybrid: Path, tmp_path: Path) -> None:
    source = open_checkpoint(hybrid)
    tower = sum(info.nbytes for name, info in source.tensors.items() if "visual" in name)
    kept = measure_sizes(open_packed(convert(hybrid, tmp_path / "kept", Recipe()).folder))
    assert (kept.vision_bytes, kept.vision_dtypes, kept.vision_dropped) == (tower, "BF16", 0)
    assert tower_text(kept) == f"{size(tower)}, not quantized (BF16)"
    made = convert(hybrid, tmp_path / "dropped", Recipe(drop_vision=True))
    dropped = measure_sizes(open_packed(made.folder))
    assert (dropped.vision_bytes, dropped.vision_dtypes, dropped.vision_dropped) == (0, "", tower)
    assert tower_text(dropped) == f"left out (--drop-vision), {size(tower)}: text only"


def test_reports_do_not_count(packed: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    before = measure_sizes(open_packed(tmp_path))
    (tmp_path / "quality.html").write_text("x" * 1000)
    assert measure_sizes(open_packed(tmp_path)) == before


@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_parameters_equal_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(__file__).parents[3] / "examples/models" / name
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    config = json.loads((folder / "config.json").read_text())
    assert parameters(config) == sum(weight.numel() for weight in model.parameters())


def test_date_and_original(short: Path, packed: Path) -> None:
    before = datetime.now(UTC).date()
    found = build_report(open_packed(packed), [], None, open_checkpoint(short), "org/tiny")
    assert found.measured_on is not None
    assert before <= date.fromisoformat(found.measured_on) <= datetime.now(UTC).date()
    assert (found.original, found.model_type) == ("org/tiny", "qwen3")
    # The packed head is no longer tied, and is no further parameter of the original.
    assert found.parameters == parameters(json.loads((short / "config.json").read_text()))
    assert str(short) not in found.to_bytes().decode()


def test_manifest_hash(packed: Path) -> None:
    assert build_report(open_packed(packed), [], None).manifest_sha256 is None


def test_manifest_hash_is_of_its_bytes(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.formats.layout.manifest import Manifest, Source

    (tmp_path / "config.json").write_bytes((packed / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((packed / "model.safetensors").read_bytes())
    manifest = Manifest("0", Source(None, None, "", ""), {}, (), (), ())
    (tmp_path / "lowbit.json").write_bytes(manifest.to_bytes())
    found = build_report(open_packed(tmp_path), [], None)
    assert found.manifest_sha256 == hashlib.sha256(manifest.to_bytes()).hexdigest()
