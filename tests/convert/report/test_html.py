"""quality.html: one file that fetches nothing and runs nothing, whatever the names hold."""

import base64
import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lowbit.convert.quality.record import QualityReport, Window
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.html import render_html
from lowbit.formats.manifest import Manifest, Source, SourceTensor

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]

MANIFEST = Manifest(
    lowbit_version="0.1.0",
    source=Source("Qwen/Qwen3-0.6B", "0123456789", "aa" * 32, "bb" * 32),
    recipe={"recipe": "int4", "overrides": ["*.down_proj=8"], "lm_head": None},
    source_tensors=(SourceTensor("x.weight", "BF16", (2, 2), "quantized", "", "cc" * 32, 4, 128),),
    tensors=(),
    files=(),
)


class Page(HTMLParser):
    """Tags in balance, every attribute, and the visible text."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_figures_are_on_the_page(make_report: MakeReport) -> None:
    page = Page(render_html(make_report(), MANIFEST, "my-model"))
    text = " ".join(page.words.split())
    for figure in (
        "my-model",
        "Within guidance",
        "Perplexity 3.354 original 3.286, +2.07 % ± 0.08",
        "KL divergence per token 0.0180 p99 0.130, max 0.680 nats",
        "Same top token 94.27 %",
        "Logit cosine 0.99720",
        "5.95 MB 50.3 % of 11.83 MB",
        "Bits per weight 4.85",
        "Qwen/Qwen3-0.6B at commit 0123456789",
        '[["*.down_proj", 8]]',
        "1 quantized",
        "cd" * 32,
        "transformers 5.23.0",
    ):
        assert figure in text, figure
    assert page.tags.count("img") == 3


def test_nothing_is_fetched_or_run(make_report: MakeReport) -> None:
    text = render_html(make_report(), MANIFEST, "m")
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value.startswith("data:image/svg+xml;base64,")
    assert "url(" not in text
    assert "@import" not in text


def test_plots_are_svg(make_report: MakeReport) -> None:
    text = render_html(make_report(), None, "m")
    found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", text)
    assert len(found) == 3
    for svg in found:
        root = ElementTree.fromstring(base64.b64decode(svg))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(text) < 600_000


HOSTILE = "</code><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def test_hostile_names_stay_text(make_report: MakeReport, make_row: MakeRow) -> None:
    manifest = Manifest(
        HOSTILE, Source(HOSTILE, HOSTILE, HOSTILE, HOSTILE), {HOSTILE: [HOSTILE]}, (), (), ()
    )
    rows = (make_row(HOSTILE), make_row(f"model.layers.0.{HOSTILE}", error=0.9), make_row("x"))
    report = make_report(rows, text_name=HOSTILE, torch_version=HOSTILE)
    page = Page(render_html(report, manifest, HOSTILE))
    assert "script" not in page.tags
    assert page.tags.count("img") == 3
    assert not any(name == "onerror" for name, _ in page.attributes)
    assert HOSTILE in page.words


@pytest.mark.parametrize(
    "name", ["$x^", "_hidden", "model.layers.0.$\\frac{", "名前", "\x00\x1b[31m"]
)
def test_names_that_plots_could_misread(
    make_report: MakeReport, make_row: MakeRow, name: str
) -> None:
    rows = (make_row(name), make_row(f"model.layers.0.mlp.{name}"))
    Page(render_html(make_report(rows), None, name))


def test_without_logits_and_manifest(make_report: MakeReport) -> None:
    page = Page(render_html(make_report(measured=False), None, "m"))
    assert "Only the weights were compared" in page.words
    assert "another tool made it" in page.words
    assert page.tags.count("img") == 1


def test_extreme_figures(make_report: MakeReport, make_row: MakeRow) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", error=0.0),)
    report = make_report(
        rows,
        kl_mean=0.0,
        kl_p99=0.0,
        kl_max=0.0,
        windows=1,
        window_series=(Window(900.0, 800.0, 0.0),),
        perplexity_packed=float("inf"),
        log_ratio_error=None,
    )
    page = Page(render_html(report, None, "m"))
    assert "inf" in page.words
