"""quality.html: every figure in its place; nothing fetched or run, whatever the names hold."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.convert.measure.record import (
    Flip,
    LongQuality,
    Noise,
    QualityReport,
    TextKind,
    Window,
    read_quality,
)
from lowbit.convert.measure.speed import Speed
from lowbit.convert.report.html import recipe_facts, render_html
from lowbit.convert.report.limits import EXPECTED, LIMITS
from lowbit.convert.report.space import SizeShare
from lowbit.convert.report.verdict import judge
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.manifest import (
    Calibration,
    CountedRows,
    Manifest,
    MtpTraining,
    Source,
    SourceTensor,
)
from lowbit.formats.tasks import TaskReport, TaskResult
from tests.convert.report.pages import Page, numbers
from tests.convert.report.samples import IMAGES, linear, make_report

Figures = dict[str, Any]

MANIFEST = Manifest(
    lowbit_version="0.1.0",
    source=Source("Qwen/Qwen3-0.6B", "0123456789", "aa" * 32, "bb" * 32),
    recipe={"recipe": "int4", "overrides": ["*.down_proj=8"], "lm_head": None},
    source_tensors=(SourceTensor("x.weight", "BF16", (2, 2), "quantized", "", "cc" * 32, 4, 128),),
    tensors=(),
    files=(),
    calibration=Calibration(
        "bundled text", "9a" * 32, 128, 512, False, "cpu", 1, "2.13.0+cpu", "5.22.0"
    ),
)
SHARES = (
    SizeShare("MLP", "INT4 g128", 7_000_000, 1_800_000, 0.6),
    SizeShare("head", "INT8 g128", None, 1_200_000, 0.4),
)
TASKS = TaskReport(
    lowbit_version="0.1.0",
    harness="lm-eval 0.4.13",
    manifest_sha256=None,
    tasks=(
        TaskResult(
            "arc_easy", "acc", 0.8123, 0.008, 2376, True, 0, None, False, 4096, "cpu", "bf16", "1"
        ),
        TaskResult(
            "wikitext", "bpb", None, None, 62, False, None, 5, False, 4096, "cpu", "int8", "2"
        ),
    ),
)

TILES = {
    "Mean KL divergence": [0.018, 0.0004],
    "Worst 1 % of tokens": [0.13, 0.68],
    "Top token changed": [5.73, 20440],
    "Perplexity": [2.07, 3.286, 3.354, 0.08],
    "Size": [5.95, 50.3, 11.83],
    "Bits per weight": [4.85],
}


@pytest.fixture
def full(extras: dict[str, Any], long: LongQuality) -> QualityReport:
    """Every figure, of twelve layers with two linears each."""
    rows = tuple(
        linear(f"model.layers.{n}.mlp.{kind}_proj", output=0.05 + n / 1000)
        for n in range(12)
        for kind in ("up", "down")
    )
    command = "lowbit-convert 'a b' OUT --bits '*=3'"
    made = make_report(rows, **extras, images=IMAGES)
    return replace(made, command=command, long=long)


def making(page: Page) -> dict[str, str]:
    """Rows of the section on how the file was made."""
    return {row[0]: row[1] for row in page.rows["making"]}


def test_verdict_and_tiles(full: QualityReport) -> None:
    report = replace(full, parameters=8_190_000_000)
    page = Page(render_html(report, MANIFEST, "my-model"))
    verdict = judge(report)
    top, _, _ = page.text.partition("What changed against BF16")
    for said in ("my-model", verdict.title, verdict.reason[1:], verdict.expected, "2026-05-31"):
        assert said in top
    assert ("class", f"verdict {verdict.level}") in page.attributes
    assert {name: numbers(value) for name, value in page.facts.items() if name in TILES} == TILES


@pytest.mark.parametrize("kl", [0.006, 0.03, 0.07, math.inf])
def test_title_and_gauge(kl: float) -> None:
    report = make_report(kl_mean=kl, kl_p99=0.05, top1_agreement=0.97)
    text = render_html(report, None, "m")
    assert f'<p class="answer {judge(report).level}">{judge(report).title}</p>' in text
    widths = re.findall(r'<i class="(\w+)" style="width:([\d.]+)%', text)
    assert [name for name, _ in widths] == ["close", "usable", "degraded", "broken"]
    assert sum(float(width) for _, width in widths) == pytest.approx(100, abs=0.05)


@pytest.mark.parametrize(
    "figures",
    [
        {"perplexity_original": 3481.7},
        {"scored_tokens": 15, "windows": 1, "window": 16, "text_tokens": 16, "kl_error": None},
        {"kl_error": 0.009},
    ],
)
def test_no_verdict_is_no_gauge_either(figures: dict[str, Any]) -> None:
    report = make_report(**figures)
    page = Page(render_html(report, None, "m"))
    top, _, _ = page.text.partition("What changed")
    assert judge(report).grade is None
    assert judge(report).reason[1:] in top
    assert judge(report).hint[1:] in top
    assert ("class", "verdict unknown") in page.attributes
    assert not any(value == "gauge" for _, value in page.attributes)


def test_notes_and_warnings(extras: dict[str, Any]) -> None:
    first, maths = extras["kinds"]
    few = replace(maths, name="x", tokens=9, kl_error=None)
    extras["kinds"] = (first, replace(maths, kl_mean=0.2), few)
    rows = (linear("model.layers.0.mlp.up_proj", clipped=0.2),)
    report = replace(make_report(rows, **extras), held_out_excess=0.4)
    page = Page(render_html(report, None, "m"))
    verdict = judge(report)
    said = [" ".join(text.split()) for text in (*verdict.notes, *verdict.next_steps)]
    assert page.items["verdict"] == said != []
    assert [numbers(text)[0] for text in page.items["look"]][:2] == [0, 40]  # layer 0, 40 %


def test_changes_row_by_row(full: QualityReport) -> None:
    page = Page(render_html(full, MANIFEST, "m", SHARES, TASKS))
    changes = {row[0]: row[1:] for row in page.rows["changes"]}
    assert changes["Figure"] == ["Packed", "BF16 alone"]
    assert changes["KL divergence, mean nats per token"] == ["0.0180 ± 0.0004", "0.000300"]
    assert changes["KL divergence, 95 % of tokens below"] == ["0.0700", ""]
    assert [numbers(cell) for cell in changes["maths"]] == [
        *([5110], [6.5, 6.6], [1.54], [93], [0.19], [0.024, 0.001], [])
    ]
    assert [numbers(cell) for cell in changes["128 to 2,048"]] == [
        *([9000], [0.016, 0.0005], [95], [3.004], [3.034])
    ]
    rounded = {row[0]: row[1:] for row in page.rows["int8"]}
    assert rounded["stories"][3:] == ["0.0204 ± 0.0005", "0.0024 ± 0.0001 more"]
    assert rounded["maths"][:3] == ["6.59", "92.80 %", "0.190"]


def test_linears_bytes_and_tasks_row_by_row(full: QualityReport) -> None:
    page = Page(render_html(full, MANIFEST, "m", SHARES, TASKS))
    (kind,) = (row for row in page.rows["layers"] if row[0].startswith("up_proj INT4 g128"))
    assert [numbers(cell) for cell in kind[1:]] == [[5.55], [10], [10], [1]]
    assert page.rows["bytes"][1:] == [
        ["MLP", "INT4 g128", "7.00 MB", "1.80 MB", "60.0 %", ""],
        ["head", "INT8 g128", "", "1.20 MB", "40.0 %", ""],
    ]
    assert page.rows["tasks"][1:] == [
        ["arc_easy", "acc", "0.8123", "0.0080", "2,376", "0"],
        ["wikitext", "bpb ↓, INT8 cache", "\N{EN DASH}", "", "62 (limited)", ""],
    ]
    assert page.rows["drafts"] == [
        [
            *("Draft", "Right", "In the original", "Of few tokens"),
            *("Accepted in", "Tokens a round", "Rounds so far"),
        ],
        ["first", "83.2 %", "84.3 %", "81.0 %", "83.2 %", "1.83", "4,080"],
        ["second", "60.7 %", "62.7 %", "59.5 %", "50.5 %", "2.34", "2,601"],
    ]
    assert len(page.items["tokens"]) == 2
    assert numbers(page.facts["original's choice"]) == [41, 12.5]  # of the last flip
    assert page.tags.count("svg") == 3


def test_how_it_was_made(full: QualityReport) -> None:
    page = Page(render_html(full, MANIFEST, "m", SHARES, TASKS))
    made = making(page)
    assert made["Command to make it again"] == full.command
    assert made["Overrides"] == "*.down_proj=8"
    assert made["Source tensors"] == "1 quantized"
    assert made["SHA-256 of its weights"] == "bb" * 32
    assert made["SHA-256 of lowbit.json"] == "cd" * 32
    for row, facts in {
        "Original": ("Qwen/Qwen3-0.6B", "0123456789", "qwen3", "5,801,216"),
        "Calibration text": ("bundled text", "128", "512", "9a" * 32),
        "Calibrated by": ("5.22.0", "2.13.0+cpu", "cpu", "1 thread"),
        "Further text": ("maths", "5,110", "ef" * 32),
        "Measured on": ("2026-05-31",),
        "Measured by": ("5.23.0", "2.13.0"),
    }.items():
        assert all(fact in made[row] for fact in facts), row


def test_contents_lead_to_the_sections_in_order(full: QualityReport) -> None:
    text = render_html(full, MANIFEST, "m", SHARES, TASKS)
    nav = text[text.index("<nav") : text.index("</nav>")]
    sections = re.findall(r'<section id="(\w+)"', text)
    assert re.findall(r'href="#(\w+)"', nav) == sections
    assert len(sections) == 12


def test_sections_that_are_folded(full: QualityReport) -> None:
    page = Page(render_html(full, None, "m"))
    assert "Weight error, in percent" in page.closed
    assert page.text.count("Weight error, in percent") == 1
    assert "Output error, in percent" not in page.closed
    assert f"All {len(full.weights)} packed linears" in page.closed
    assert [row[0] for row in page.rows["layers"]].count("Linear") == 3


def test_marks_have_their_colours_wherever_they_stand(full: QualityReport) -> None:
    page = render_html(full, None, "m")
    assert page.count("<mark>") > 1
    assert "<mark " not in page
    # The browser's own are black on yellow, in the dark, too.
    assert re.search(r"^mark \{[^}]*color: inherit", page, re.MULTILINE)


def test_speed_and_memory_where_benched(full: QualityReport) -> None:
    speed = Speed("NVIDIA <b>H200", 64, 128, 4096, 0.0093, 830.4, 4_700_000_000, 5_900_000_000)
    facts = Page(render_html(full, None, "m", speed=speed)).facts
    assert facts["Speed"] == "830 tokens/s on NVIDIA <b>H200, one sequence"
    assert numbers(facts["First token"]) == [9.3, 64]
    assert numbers(facts["Memory"]) == [5.9, 4096]
    assert "Speed" not in Page(render_html(full, None, "m")).facts


def test_limits_are_on_the_page_with_their_sources(full: QualityReport) -> None:
    rows = Page(render_html(full, None, "m")).rows["limits"]
    for limit in LIMITS:
        (row,) = (row for row in rows if row[-1] == limit.evidence)
        assert row[1:4] == [f"{limit.kl:g}", f"{10 * limit.kl:g}", f"{100 * limit.flips:.0f} %"]
    for bits, expectations in EXPECTED.items():
        for expectation in expectations:
            (row,) = (
                r for r in rows if r[-1] == expectation.evidence and r[2] == f"{expectation.kl:g}"
            )
            assert row[0].startswith(f"{bits} bits")


def test_heads_for_drafts(extras: dict[str, Any]) -> None:
    """A calibration leaves the MTP head out; a trained head and a draft head have their figures."""
    name = "Multi-token prediction"
    rows = (linear("lm_head"), linear("mtp.layers.0.mlp.experts.*.up_proj"))
    page = Page(render_html(make_report(rows), MANIFEST, "m"))
    assert making(page)[name].startswith("rounded to nearest with searched scales, its experts")
    for manifest, found in ((replace(MANIFEST, calibration=None), rows), (MANIFEST, rows[:1])):
        assert name not in making(Page(render_html(make_report(found), manifest, "m")))
    made = replace(
        MANIFEST,
        draft_head=CountedRows(1000, 128, "own.txt", "5a" * 32, 90_000, 0.981, 0.962),
        mtp_training=MtpTraining("stories.txt", "6b" * 32, 600, "cpu", 2.69, 3.12),
    )
    page = Page(render_html(make_report(**extras), made, "m", SHARES))
    assert numbers(making(page)[name])[:3] == [600, 2.69, 3.12]
    assert all(f"{share} %" in page.text for share in (95.4, 98.1, 96.2))


def test_nothing_is_fetched_or_run(full: QualityReport) -> None:
    text = render_html(full, MANIFEST, "m", SHARES, TASKS)
    page = Page(text)
    forbidden = {"script", "link", "iframe", "object", "base", "img", "image", "use"}
    assert not forbidden & set(page.tags)
    identifiers = {value for name, value in page.attributes if name == "id"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "xlink:href", "srcset")
        if name == "href":
            assert value.removeprefix("#") in identifiers
    assert not [word for word in ("url(", "@import", "http:", "https:") if word in text]


def test_headings_do_not_skip_and_plots_have_words(full: QualityReport) -> None:
    page = Page(render_html(full, MANIFEST, "m", SHARES, TASKS))
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    alternatives = [value for name, value in page.attributes if name == "aria-label"]
    assert sum("KL divergence" in value for value in alternatives) >= 4
    assert page.tags.count("svg") == [v for n, v in page.attributes if n == "class"].count("chart")


HOSTILE = (
    "</title><script>alert(1)</script>",
    "</code><script>alert(1)</script>\"'><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "$\\frac{",
    "\x00\x1b[2J\x07\x9b31m",
    "a\u202eevil\u2066",
    "\ud800 lone",
    "--><!--",
    "]]></style>",
    "x" * 3000,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_files_stay_text(name: str) -> None:
    source = Source(name, name, name, name)
    manifest = Manifest(name, source, {name: [name], "a": {name: name}}, (), (), ())
    report = make_report(
        (linear(name), linear(f"model.layers.0.{name}", output=0.1)),
        text_name=name,
        torch_version=name,
        kinds=(TextKind(name, name, 1, 1.0, 1.0, 0.1, 1.0, 0.2),),
        flips=(Flip(name, name, name, name, name, 0.5, 0.5, 1.0),),
    )
    report = replace(
        report, command=name, original=name, model_type=name, measured_on=name, lowbit_version=name
    )
    tasks = replace(TASKS, harness=name, tasks=(replace(TASKS.tasks[0], task=name, metric=name),))
    text = render_html(report, manifest, name, (SizeShare(name, name, 1, 1, 1.0),), tasks)
    text.encode()  # a lone surrogate would end the writing of the file
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("style") == page.tags.count("title") == 1
    assert not any(attribute.startswith("on") for attribute, _ in page.attributes)
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in text)
    assert not {"\u202e", "\u2066"} & set(text)
    assert not name.isprintable() or page.words.count(name) > 15


def test_without_logits_and_manifest() -> None:
    report = make_report(measured=False)
    page = Page(render_html(report, None, "m"))
    assert judge(report).title in page.text
    assert "from a local original (qwen3, " in page.text
    assert set(page.rows) == {"layers", "making", "limits", "figures"}
    assert set(page.facts) == {"Size", "Bits per weight"}
    assert "svg" not in page.tags
    empty = Page(render_html(make_report((), measured=False), None, "m"))
    assert set(empty.rows) == {"making", "limits", "figures"}


def test_extreme_figures() -> None:
    rows = (linear("model.layers.0.mlp.up_proj", error=0.0, output=0.0),)
    zeros: Figures = dict.fromkeys(("kl_mean", "kl_p95", "kl_p99", "kl_max"), 0.0)
    report = make_report(
        rows,
        **zeros,
        windows=1,
        window_series=(Window(900.0, 800.0, 0.0),),
        perplexity_packed=math.inf,
        log_ratio_error=None,
        noise=Noise(0.0, 0.0, 1.0),
    )
    page = Page(render_html(report, None, "m"))
    assert "KL along the text" not in page.text  # of one window it would be a dot
    assert page.facts["Perplexity"].startswith("+∞")
    assert "nan" not in page.text


def test_infinities(extras: dict[str, Any]) -> None:
    """An infinite figure comes back from quality.json as infinity."""
    rows = (linear("model.layers.0.mlp.up_proj", error=math.inf, output=math.inf),)
    inf = math.inf
    extras["positions"] = tuple(
        replace(p, kl_mean=inf, nll_original=inf, nll_packed=inf) for p in extras["positions"]
    )
    extras["kinds"] = tuple(replace(k, kl_mean=inf, perplexity_packed=inf) for k in extras["kinds"])
    extras["noise"] = Noise(inf, inf, 0.5)
    figures: Figures = dict.fromkeys(("kl_mean", "kl_p95", "kl_p99", "kl_max", "cosine_mean"), inf)
    text = render_html(make_report(rows, **figures, **extras), MANIFEST, "m", SHARES)
    assert Page(text).facts["Mean KL divergence"].startswith("∞")
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


def test_a_recipe_in_words() -> None:
    recipe = {
        "method": "gptq",
        "lm_head": None,
        "drop_vision": False,
        "act_order": True,
        "overrides": ["a=4", "b=8"],
        "calibration": {"name": "default", "tokens": 1024, "seed": 0, "parts": [{"a": 1}]},
    }
    assert recipe_facts(recipe) == [
        ("Method", "gptq"),
        ("Act order", "yes"),
        ("Overrides", "a=4, b=8"),
        ("Calibration: name", "default"),
        ("Calibration: tokens", "1024"),
        ("Calibration: seed", "0"),
        ("Calibration: parts", '[{"a": 1}]'),
    ]


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
POSITIVE = WILD.map(lambda value: value + 0.001)
LOGITS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("kl_mean", "kl_p95", "kl_p99", "kl_max"), WILD),
    **dict.fromkeys(("kl_error", "log_ratio_error"), WILD | st.none()),
    **dict.fromkeys(("perplexity_original", "perplexity_packed"), POSITIVE),
    **dict.fromkeys(("windows", "scored_tokens", "text_tokens"), COUNT),
    "top1_agreement": SHARE,
    "noise": st.fixed_dictionaries({"kl_mean": WILD, "kl_p99": WILD, "top1_agreement": SHARE}),
}


@settings(max_examples=settings().max_examples // 3)  # a page takes a fifth of a second
@given(data=st.data())
def test_any_figures_that_are_read_make_a_page(
    full: QualityReport, tmp_path: Path, data: st.DataObject
) -> None:
    """A file with any figures within the ranges is rendered whole."""
    content = full.to_json()
    content["logits"].update({key: data.draw(values, key) for key, values in LOGITS.items()})
    for row in content["logits"]["window_series"][:3]:
        row.update({key: data.draw(WILD) for key in row})
    for row in content["logits"]["positions"] + content["logits"]["kinds"]:
        row.update({key: data.draw(WILD) for key in ("kl_mean", "kl_error")})
        row["tokens"] = data.draw(COUNT)
    content["logits"]["images"] |= {
        key: data.draw(WILD) for key in ("kl_mean", "kl_error", "kl_p99")
    } | {key: data.draw(POSITIVE) for key in ("perplexity_original", "perplexity_packed")}
    content["weights"][0] |= {"relative_l2": data.draw(WILD), "weights": data.draw(COUNT)}
    content["sizes"] = {
        "folder_bytes": data.draw(COUNT),
        "source_bytes": data.draw(COUNT),
        "bits_per_weight": data.draw(WILD),
        **dict.fromkeys(("vision_bytes", "vision_dropped"), data.draw(COUNT)),
        "vision_dtypes": data.draw(st.text(max_size=8)),
    }
    content["parameters"] = data.draw(COUNT)
    del content["sha256"]
    page = Page(render_html(parsed(tmp_path, content), None, "m"))
    assert "Verdict" in page.text
    assert "nan" not in page.text.replace("nance", "")
    places = [value for name, value in page.attributes if name in ("x", "y", "width", "points")]
    assert not any("nan" in value or "inf" in value for value in places)


def parsed(folder: Path, content: dict[str, Any]) -> QualityReport:
    """The report as it comes back from a file."""
    (folder / "quality.json").write_text(json.dumps(content))
    found = read_quality(folder)
    assert found is not None
    return found


JUNK: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])
)


@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused_and_never_breaks_the_page(
    full: QualityReport, tmp_path: Path, data: st.DataObject
) -> None:
    content = json.loads(full.to_bytes())
    place: Any = content
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JUNK)
        break
    try:
        report = parsed(tmp_path, content)
    except FormatError:
        return
    Page(render_html(report, None, "m"))
