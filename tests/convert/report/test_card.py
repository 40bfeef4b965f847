"""The draft model card: front matter that parses, figures, warnings, nothing injected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowbit.convert.quality.record import QualityReport
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.card import read_license, render_card
from lowbit.formats.manifest import Manifest, Source

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]


def manifest(repo: str | None) -> Manifest:
    return Manifest("0.1.0", Source(repo, None, "", ""), {}, (), (), ())


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    content = yaml.safe_load(front)
    assert isinstance(content, dict)
    return content


def test_front_matter(make_report: MakeReport) -> None:
    card = render_card(make_report(), manifest("Qwen/Qwen3-0.6B"), "m", "apache-2.0")
    assert front_matter(card) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compressed-tensors", "lowbit", "int4"],
    }
    assert "TODO" not in card


def test_unknown_source_is_left_to_fill_in(make_report: MakeReport) -> None:
    card = render_card(make_report(), None, "m", None)
    assert "base_model" not in front_matter(card)
    assert "TODO (name and link of the original model)" in card
    assert "TODO: state the license" in card


def test_figures_and_use(make_report: MakeReport) -> None:
    card = render_card(make_report(), None, "m", None)
    assert "| perplexity | 3.286 | 3.354 (+2.07 % ± 0.08) |" in card
    assert "| up_proj | INT4 g128 | 2 | 10.00 % | 10.00 % |" in card
    assert "lowbit-run FOLDER" in card
    assert "vllm serve FOLDER" in card
    assert "`dequantize=True` (or `run_compressed=False`)" in card
    assert "garbage" in card


def test_one_precision_is_not_warned_of_as_two(make_report: MakeReport, make_row: MakeRow) -> None:
    card = render_card(make_report((make_row("lm_head", 8),)), None, "m", None)
    assert "garbage" not in card
    assert "int8" in front_matter(card)["tags"]


def test_what_vllm_does_not_load_is_said(make_report: MakeReport, make_row: MakeRow) -> None:
    card = render_card(make_report((make_row("lm_head", 3),)), None, "m", None)
    assert "vllm serve" not in card
    assert "vLLM does not load this file" in card


def test_vllm_is_told_that_there_is_no_vision_tower(make_report: MakeReport) -> None:
    whole = manifest(None)
    assert "vllm serve FOLDER\n" in render_card(make_report(), whole, "m", None)
    text_only = replace(whole, recipe={"drop_vision": True})
    card = render_card(make_report(), text_only, "m", None)
    assert "vllm serve FOLDER --language-model-only\n" in card


def test_hostile_names(make_report: MakeReport, make_row: MakeRow) -> None:
    name = 'x`|\n---\nlicense: stolen\n<script>alert(1)</script>"'
    report = make_report((make_row(name),), text_name=name)
    card = render_card(report, manifest(name), name, None)
    assert front_matter(card)["base_model"] == name
    assert "license" not in front_matter(card)
    assert "<script>" not in card.split("---\n", 2)[2]
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (4, 6) for line in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("---\r\ntags: [x]\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ('---\nlicense: "cc-by-4.0"\n---\n', "cc-by-4.0"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\ntags: [x]\n---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("", None),
    ],
)
def test_read_license(tmp_path: Path, text: str, expected: str | None) -> None:
    path = tmp_path / "README.md"
    path.write_text(text, newline="")
    assert read_license(path) == expected


def test_read_license_without_a_card(tmp_path: Path) -> None:
    assert read_license(tmp_path / "README.md") is None
