"""The report in a terminal: the headline first, readable with hundreds of linears."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lowbit.convert.measure.record import QualityReport, Sizes
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal

MakeReport = Callable[..., QualityReport]


def rendered(report: QualityReport, width: int = 120) -> str:
    out = io.StringIO()
    render_terminal(Console(file=out, width=width), report)
    return out.getvalue()


def test_headline(make_report: MakeReport) -> None:
    text = rendered(make_report())
    first = text.splitlines()[0]
    assert "Usable: mean KL 0.0180 ± 0.0004 nats per token (usable: up to 0.05)" in first
    for figure in (
        "3.286 → 3.354   +2.07 % ± 0.08",
        "mean 0.0180 ± 0.0004   p95 0.0700   p99 0.130   max 0.680 nats",
        "The loss to expect is only known of models from 50 M parameters on; this one has 5.8 M.",
        "94.27 %",
        "mean 0.99720   p1 0.98660",
        "11.83 MB → 5.95 MB (50.3 %), 4.85 bits per weight",
        "a text: 20,440 tokens in 40 windows of 512, on 2026-05-31",
    ):
        assert figure in text


@pytest.mark.parametrize(("method", "told"), [("gptq+rotate", True), ("rtn", False)])
def test_gptq_says_why_weights_err_more(make_report: MakeReport, method: str, told: bool) -> None:
    report = replace(make_report(), command=f"lowbit-convert a b --method {method}")
    for text in (rendered(report), render_html(report, None, "m")):
        assert ("gptq trades them for smaller" in " ".join(text.split())) == told


def test_drafts(make_report: MakeReport, extras: dict[str, Any]) -> None:
    text = rendered(make_report(drafting=extras["drafting"]))
    assert (
        "first 83 %, second 61 % right; 2.34 tokens a round (original 2.37, from 1,000 tokens 2.29)"
        in text
    )
    alone = replace(extras["drafting"], original=(), few=())
    assert "(original" not in rendered(make_report(drafting=alone))
    assert "drafts of MTP" not in rendered(make_report())


def test_noise_and_outputs(
    make_report: MakeReport, make_row: Callable[..., WeightQuality], extras: dict[str, Any]
) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", output=0.0412), make_row("lm_head", 8))
    text = rendered(make_report(rows, **extras))
    assert "mean 0.000300   p99 0.00210 nats" in text
    (up,) = (line for line in text.splitlines() if "up_proj" in line)
    assert " ".join(up.split()) == "up_proj INT4 g128 1 4.12 % 10.00 % 10.00 % 1.00 %"
    (head,) = (line for line in text.splitlines() if "lm_head" in line)
    assert "\N{EN DASH}" in head


def test_reasons_are_printed(make_report: MakeReport, extras: dict[str, Any]) -> None:
    first, maths = extras["kinds"]
    extras["kinds"] = (first, replace(maths, kl_mean=0.2, top1_agreement=0.8))
    text = " ".join(rendered(make_report(**extras)).split())
    assert "Degraded: mean KL 0.0180 ± 0.0004 nats per token, but the mean KL on maths is" in text
    assert "On maths another token ranks first in 20.00 % of the predictions (degraded" in text


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"perplexity_original": 3481.7}, "Not judged: the original itself cannot read a text"),
        (
            {"windows": 2, "scored_tokens": 1022, "kl_error": None},
            "Not judged: a verdict takes 4,088",
        ),
    ],
)
def test_a_missing_verdict_has_a_hint(
    make_report: MakeReport, figures: dict[str, Any], words: str
) -> None:
    text = " ".join(rendered(make_report(**figures)).split())
    assert words in text
    assert "--eval-text FILE" in text
    assert "As expected" not in text


def test_stays_short_with_many_linears(
    make_report: MakeReport, make_row: Callable[..., WeightQuality]
) -> None:
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    rows = tuple(make_row(f"model.layers.{n}.x.{kind}") for n in range(64) for kind in kinds)
    text = rendered(make_report(rows))
    assert len(text.splitlines()) < 40
    assert "down_proj" in text


def test_only_weights(make_report: MakeReport) -> None:
    text = rendered(make_report(measured=False))
    assert "Not judged" in text
    assert "perplexity" not in text
    assert "v_proj" in text


def test_unknown_source_size(make_report: MakeReport) -> None:
    report = replace(make_report(), sizes=Sizes(1_500_000_000, None, 4.1))
    assert "1.50 GB, 4.10 bits per weight" in rendered(report)


@pytest.mark.parametrize("name", ["[bold]x[/]", "[/nonsense]", "a\\[b"])
def test_names_are_not_markup(
    make_report: MakeReport, make_row: Callable[..., WeightQuality], name: str
) -> None:
    text = rendered(make_report((make_row(name), make_row("y")), text_name=name))
    assert f"{name}: 20,440" in text


def test_narrow_terminal_keeps_figures(make_report: MakeReport) -> None:
    text = rendered(make_report(), width=60)
    assert "0.0180" in text
    assert max(len(line) for line in text.splitlines()) <= 60
