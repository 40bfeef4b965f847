"""quality.html: one file that fetches nothing and runs nothing, whatever the names hold."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert.measure.record import Flip, Noise, QualityReport, TextKind, Window
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.html import recipe_facts, render_html
from lowbit.convert.report.space import Room
from lowbit.formats.layout.manifest import (
    Calibration,
    DraftVocabulary,
    Manifest,
    MtpTraining,
    Source,
    SourceTensor,
)
from lowbit.formats.tasks import TaskReport, TaskResult

if TYPE_CHECKING:
    from tests.convert.report.conftest import Page

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]
ReadPage = Callable[[str], "Page"]

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
ROOMS = (
    Room("MLP", "INT4 g128", 7_000_000, 1_800_000, 0.6),
    Room("head", "INT8 g128", None, 1_200_000, 0.4),
)
TASKS = TaskReport(
    lowbit_version="0.1.0",
    harness="lm-eval 0.4.13",
    manifest_sha256=None,
    tasks=(
        TaskResult("arc_easy", "acc", 0.8123, 0.008, 2376, True, 0, None, False, 4096, "cpu", "1"),
        TaskResult("wikitext", "bpb", None, None, 62, False, None, 5, False, 4096, "cpu", "2"),
    ),
)


def test_a_calibration_tells_what_it_leaves_out(
    make_report: MakeReport, make_row: MakeRow, read_page: ReadPage
) -> None:
    rows = (make_row("lm_head"), make_row("mtp.layers.0.mlp.experts.*.up_proj"))
    making = read_page(render_html(make_report(rows), MANIFEST, "m")).rows["making"]
    (row,) = (row for row in making if row[0] == "Multi-token prediction")
    assert row[1].startswith("rounded to nearest with searched scales, its experts included")
    for manifest, found in ((replace(MANIFEST, calibration=None), rows), (MANIFEST, rows[:1])):
        making = read_page(render_html(make_report(found), manifest, "m")).rows["making"]
        assert not [row for row in making if row[0] == "Multi-token prediction"]


def test_the_first_screen_answers(
    make_report: MakeReport, extras: dict[str, Any], read_page: ReadPage
) -> None:
    report = replace(make_report(**extras), parameters=8_190_000_000)
    page = read_page(render_html(report, MANIFEST, "my-model"))
    first, _, _ = page.text.partition("What changed against BF16")
    for figure in (
        "my-model",
        "packed from Qwen/Qwen3-0.6B (qwen3, 8.2 B parameters), and compared with it on 2026-05-31",
        "Verdict Usable Mean KL 0.0180 ± 0.0004 nats per token (usable: up to 0.05).",
        "As expected of 4-bit weights in a model of 8.2 B parameters: good files stay below 0.03.",
        "moves the original by 0.000300 and changes 0.89 % of its top tokens; packing moves it "
        "60 times as far.",
        "expected for this size and these bits, 0.03",
        "Mean KL divergence 0.0180 ± 0.0004 nats per token",
        "Worst 1 % of tokens 0.130 nats or more; the largest 0.680",
        "Top token changed 5.73 % of 20,440 predictions",
        "Perplexity +2.07 % 3.286 → 3.354; ± 0.08",
        "Size 5.95 MB 50.3 % of 11.83 MB",
        "Bits per weight 4.85",
    ):
        assert figure in first, figure


@pytest.mark.parametrize(
    ("kl", "title"),
    [(0.006, "Close to the original"), (0.03, "Usable"), (0.07, "Degraded"), (math.inf, "Broken")],
)
def test_titles(make_report: MakeReport, kl: float, title: str, read_page: ReadPage) -> None:
    page = read_page(
        render_html(make_report(kl_mean=kl, kl_p99=0.05, top1_agreement=0.97), None, "m")
    )
    assert f"Verdict {title} Mean KL " in page.text


def test_every_section(
    make_report: MakeReport, make_row: MakeRow, extras: dict[str, Any], read_page: ReadPage
) -> None:
    rows = tuple(
        make_row(f"model.layers.{n}.mlp.{kind}_proj", output=0.05 + n / 100)
        for n in range(2)
        for kind in ("up", "down")
    )
    report = replace(make_report(rows, **extras), command="lowbit-convert 'a b' OUT --bits '*=3'")
    page = read_page(render_html(report, MANIFEST, "m", ROOMS, TASKS))
    headings = (
        "Verdict",
        "What changed against BF16",
        "Which layers suffer",
        "Where the bytes went",
        "Which tokens flip",
        "Tasks",
        "How it was made",
        "Where the limits come from",
        "What the figures mean",
    )
    places = [page.text.rindex(heading) for heading in headings[1:]]
    assert places == sorted(places)
    for figure in (
        "KL divergence, 95 % of tokens below 0.0700",
        "KL divergence, mean nats per token 0.0180 ± 0.0004 0.000300",
        "maths 5,110 6.50 → 6.60 +1.54 % 93.00 % 0.190 0.024 ± 0.001",
        "128 to 2,048 9,000 0.0160 ± 0.0005 95.00 % 3.004 3.034",
        "Output error, in percent",
        "up_proj INT4 g128 \N{MULTIPLICATION SIGN} 2 5.50 % 10.00 %",
        "MLP INT4 g128 7.00 MB 1.80 MB 60.0 %",
        "head INT8 g128 1.20 MB 40.0 %",
        "original little ✓ packed ↵ original's choice 60.0 % → 20.0 % probability",
        "arc_easy acc 0.8123 0.0080 2,376 0",
        "wikitext bpb ↓ \N{EN DASH} 62 (limited)",
        "lm-eval 0.4.13",
        "lowbit-convert 'a b' OUT --bits '*=3'",
        "Qwen/Qwen3-0.6B at commit 0123456789",
        "Overrides *.down_proj=8",
        "Calibration text bundled text, 128 windows of 512 tokens; SHA-256 " + "9a" * 32,
        "Calibrated by transformers 5.22.0, torch 2.13.0+cpu on cpu, 1 thread",
        "1 quantized",
        "cd" * 32,
        "ef" * 32,
        "transformers 5.23.0",
    ):
        assert figure in page.text, figure
    assert page.tags.count("svg") == 3


def test_nothing_is_fetched_or_run(
    make_report: MakeReport, extras: dict[str, Any], read_page: ReadPage
) -> None:
    text = render_html(make_report(**extras), MANIFEST, "m", ROOMS, TASKS)
    page = read_page(text)
    forbidden = {"script", "link", "iframe", "object", "base", "img", "image", "use"}
    assert not forbidden & set(page.tags)
    identifiers = {value for name, value in page.attributes if name == "id"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "xlink:href", "srcset")
        if name == "href":
            assert value.removeprefix("#") in identifiers
    assert "url(" not in text
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text


def test_headings_do_not_skip_and_plots_have_words(
    make_report: MakeReport, extras: dict[str, Any], read_page: ReadPage
) -> None:
    page = read_page(render_html(make_report(**extras), MANIFEST, "m", ROOMS, TASKS))
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    alternatives = [value for name, value in page.attributes if name == "aria-label"]
    assert sum("KL divergence" in value for value in alternatives) >= 4
    assert page.tags.count("svg") == [v for n, v in page.attributes if n == "class"].count("chart")


HOSTILE = "</code><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_hostile_names_stay_text(
    make_report: MakeReport, make_row: MakeRow, read_page: ReadPage
) -> None:
    manifest = Manifest(
        HOSTILE,
        Source(HOSTILE, HOSTILE, HOSTILE, HOSTILE),
        {HOSTILE: [HOSTILE], "calibration": {HOSTILE: HOSTILE}},
        (),
        (),
        (),
    )
    rows = (make_row(HOSTILE), make_row(f"model.layers.0.{HOSTILE}", error=0.9), make_row("x"))
    report = make_report(
        rows,
        text_name=HOSTILE,
        torch_version=HOSTILE,
        kinds=(TextKind(HOSTILE, HOSTILE, 1, 1.0, 1.0, 0.1, 1.0),),
        flips=(Flip(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0.5, 0.5, 1.0),),
    )
    tasks = replace(
        TASKS, harness=HOSTILE, tasks=(replace(TASKS.tasks[0], task=HOSTILE, metric=HOSTILE),)
    )
    rooms = (Room(HOSTILE, HOSTILE, 1, 1, 1.0),)
    page = read_page(render_html(replace(report, command=HOSTILE), manifest, HOSTILE, rooms, tasks))
    assert not {"script", "img"} & set(page.tags)
    assert not any(name == "onerror" for name, _ in page.attributes)
    assert page.words.count(HOSTILE) > 15


@pytest.mark.parametrize(
    "name", ["$x^", "_hidden", "model.layers.0.$\\frac{", "名前", "\x00\x1b[31m", "]]>", "--"]
)
def test_odd_names(
    make_report: MakeReport, make_row: MakeRow, name: str, read_page: ReadPage
) -> None:
    rows = (make_row(name), make_row(f"model.layers.0.mlp.{name}"))
    read_page(render_html(make_report(rows), None, name))


def test_without_logits_and_manifest(make_report: MakeReport, read_page: ReadPage) -> None:
    page = read_page(render_html(make_report(measured=False), None, "m"))
    assert "Verdict Not judged The predictions were not measured." in page.text
    assert "Only the weights were compared" in page.text
    assert "packed from a local original (qwen3, 5.8 M parameters)" in page.text
    assert "What changed" not in page.text
    assert "svg" not in page.tags
    assert "Weight error, in percent" in page.text


def test_without_anything(make_report: MakeReport, read_page: ReadPage) -> None:
    page = read_page(render_html(make_report((), measured=False), None, "m"))
    assert "Which layers suffer" not in page.text
    assert "How it was made" in page.text


def test_extreme_figures(make_report: MakeReport, make_row: MakeRow, read_page: ReadPage) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", error=0.0, output=0.0),)
    report = make_report(
        rows,
        kl_mean=0.0,
        kl_p95=0.0,
        kl_p99=0.0,
        kl_max=0.0,
        windows=1,
        window_series=(Window(900.0, 800.0, 0.0),),
        perplexity_packed=math.inf,
        log_ratio_error=None,
        noise=Noise(0.0, 0.0, 1.0),
    )
    page = read_page(render_html(report, None, "m"))
    assert "∞" in page.text
    assert "nan" not in page.text


def test_infinities(
    make_report: MakeReport, make_row: MakeRow, extras: dict[str, Any], read_page: ReadPage
) -> None:
    """An infinite figure comes back from quality.json as infinity."""
    rows = (make_row("model.layers.0.mlp.up_proj", error=math.inf, output=math.inf),)
    inf = math.inf
    extras["positions"] = tuple(
        replace(p, kl_mean=inf, nll_original=inf, nll_packed=inf) for p in extras["positions"]
    )
    extras["kinds"] = tuple(replace(k, kl_mean=inf, perplexity_packed=inf) for k in extras["kinds"])
    extras["noise"] = Noise(inf, inf, 0.5)
    report = make_report(
        rows, kl_mean=inf, kl_p95=inf, kl_p99=inf, kl_max=inf, cosine_mean=inf, **extras
    )
    text = render_html(report, MANIFEST, "m", ROOMS)
    assert "Verdict Broken" in read_page(text).text
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


def test_a_trained_head_and_a_draft_head(
    make_report: MakeReport, extras: dict[str, Any], read_page: ReadPage
) -> None:
    made = replace(
        MANIFEST,
        draft_head=DraftVocabulary(1000, 128, "own.txt", "5a" * 32, 90_000, 0.981, 0.962),
        mtp_training=MtpTraining("stories.txt", "6b" * 32, 600, "cpu", 2.69, 3.12),
    )
    page = read_page(render_html(make_report(**extras), made, "m", ROOMS))
    (row,) = (row for row in page.rows["making"] if row[0] == "Multi-token prediction")
    assert "on stories.txt, 600 steps on cpu: from 2.69 to 3.12 tokens a round" in row[1]
    assert "95.4 % of the model's first choices on these texts, 98.1 % of own.txt" in page.text
    assert "96.2 % of the other half" in page.text
