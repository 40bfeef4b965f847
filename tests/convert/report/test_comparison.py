"""Comparison of folders: figures from their reports, and refusal of different measurements."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from lowbit.convert.measure.record import LogitQuality, QualityReport, Sizes, Window
from lowbit.convert.measure.uncertainty import PairedDifference
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.comparison import FolderComparison, compare, mean_cosine
from lowbit.convert.report.comparison_page import (
    comparison_page,
    difference_text,
    frontier,
    render_comparison,
)
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, RequestError
from lowbit.formats.layout.manifest import Manifest, Source
from lowbit.formats.safetensors.hashing import hash_file
from tests.convert.report.pages import Page, numbers
from tests.convert.report.samples import LOGITS

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

SERIES = np.random.default_rng(0).normal(0.04, 0.005, size=40)
MakeFolder = Callable[..., Path]


def logits(shift: float = 0.0, noise: float = 0.0, **figures: Any) -> LogitQuality:
    """Logit figures whose windows share their difficulty, plus `shift` and random `noise`."""
    spread = np.random.default_rng(1).normal(0.0, 1.0, size=40)
    series = SERIES + shift + noise * spread
    found = replace(
        LOGITS,
        kl_mean=float(series.mean()),
        kl_error=None,
        window_series=tuple(Window(1.1, 1.12, float(kl)) for kl in series),
    )
    return replace(found, **figures)


ROWS = (
    WeightQuality("model.layers.0.mlp.up_proj", 4, 128, 3000, 0.99, 0.1, 20.0, 0.0),
    WeightQuality("model.layers.0.mlp.down_proj", 4, 128, 1000, 0.95, 0.3, 10.0, 0.0),
)
HEAD = WeightQuality("lm_head", 8, 128, 9000, 1.0, 0.006, 44.0, 0.0)


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """A folder with reports but no weights: (name, its recipe, figures...)."""

    def make(
        name: str,
        recipe: dict[str, Any] | None = None,
        weights: tuple[WeightQuality, ...] = ROWS,
        size: int = 6_000_000,
        source: str = "aa" * 32,
        found: LogitQuality | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        digest = None
        if recipe is not None:
            origin = Source("Qwen/Qwen3-0.6B", "0123", "", source)
            manifest = Manifest("0.1.0", origin, recipe, (), (), ())
            (folder / "lowbit.json").write_bytes(manifest.to_bytes())
            digest = hash_file(folder / "lowbit.json")
        measured, facts = found or logits(), ("2026-05-31", "qwen3", 5_801_216)
        report = QualityReport("0.1.0", digest, Sizes(size, None, 4.25), weights, measured, *facts)
        (folder / "quality.json").write_bytes(report.to_bytes())
        return folder

    return make


def test_rows(make_folder: MakeFolder) -> None:
    rtn = make_folder("rtn", {"method": "rtn", "scales": "signed"})
    better = logits(shift=-0.006, noise=0.001, cosine_mean=0.9981)
    gptq = make_folder("gptq", {"method": "gptq", "scales": "positive"}, found=better, size=7)
    other = make_folder("other", None, weights=(*ROWS, HEAD))
    found = compare([rtn, gptq, other])
    assert (found.source, found.text_name) == ("Qwen/Qwen3-0.6B", "a text")
    assert [row.name for row in found.rows] == ["rtn", "gptq", "other"]
    assert [row.method for row in found.rows] == ["rtn", "gptq, positive scales", "another tool"]
    assert [row.schemes for row in found.rows] == ["INT4 g128"] * 2 + ["INT4 g128, INT8 g128"]
    assert found.rows[1].folder_bytes == 7
    assert found.rows[1].logit_cosine == 0.9981
    assert found.rows[1].perplexity_change == pytest.approx(3.354 / 3.286 - 1)
    # Over the linears that all of them pack: the head of one is no gain of its own.
    for row in found.rows:
        assert row.weight_cosine == pytest.approx((3 * 0.99 + 0.95) / 4)


def test_paired_error_against_numpy(make_folder: MakeFolder) -> None:
    a = make_folder("a", {})
    b = make_folder("b", {}, found=logits(shift=-0.006, noise=0.001))
    first, second = compare([a, b]).rows
    assert first.difference is None
    assert second.difference is not None
    pairs = -0.006 + 0.001 * np.random.default_rng(1).normal(0.0, 1.0, size=40)
    assert second.difference.mean == pytest.approx(pairs.mean())
    error = pairs.std(ddof=1) / math.sqrt(40)
    assert second.difference.standard_error == pytest.approx(error)
    # Far below what the windows' own spread would give.
    assert error < 0.3 * SERIES.std(ddof=1) / math.sqrt(40)


def test_few_windows_give_no_error(make_folder: MakeFolder) -> None:
    few = logits()
    few = replace(few, windows=7, window_series=few.window_series[:7])
    folders = [make_folder(name, {}, found=few) for name in "ab"]
    assert compare(folders).rows[1].difference is None


def test_one_folder(make_folder: MakeFolder) -> None:
    (row,) = compare([make_folder("a", {})]).rows
    assert row.difference is None


def refusal(*folders: Path) -> LowbitError:
    with pytest.raises(LowbitError) as caught:
        compare(folders)
    return caught.value


def test_different_sources(make_folder: MakeFolder) -> None:
    a, b, c = make_folder("a", {}), make_folder("b", {}), make_folder("c", {}, source="cc" * 32)
    error = refusal(a, b, c)
    assert isinstance(error, RequestError)
    assert f"`{a}` and `{c}` are made from different models" in str(error)


def test_different_sources_without_manifests(make_folder: MakeFolder) -> None:
    a = make_folder("a", {})
    b = make_folder("b", None, found=logits(perplexity_original=3.3))
    assert "the original's perplexity is 3.2860 and 3.3000" in str(refusal(a, b))
    endless = make_folder("c", None, found=logits(perplexity_original=math.inf))
    assert "different models" in str(refusal(a, endless))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_sha256": "cd" * 32, "text_name": "prose"}, "`a text` (abababababab) and `prose`"),
        ({"window": 256}, "40 windows of 512 tokens and 40 of 256"),
        ({"windows": 39}, "40 windows of 512 tokens and 39 of 512"),
    ],
)
def test_different_texts(make_folder: MakeFolder, change: dict[str, Any], message: str) -> None:
    a, b = make_folder("a", {}), make_folder("b", {}, found=logits(**change))
    error = refusal(a, b)
    assert message in str(error)
    assert f"`{a}` and `{b}`" in str(error)


def test_missing_reports_name_the_command(make_folder: MakeFolder, tmp_path: Path) -> None:
    a = make_folder("a", {})
    none = refusal(a, tmp_path / "nothing")
    assert isinstance(none, CheckpointError)
    assert "has no quality.json" in str(none)
    assert none.hint == f"measure it: lowbit-convert report {tmp_path / 'nothing'}"
    content = json.loads((a / "quality.json").read_text())
    content["logits"] = None
    del content["sha256"]
    (a / "quality.json").write_text(json.dumps(content))
    only_weights = refusal(a)
    assert "only its weights were compared" in str(only_weights)
    assert only_weights.hint == f"measure it: lowbit-convert report {a}"


def test_a_report_of_an_earlier_conversion(make_folder: MakeFolder) -> None:
    a = make_folder("a", {})
    (a / "lowbit.json").write_bytes((a / "lowbit.json").read_bytes() + b"\n")
    assert "the report of another conversion" in str(refusal(a))


def test_a_damaged_report(make_folder: MakeFolder) -> None:
    a = make_folder("a", {})
    (a / "quality.json").write_text('{"schema": 1}')
    assert isinstance(refusal(a), FormatError)


def test_an_empty_list_of_folders_is_refused() -> None:
    assert "nothing to compare" in str(refusal())


def test_mean_cosine_of_nothing() -> None:
    assert mean_cosine([]) is None


def test_frontier(make_folder: MakeFolder) -> None:
    found = compare(
        [
            make_folder("worse", {}, size=7, found=logits(shift=0.01)),
            make_folder("small", {}, size=5),
            make_folder("large", {}, size=9, found=logits(shift=-0.01)),
            make_folder("same size", {}, size=5, found=logits(shift=0.001)),
            make_folder("a byte more", {}, size=9_000_001, found=logits(shift=-0.02)),
            make_folder("a byte less", {}, size=9_000_000, found=logits(shift=-0.015)),
        ]
    )
    assert [row.name for row in frontier(found.rows)] == ["small", "large", "a byte more"]


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (None, "\N{EN DASH}"),
        (PairedDifference(-0.0070812, 0.000239), "-0.00708 ± 0.00024"),
        (PairedDifference(0.5, 0.02), "+0.500 ± 0.020"),
        (PairedDifference(0.0, 0.0), "+0.00"),
        (PairedDifference(math.inf, math.nan), "+∞"),
    ],
)
def test_differences_in_words(
    make_folder: MakeFolder, difference: PairedDifference | None, text: str
) -> None:
    (row,) = compare([make_folder("a", {})]).rows
    assert difference_text(replace(row, difference=difference)) == text


def test_terminal_fits_eighty_columns(make_folder: MakeFolder) -> None:
    names = ("qwen3-8b-int4", "qwen3-8b-int4-gptq")
    found = compare(
        [make_folder(name, {}, found=logits(0.001, noise=n / 1000)) for n, name in enumerate(names)]
    )
    out = io.StringIO()
    render_comparison(Console(file=out, width=80), found)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for name in names:
        assert text.count(f" {name} ") == 2
    assert "…" not in text


HOSTILE = "</title><script>alert(1)</script>\"'"


def test_page(make_folder: MakeFolder) -> None:
    found = compare(
        [
            make_folder("a", {"method": HOSTILE}),
            make_folder("b", {}, size=9_000_000, found=logits(shift=-0.01, noise=0.001)),
        ]
    )
    hostile = replace(found.rows[0], name=HOSTILE, folder=HOSTILE, schemes=HOSTILE)
    found = replace(found, source=HOSTILE, text_name=HOSTILE, rows=(hostile, found.rows[1]))
    text = comparison_page(found)
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 1
    assert "circle" in page.tags
    loss, why = page.rows[""][1:3], page.rows[""][4:]
    assert [row[0].startswith(HOSTILE) for row in loss] == [True, False]
    assert [row[1:3] for row in loss] == [["usable", "6.00 MB"], ["usable", "9.00 MB"]]
    assert loss[1][4] == difference_text(found.rows[1])
    assert [numbers(cell) for cell in loss[1][5:]] == [[0.13], [5.73]]
    assert [numbers(row[-1]) for row in why] == [[0.98], [0.98]]
    assert not [word for word in ("http:", "https:") if word in text]


def test_page_names_model_verdicts_and_reasons(make_folder: MakeFolder) -> None:
    found = compare(
        [
            make_folder("near", {}, found=logits(shift=-0.02)),
            make_folder("far", {}, found=logits(shift=0.5, kl_p99=9.0)),
            make_folder("unsure", {}, found=logits(kl_error=0.03)),
        ]
    )
    page = Page(comparison_page(found))
    assert "3 packed forms of Qwen/Qwen3-0.6B" in page.text
    assert page.facts["Closest to the original"].startswith("near")
    assert [row[:2] for row in page.rows[""][1:4]] == [
        ["near rtn", "usable"],
        ["far rtn", "broken"],
        ["unsure rtn", "not judged"],
    ]
    for row in found.rows:
        assert row.verdict.reason in page.facts[row.name]
    assert [row.verdict.grade for row in found.rows] == ["usable", "broken", None]
    assert json.loads(json.dumps(found.to_json()))["rows"][1]["verdict"]["grade"] == "broken"


def test_local_models_are_named_by_type_and_size(make_folder: MakeFolder) -> None:
    found = replace(compare([make_folder("a", {})]), source=None)
    assert "form of a qwen3 model of 5.8 M parameters" in comparison_page(found)


def test_page_of_infinities(make_folder: MakeFolder) -> None:
    inf = math.inf
    worst = logits(kl_mean=inf, kl_p99=inf, perplexity_packed=inf, cosine_mean=inf)
    page = Page(comparison_page(compare([make_folder("a", {}, found=worst)])))
    assert "∞" in page.words


def test_command(make_folder: MakeFolder, cli: "Cli", tmp_path: Path) -> None:
    a, b = make_folder("a", {}), make_folder("b", {}, found=logits(shift=-0.01))
    said = cli("compare", a, b, "--out", tmp_path / "compare.html")
    assert said.exit_code == 0
    assert said.stderr == ""
    assert "perplexity of the original 3.286" in said.stdout
    assert "compare.html" in said.stdout
    assert (tmp_path / "compare.html").read_text().startswith("<!doctype html>")
    content = json.loads(cli("compare", a, b, "--json").stdout)
    assert content["schema"] == 1
    assert [row["name"] for row in content["rows"]] == ["a", "b"]
    assert content["rows"][1]["difference"]["mean"] == pytest.approx(-0.01)


def test_command_errors(make_folder: MakeFolder, cli: "Cli", tmp_path: Path) -> None:
    assert cli("compare").exit_code == 2
    failed = cli("compare", make_folder("a", {}), tmp_path / "b")
    assert failed.exit_code == 1
    assert "hint: measure it: lowbit-convert report" in failed.stderr
    place = tmp_path / "none" / "compare.html"
    refused = cli("compare", tmp_path / "a", "--out", place)
    assert refused.exit_code == 2
    assert "there is no folder" in refused.stderr


def test_json_of_a_comparison_has_no_infinity(make_folder: MakeFolder) -> None:
    found: FolderComparison = compare([make_folder("a", {}, found=logits(kl_p99=math.inf))])
    content = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(content)["rows"][0]["kl_p99"] is None
