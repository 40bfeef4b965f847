"""Content of quality.html: open sections, folded sections, and untrusted values of files."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.convert.measure.record import QualityReport, read_quality
from lowbit.convert.measure.speed import Speed
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.html import recipe_facts, render_html
from lowbit.convert.report.limits import EXPECTED, LIMITS
from lowbit.convert.report.verdict import judge
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.manifest import Manifest, Source

if TYPE_CHECKING:
    from tests.convert.report.conftest import Page

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]
ReadPage = Callable[[str], "Page"]

CALM = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def full(make_report: MakeReport, make_row: MakeRow, extras: dict[str, Any]) -> QualityReport:
    rows = tuple(make_row(f"model.layers.{n}.mlp.up_proj", output=0.05) for n in range(12))
    return make_report(rows, **extras)


def test_sections_that_are_folded(full: QualityReport, read_page: ReadPage) -> None:
    page = read_page(render_html(full, None, "m"))
    hidden = " ".join(" ".join(page.closed).split())
    shown = page.text
    assert "Weight error, in percent" in hidden
    assert shown.count("Weight error, in percent") == 1
    assert "Output error, in percent" not in hidden
    assert "All 12 packed linears" in hidden
    # Twice the same fact: SQNR follows from the weight error; two lines of perplexity coincide.
    assert "SQNR" not in shown
    assert "Perplexity along" not in shown
    assert [row[0] for row in page.rows["layers"] if row[0] == "Linear"] == ["Linear"] * 3


def test_marks_have_their_colours_wherever_they_stand(full: QualityReport) -> None:
    page = render_html(full, None, "m")
    assert page.count("<mark>") > 1
    assert "<mark " not in page
    # The browser's own are black on yellow, in the dark, too.
    assert re.search(r"^mark \{[^}]*color: inherit", page, re.MULTILINE)


def test_tables_by_their_cells(full: QualityReport, read_page: ReadPage) -> None:
    page = read_page(render_html(full, None, "m"))
    changes = page.rows["changes"]
    assert ["Figure", "Packed", "BF16 alone"] in changes
    assert ["KL divergence, 95 % of tokens below", "0.0700", ""] in changes
    assert [
        "maths",
        "5,110",
        "6.50 → 6.60",
        "+1.54 %",
        "93.00 %",
        "0.190",
        "0.024 ± 0.001",
        "",
    ] in (changes)
    assert page.rows["drafts"] == [
        [
            *("Draft", "Right", "In the original", "Of few tokens"),
            *("Accepted in", "Tokens a round", "Rounds so far"),
        ],
        ["first", "83.2 %", "84.3 %", "81.0 %", "83.2 %", "1.83", "4,080"],
        ["second", "60.7 %", "62.7 %", "59.5 %", "50.5 %", "2.34", "2,601"],
    ]
    assert "Chosen from the 1,000 tokens of the draft head, drafts make 2.29 tokens" in page.text
    assert ["Measured on", "2026-05-31 (UTC)"] in page.rows["making"]
    (original,) = (row for row in page.rows["making"] if row[0] == "Original")
    assert "model type qwen3, 5,801,216 parameters" in original[1]


def test_speed_and_memory_where_benched(full: QualityReport, read_page: ReadPage) -> None:
    speed = Speed("NVIDIA <b>H200", 64, 128, 4096, 0.0093, 830.4, 4_700_000_000, 5_900_000_000)
    top, _, _ = read_page(render_html(full, None, "m", speed=speed)).text.partition("What changed")
    assert "Speed 830 tokens/s on NVIDIA <b>H200, one sequence" in top
    assert "First token 9.3 ms after a prompt of 64 tokens" in top
    assert "Memory 5.90 GB at the peak, with room for 4,096 tokens" in top
    assert "tokens/s" not in read_page(render_html(full, None, "m")).text


def test_limits_are_on_the_page_with_their_sources(
    full: QualityReport, read_page: ReadPage
) -> None:
    rows = read_page(render_html(full, None, "m")).rows["limits"]
    for limit in LIMITS:
        (row,) = (row for row in rows if row[-1] == limit.evidence)
        assert row[1:4] == [f"{limit.kl:g}", f"{10 * limit.kl:g}", f"{100 * limit.flips:.0f} %"]
    for bits, expectations in EXPECTED.items():
        for expectation in expectations:
            (row,) = (
                r for r in rows if r[-1] == expectation.evidence and r[2] == f"{expectation.kl:g}"
            )
            assert row[0].startswith(f"{bits} bits")


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"perplexity_original": 3481.7}, "itself cannot read a text (perplexity 3,482)"),
        (
            {"scored_tokens": 15, "windows": 1, "window": 16, "text_tokens": 16, "kl_error": None},
            "a verdict takes 4,088 scored tokens and there are 15",
        ),
        ({"kl_error": 0.009}, "a verdict takes about 520,000 scored tokens and there are 20,440"),
    ],
)
def test_no_verdict_is_no_gauge_either(
    make_report: MakeReport, read_page: ReadPage, figures: dict[str, Any], words: str
) -> None:
    page = read_page(render_html(make_report(**figures), None, "m"))
    top, _, _ = page.text.partition("What changed")
    assert "Verdict Not judged" in top
    assert words.lower() in top.lower()
    assert "--eval-text FILE" in top
    assert ("class", "verdict unknown") in page.attributes
    assert not any(value == "gauge" for _, value in page.attributes)
    assert "As expected" not in page.text


def test_notes_stand_with_the_verdict(
    make_report: MakeReport, extras: dict[str, Any], read_page: ReadPage
) -> None:
    first, maths = extras["kinds"]
    extras["kinds"] = (
        first,
        replace(maths, kl_mean=0.2),
        replace(maths, name="x", tokens=9, kl_error=None),
    )
    report = make_report(**extras)
    page = read_page(render_html(report, None, "m"))
    top, _, _ = page.text.partition("What changed")
    assert "Verdict Degraded" in top
    assert "but the mean KL on maths is 0.200 ± 0.001 (degraded: up to 0.4)." in top
    assert len(judge(report).notes) > 0
    for note in judge(report).notes:
        assert note in top


HOSTILE = (
    "</title><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "\x00\x1b[2J\x07\x9b31m",
    "a\u202eevil\u2066",
    "\ud800 lone",
    "--><!--",
    "x" * 3000,
    "]]></style>",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_files_stay_text(
    make_report: MakeReport,
    make_row: MakeRow,
    extras: dict[str, Any],
    read_page: ReadPage,
    name: str,
) -> None:
    first, maths = extras["kinds"]
    extras["kinds"] = (replace(first, name=name), replace(maths, name=name, kl_mean=0.3))
    report = make_report(
        (make_row(name), make_row(f"model.layers.0.{name}", output=0.1)), text_name=name, **extras
    )
    report = replace(
        report, command=name, original=name, model_type=name, measured_on=name, lowbit_version=name
    )
    manifest = Manifest(name, Source(name, name, name, name), {name: [name]}, (), (), ())
    text = render_html(report, manifest, name)
    text.encode()  # a lone surrogate would end the writing of the file
    page = read_page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("style") == page.tags.count("title") == 1
    assert not any(attribute.startswith("on") for attribute, _ in page.attributes)
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in text)
    assert not {"\u202e", "\u2066"} & set(text)


@pytest.mark.parametrize("depth", [3, 50, 400, 900])
def test_a_deeply_nested_recipe(depth: int) -> None:
    recipe: dict[str, Any] = {"a": 1}
    for _ in range(depth):
        recipe = {"a": recipe}
    ((_, value),) = recipe_facts(recipe)
    assert value


WILD = st.floats(min_value=0, allow_nan=False) | st.sampled_from([0.0, 5e-324, 1e308, math.inf])
SHARE = st.floats(0, 1)
COUNT = st.integers(1, 2**63 - 1)


@CALM
@given(data=st.data())
def test_any_figures_that_are_read_make_a_page(
    full: QualityReport, read_page: ReadPage, data: st.DataObject
) -> None:
    """A file with any figures within the ranges is rendered whole."""
    content = full.to_json()
    wild: dict[str, st.SearchStrategy[Any]]
    wild = {"kl_mean": WILD, "kl_p95": WILD, "kl_p99": WILD, "kl_max": WILD}
    wild |= {"kl_error": WILD | st.none(), "log_ratio_error": WILD | st.none()}
    wild |= {
        "perplexity_original": WILD.map(lambda v: v + 0.001),
        "perplexity_packed": WILD.map(lambda v: v + 0.001),
    }
    wild |= {
        "top1_agreement": SHARE,
        "windows": COUNT,
        "scored_tokens": COUNT,
        "text_tokens": COUNT,
    }
    for key, values in wild.items():
        content["logits"][key] = data.draw(values, key)
    for row in content["logits"]["window_series"][:3]:
        row.update({key: data.draw(WILD) for key in row})
    for row in content["logits"]["positions"] + content["logits"]["kinds"]:
        row.update({key: data.draw(WILD) for key in ("kl_mean", "kl_error")})
        row["tokens"] = data.draw(COUNT)
    content["logits"]["noise"] = {
        "kl_mean": data.draw(WILD),
        "kl_p99": data.draw(WILD),
        "top1_agreement": data.draw(SHARE),
    }
    content["weights"][0] |= {"relative_l2": data.draw(WILD), "weights": data.draw(COUNT)}
    content["sizes"] = {
        "folder_bytes": data.draw(COUNT),
        "source_bytes": data.draw(COUNT),
        "bits_per_weight": data.draw(WILD),
    }
    content["parameters"] = data.draw(COUNT)
    report = parse(content)
    text = render_html(report, None, "m")
    page = read_page(text)
    assert "Verdict" in page.text
    assert "nan" not in page.text.replace("nance", "")
    places = [value for name, value in page.attributes if name in ("x", "y", "width", "points")]
    assert not any("nan" in value or "inf" in value for value in places)


def parse(content: dict[str, Any]) -> QualityReport:
    """The report as it comes back from a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "quality.json").write_text(json.dumps(content))
        found = read_quality(Path(folder))
    assert found is not None
    return found


JUNK: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])
)


@CALM
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused_and_never_breaks_the_page(
    full: QualityReport, read_page: ReadPage, data: st.DataObject
) -> None:
    content = json.loads(full.to_bytes())
    place: Any = content
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JUNK)
        break
    try:
        report = parse(content)
    except FormatError:
        return
    read_page(render_html(report, None, "m"))
