"""The report in a terminal: the headline first, readable with hundreds of linears."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lowbit.convert.measure.record import QualityReport, Sizes, UsedRecipe
from lowbit.convert.report.html import render_html
from lowbit.convert.report.terminal import render_terminal
from lowbit.convert.report.verdict import judge
from tests.convert.report.pages import numbers
from tests.convert.report.samples import linear, make_report


def rendered(report: QualityReport, width: int = 120) -> str:
    out = io.StringIO()
    render_terminal(Console(file=out, width=width), report)
    return out.getvalue()


def headline(report: QualityReport) -> dict[str, list[float]]:
    """Figures of each named line of the summary."""
    lines = (line.partition("  ") for line in rendered(report, 200).splitlines())
    return {name: numbers(rest) for name, _, rest in lines if name}


def test_headline() -> None:
    report = make_report()
    found = headline(report)
    assert f"{judge(report).title}: {judge(report).reason}" in rendered(report, 200)
    assert found["perplexity"] == [3.286, 3.354, 2.07, 0.08]
    assert found["KL divergence"][:2] + found["KL divergence"][3::2] == [0.018, 0.0004, 0.07, 0.13]
    assert found["same top token"] == [94.27]
    assert found["logit cosine"] == [0.9972, 1, 0.9866]
    assert found["size"] == [11.83, 5.95, 50.3, 4.85]
    assert found["measured on"][:3] == [20440, 40, 512]


@pytest.mark.parametrize(("method", "told"), [("gptq+rotate", True), ("rtn", False)])
def test_gptq_says_why_weights_err_more(method: str, told: bool) -> None:
    report = replace(make_report(), recipe=UsedRecipe("int4", method, 128, 0))
    for text in (rendered(report), render_html(report, None, "m")):
        assert ("gptq trades them for smaller" in " ".join(text.split())) == told


def test_drafts(extras: dict[str, Any]) -> None:
    name = "drafts of MTP"
    found = headline(make_report(drafting=extras["drafting"]))
    assert found[name] == [83, 61, 2.34, 2.37, 1000, 2.29]
    alone = replace(extras["drafting"], original=(), draft_head=())
    assert headline(make_report(drafting=alone))[name] == [83, 61, 2.34]
    assert name not in headline(make_report())


def test_inputs_in_eight_bits(extras: dict[str, Any]) -> None:
    report = make_report(kinds=extras["kinds"], int8_inputs=extras["int8_inputs"])
    expected = [0.0204, 0.0005, 0.0024, 0.0001, 3.36, 2.25, 94.01]
    assert [abs(figure) for figure in headline(report)["INT8 inputs"]] == expected
    text = "usable, mean KL 0.0204 ± 0.0005 nats per token, 0.0024 ± 0.0001 more."
    assert f"With inputs in eight bits, by --activations int8: {text}" in rendered(report, 200)


def test_noise_and_outputs(extras: dict[str, Any]) -> None:
    rows = (linear("model.layers.0.mlp.up_proj", output=0.0412), linear("lm_head", 8))
    report = make_report(rows, **extras)
    assert headline(report)["BF16 alone"] == [0.0003, 99, 0.0021]
    text = rendered(report)
    (up,) = (line for line in text.splitlines() if "up_proj" in line)
    assert " ".join(up.split()) == "up_proj INT4 g128 1 4.12 % 10.00 % 10.00 % 1.00 %"
    (head,) = (line for line in text.splitlines() if "lm_head" in line)
    assert "\N{EN DASH}" in head


def test_reasons_are_printed(extras: dict[str, Any]) -> None:
    first, maths = extras["kinds"]
    extras["kinds"] = (first, replace(maths, kl_mean=0.2, top1_agreement=0.8))
    report = make_report(**extras)
    lines = [line.strip() for line in rendered(report, 200).splitlines()]
    verdict = judge(report)
    assert verdict.notes
    assert set(verdict.notes) | set(verdict.next_steps[1:]) <= set(lines)
    (first,) = (line for line in lines if line.startswith("to try "))
    assert first.endswith(verdict.next_steps[0])


def test_a_missing_verdict_has_a_hint() -> None:
    report = make_report(windows=2, scored_tokens=1022, kl_error=None)
    text = " ".join(rendered(report).split())
    assert judge(report).reason in text
    assert f"hint {judge(report).hint}" in text


def test_stays_short_with_many_linears() -> None:
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    rows = tuple(linear(f"model.layers.{n}.x.{kind}") for n in range(64) for kind in kinds)
    text = rendered(make_report(rows))
    assert len(text.splitlines()) < 40
    assert "down_proj" in text


def test_only_weights() -> None:
    text = rendered(make_report(measured=False))
    assert "Not judged" in text
    assert "perplexity" not in text
    assert "v_proj" in text


def test_unknown_source_size() -> None:
    report = replace(make_report(), sizes=Sizes(1_500_000_000, None, 4.1))
    assert "1.50 GB, 4.10 bits per weight" in rendered(report)


def test_the_vision_tower_is_named() -> None:
    kept = replace(make_report().sizes, vision_bytes=921_460_000, vision_dtypes="BF16")
    lines = rendered(replace(make_report(), sizes=kept)).splitlines()
    assert "vision tower    921.46 MB, not quantized (BF16)" in [line.rstrip() for line in lines]
    dropped = replace(make_report().sizes, vision_dropped=921_460_000)
    text = rendered(replace(make_report(), sizes=dropped))
    assert "left out (--drop-vision), 921.46 MB: text only" in text
    assert "vision tower" not in rendered(make_report())


@pytest.mark.parametrize("name", ["[bold]x[/]", "[/nonsense]", "a\\[b"])
def test_names_are_not_markup(name: str) -> None:
    text = rendered(make_report((linear(name), linear("y")), text_name=name))
    assert f"{name}: 20,440" in text


def test_narrow_terminal_keeps_figures() -> None:
    text = rendered(make_report(), width=60)
    assert "0.0180" in text
    assert max(len(line) for line in text.splitlines()) <= 60
