"""The report in a terminal: the headline first, readable with hundreds of linears."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lowbit.convert.quality.record import QualityReport, Sizes
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.terminal import render_terminal

MakeReport = Callable[..., QualityReport]


def rendered(report: QualityReport, width: int = 120) -> str:
    out = io.StringIO()
    render_terminal(Console(file=out, width=width), report)
    return out.getvalue()


def test_headline(make_report: MakeReport) -> None:
    text = rendered(make_report())
    first = text.splitlines()[0]
    assert "Within guidance: mean KL 0.0180 nats per token" in first
    for figure in (
        "3.286 → 3.354   +2.07 % ± 0.08",
        "mean 0.0180   p95 0.0700   p99 0.130   max 0.680 nats",
        "94.27 %",
        "mean 0.99720   p1 0.98660",
        "11.83 MB → 5.95 MB (50.3 %), 4.85 bits per weight",
        "a text: 20,440 tokens in 40 windows of 512",
    ):
        assert figure in text


def test_noise_and_outputs(
    make_report: MakeReport, make_row: Callable[..., WeightQuality], extras: dict[str, Any]
) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", output=0.0412), make_row("lm_head", 8))
    text = rendered(make_report(rows, **extras))
    assert "mean 0.000300   p99 0.00210 nats" in text
    (up,) = (line for line in text.splitlines() if "up_proj" in line)
    assert " ".join(up.split()) == "up_proj INT4 g128 1 4.12 % 10.00 % 10.00 % 20.0 dB 1.00 %"
    (head,) = (line for line in text.splitlines() if "lm_head" in line)
    assert "\N{EN DASH}" in head


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


def test_source_size_not_known(make_report: MakeReport) -> None:
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
