"""Answers about pictures in the terminal, on the page, in the card and in the verdict."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowbit.convert.measure.record import read_quality
from lowbit.convert.report.graded_figures import graded_figures, with_int8_inputs
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal
from lowbit.convert.report.verdict import judge
from tests.convert.report.pages import Page
from tests.convert.report.samples import IMAGES, make_report
from tests.convert.report.test_card import render


def judged(**changes: Any) -> Any:
    return judge(make_report(images=replace(IMAGES, **changes)))


def test_a_line_in_the_terminal() -> None:
    shown = io.StringIO()
    render_terminal(Console(file=shown, width=160), make_report(images=IMAGES))
    [line] = [row for row in shown.getvalue().splitlines() if row.startswith("images ")]
    assert line.split(maxsplit=1)[1].rstrip() == (
        "mean KL 0.0123 ± 0.0009   perplexity 1.081 → 1.094, +1.20 %   read 11 → 10 of 12"
    )


def test_a_section_of_the_page() -> None:
    page = Page(render_html(make_report(images=IMAGES), None, "m"))
    rows = {row[0]: row[1:] for row in page.rows["images"]}
    assert rows["Mean KL nats per token"] == ["", "0.0123 ± 0.0009"]
    assert rows["Same top token"] == ["", "99.07 %"]
    assert rows["Perplexity of the answers"] == ["1.081", "1.094"]
    assert rows["Pictures read"] == ["11", "10"]
    assert "images" not in Page(render_html(make_report(), None, "m")).rows


def test_a_table_in_the_card() -> None:
    card = render(make_report(images=IMAGES))
    assert "Answers about 12 small pictures, mostly of text (214 tokens" in card
    assert "| pictures read | 11 | 10 |" in card
    assert "| mean KL / p99 (nats) | | 0.0123 / 0.210 |" in card
    assert "pictures" not in render(make_report())


def test_the_file_has_them(tmp_path: Path) -> None:
    report = make_report(images=IMAGES)
    (tmp_path / "quality.json").write_bytes(report.to_bytes())
    assert read_quality(tmp_path) == report
    assert report.to_json()["logits"]["images"]["kl_mean"] == 0.0123


def test_the_verdict_counts_them() -> None:
    plain = judge(make_report())
    assert plain.grade == judged().grade == "usable"
    worse = judged(kl_mean=0.4, kl_error=0.02)
    assert worse.grade == "broken"
    assert "but the mean KL on answers about pictures is 0.40 ± 0.02 (broken: " in worse.reason
    assert judged(kl_mean=math.inf, kl_error=None).grade == "broken"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"perplexity_original": 90_000.0, "kl_mean": 4.0},
            "The pictures are left out: the original itself cannot read them (perplexity 90,000 of "
            "the answers).",
        ),
        (
            {"kl_mean": 0.06, "kl_error": 0.04},
            "The pictures are left out: their mean KL, 0.06 ± 0.04, is not known well enough.",
        ),
        (
            {"kl_mean": 0.4, "kl_error": None},
            "The pictures are left out: their mean KL, 0.400, is not known well enough.",
        ),
    ],
)
def test_pictures_that_say_nothing_are_left_out(changes: dict[str, Any], sentence: str) -> None:
    found = judged(**changes)
    assert found.grade == "usable"
    assert sentence in found.notes


def test_figures_with_inputs_in_eight_bits_leave_them_out(extras: dict[str, Any]) -> None:
    logits = make_report(**extras, images=IMAGES).logits
    assert logits is not None
    named = [figure.text for figure in graded_figures(logits)]
    assert any("pictures" in text for text in named)
    rounded = [figure.text for figure in graded_figures(with_int8_inputs(logits))]
    assert not any("pictures" in text for text in rounded)
