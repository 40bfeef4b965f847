"""Reports to render, an INT4 file with every figure and variations, and pages to read."""

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from lowbit.convert.measure.drafts import Draft, Drafting
from lowbit.convert.measure.record import (
    Flip,
    Histogram,
    LogitQuality,
    LongQuality,
    Needle,
    Noise,
    Position,
    QualityReport,
    Sizes,
    TextKind,
    Window,
)
from lowbit.convert.measure.weights import WeightQuality

MakeReport = Callable[..., QualityReport]


class Page(HTMLParser):
    """Parser that checks that tags are balanced, and collects attributes, text and table rows."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str]]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.pieces: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}  # cells in words, by the id of the section
        self.closed: list[str] = []  # words inside <details>
        self.feed(text)
        self.close()
        assert self.open == []
        self.words = "".join(self.pieces)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        self.attributes += found.items()
        if tag not in self.VOID:
            self.open.append((tag, found))
        if tag == "tr":
            self.rows.setdefault(self._section(), []).append([])
        if tag in ("td", "th"):
            self.rows[self._section()][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = [tag for tag, _ in self.open]
        if "style" in inside:
            return
        self.pieces.append(data)
        if "details" in inside:
            self.closed.append(data)
        if "td" in inside or "th" in inside:
            row = self.rows[self._section()][-1]
            row[-1] = " ".join(f"{row[-1]} {data}".split())

    def _section(self) -> str:
        return next(
            (a["id"] for tag, a in reversed(self.open) if tag == "section" and "id" in a), ""
        )


@pytest.fixture
def read_page() -> Callable[[str], Page]:
    return Page


def row(
    name: str,
    bits: int = 4,
    error: float = 0.1,
    clipped: float = 0.01,
    output: float | None = None,
    weights: int = 65536,
    cosine: float = 0.995,
) -> WeightQuality:
    return WeightQuality(name, bits, 128, weights, cosine, error, 20.0, clipped, output)


@pytest.fixture
def make_row() -> Callable[..., WeightQuality]:
    return row


@pytest.fixture
def logits() -> LogitQuality:
    """The figures that every report has; `extras` has the others."""
    return LogitQuality(
        text_name="a text",
        text_sha256="ab" * 32,
        text_tokens=20500,
        window=512,
        windows=40,
        scored_tokens=20440,
        perplexity_original=3.286,
        perplexity_packed=3.354,
        log_ratio_error=0.0008,
        kl_mean=0.018,
        kl_error=0.0004,
        kl_p95=0.07,
        kl_p99=0.13,
        kl_max=0.68,
        cosine_mean=0.9972,
        cosine_p1=0.9866,
        top1_agreement=0.9427,
        kl_histogram=Histogram(-8.0, 2.0, (0,) * 30 + (20000, 400, 40) + (0,) * 27),
        window_series=tuple(Window(1.1 + i / 100, 1.12 + i / 100, 0.018) for i in range(40)),
        device="cpu",
        torch_version="2.13.0",
        transformers_version="5.23.0",
    )


@pytest.fixture
def extras() -> dict[str, Any]:
    """Noise, positions, kinds of text, flips and drafts."""
    return {
        "noise": Noise(0.0003, 0.0021, 0.9911),
        "positions": (
            Position(0, 128, 1000, 0.021, 0.94, 1.20, 1.22),
            Position(128, 2048, 9000, 0.016, 0.95, 1.10, 1.11, 0.0005),
        ),
        "kinds": (
            TextKind("stories", "ab" * 32, 20440, 3.286, 3.354, 0.018, 0.9427, 0.13, 0.0004),
            TextKind("maths", "ef" * 32, 5110, 6.5, 6.6, 0.024, 0.93, 0.19, 0.0011),
        ),
        "flips": (
            Flip(
                "stories",
                "Once upon a time\nthere was a",
                " little",
                " little",
                "\n",
                0.6,
                0.2,
                2.3,
            ),
            Flip("maths", "7 + 5 = ", "12", "12", "13", 0.41, 0.125, 1.1),
        ),
        "drafting": Drafting(
            8,
            (Draft(4080, 3395, 0.832, 0.832, 1.832), Draft(2601, 1578, 0.607, 0.505, 2.337)),
            (Draft(4080, 3441, 0.843, 0.843, 1.843), Draft(2633, 1650, 0.627, 0.529, 2.372)),
            (Draft(4080, 3305, 0.81, 0.81, 1.81), Draft(2501, 1488, 0.595, 0.482, 2.292)),
            1000,
            0.954,
        ),
    }


@pytest.fixture
def long() -> LongQuality:
    """Figures of long texts."""
    return LongQuality(
        length=2048,
        repeated=2,
        kl_mean=0.031,
        cache_kl_mean=0.00006,
        positions=(
            Position(0, 128, 1000, 0.021, 0.94, 1.20, 1.22),
            Position(128, 2048, 9000, 0.016, 0.95, 1.10, 1.11, 0.0005),
        ),
        cache=(
            Position(0, 128, 1000, 0.00005, 0.99, 1.22, 1.22),
            Position(128, 2048, 9000, 0.0007, 0.99, 1.11, 1.11, 0.0002),
        ),
        needles=(Needle(1900, 4, 4, 3, 3, 2), Needle(300, 4, 4, 4, 4, 4)),
    )


@pytest.fixture
def make_report(logits: LogitQuality) -> MakeReport:
    """A report of two layers and an INT8 head; keyword arguments replace fields of its logits."""

    def make(
        rows: tuple[WeightQuality, ...] | None = None, measured: bool = True, **figures: Any
    ) -> QualityReport:
        if rows is None:
            kinds = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
            rows = tuple(row(f"model.layers.{n}.{kind}") for n in range(2) for kind in kinds)
            rows += (row("lm_head", bits=8, error=0.006, clipped=0.0),)
        sizes = Sizes(5_953_483, 11_828_625, 4.853)
        found = replace(logits, **figures) if measured else None
        facts = ("lowbit-convert a b", "2026-05-31", None, "qwen3", 5_801_216)
        return QualityReport("0.1.0", "cd" * 32, sizes, rows, found, *facts)

    return make
