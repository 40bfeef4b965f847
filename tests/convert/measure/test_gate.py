"""Gates: what parses, what is refused, and what a report's figures say of it."""

from dataclasses import replace

import pytest

from lowbit.convert.measure.gate import (
    check_measured,
    check_tower,
    evaluate,
    gate_json,
    parse_gate,
)
from lowbit.convert.measure.record import LongQuality, QualityReport, Sizes, TextKind
from lowbit.formats.errors import RequestError
from tests.convert.report.samples import IMAGES, LOGITS


def test_pictures(report: QualityReport) -> None:
    gate = parse_gate("image_kl<0.02")
    (outcome,) = evaluate(gate, report)
    assert (outcome.met, outcome.reason) == (
        False,
        "a vision tower is missing, or could not be run",
    )
    assert report.logits is not None
    seeing = replace(report, logits=replace(report.logits, images=IMAGES))
    (outcome,) = evaluate(gate, seeing)
    assert (outcome.met, outcome.found) == (True, 0.0123)
    (outcome,) = evaluate(gate, replace(report, logits=None))
    assert outcome.reason == "the logits were not measured"
    with pytest.raises(RequestError, match="`image_kl` is no figure of the text `maths`"):
        parse_gate("maths.image_kl<1")


@pytest.fixture
def report() -> QualityReport:
    kinds = (
        TextKind("prose", "ab", 5110, 10.0, 10.2, 0.02, 0.96, 0.2, 0.0007),
        TextKind("notes.txt", "cd", 511, 20.0, 19.0, 0.05, 0.91, 0.5),
    )
    logits = replace(
        LOGITS,
        perplexity_original=10.0,
        perplexity_packed=10.2,
        kl_mean=0.02,
        kl_error=0.0007,
        kl_p95=0.08,
        kl_p99=0.2,
        kl_max=1.5,
        cosine_mean=0.997,
        top1_agreement=0.96,
        kinds=kinds,
    )
    return QualityReport(
        "0.1.0", None, Sizes(1, 2, 4.5), (), logits, "2026-05-31", "qwen3", 5_801_216
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kl_mean<0.03", 0.02),
        ("kl_stderr<0.001", 0.0007),
        ("prose.kl_p99<0.3", 0.2),
        ("prose.kl_stderr<=0.0007", 0.0007),
        ("kl_p95<=0.08", 0.08),
        ("kl_p99 <= .2", 0.2),
        ("kl_max>1", 1.5),
        ("top1>=0.96", 0.96),
        ("ppl_change<2.1e-2", 0.02),
        ("cosine>0.99", 0.997),
        ("bits_per_weight<5", 4.5),
        ("notes.txt.kl_mean<0.06", 0.05),
        ("notes.txt.ppl_change<0", -0.05),
        ("prose.top1>0.9", 0.96),
    ],
)
def test_every_figure(report: QualityReport, text: str, found: float) -> None:
    (outcome,) = evaluate(parse_gate(text), report)
    assert outcome.met
    assert outcome.found == pytest.approx(found)


@pytest.mark.parametrize(
    "text", ["kl_mean<0.02", "kl_mean>0.02", "top1>=0.97", "kl_max<=1.4", "bits_per_weight>4.5"]
)
def test_missed(report: QualityReport, text: str) -> None:
    assert [outcome.met for outcome in evaluate(parse_gate(text), report)] == [False]


def test_every_condition_counts_and_is_told(report: QualityReport) -> None:
    result = evaluate(
        parse_gate(" kl_mean < 0.03 , notes.txt.top1>0.95,bits_per_weight<=4.5"), report
    )
    assert gate_json(result) == {
        "passed": False,
        "conditions": [
            {"condition": "kl_mean<0.03", "found": 0.02, "met": True},
            {"condition": "notes.txt.top1>0.95", "found": 0.91, "met": False},
            {"condition": "bits_per_weight<=4.5", "found": 4.5, "met": True},
        ],
    }
    assert gate_json(evaluate((), report)) == {"passed": True, "conditions": []}


def test_an_infinite_figure_misses_and_is_null(report: QualityReport) -> None:
    assert report.logits is not None
    endless = replace(report, logits=replace(report.logits, kl_max=float("inf")))
    result = evaluate(parse_gate("kl_max<100"), endless)
    assert gate_json(result)["conditions"] == [
        {"condition": "kl_max<100", "found": None, "met": False}
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`` is not a condition; write it like kl_mean<0.03"),
        ("kl_mean", "`kl_mean` is not a condition"),
        ("kl_mean=0.03", "is not a condition"),
        ("kl_mean<", "is not a condition"),
        ("kl_mean<0.03,", "`` is not a condition"),
        ("kl_mean<0.03 top1>0.9", "is no figure|is not a"),
        ("kl<0.03", "`kl` is no figure; figures are kl_mean, kl_stderr, kl_p95, kl_p99, kl_max, "),
        (
            "maths.kl_p95<1",
            "of the text `maths`; figures are kl_mean, kl_stderr, kl_p99, top1, ppl_",
        ),
        ("kl_mean<nan", "`nan` is not a number"),
        ("kl_mean<inf", "`inf` is not a number"),
        ("top1>95%", "`95%` is not a number"),
    ],
)
def test_what_is_no_gate(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_gate(text)


def test_texts_that_are_not_evaluated(report: QualityReport) -> None:
    conditions = parse_gate("maths.kl_mean<1")
    check_measured(conditions, ["prose", "maths"], long=False)
    with pytest.raises(RequestError, match="no evaluation text is named `maths`; there is prose"):
        check_measured(conditions, ["prose"], long=False)
    (outcome,) = evaluate(conditions, report)
    assert not outcome.met
    assert outcome.reason == "no text of that name was evaluated"


def test_long_texts_that_are_not_measured() -> None:
    for text in ("long_kl<1", "cache_kl<1"):
        conditions = parse_gate(text)
        check_measured(conditions, ["prose"], long=True)
        with pytest.raises(RequestError, match=f"`{text}`: only `report --long` measures"):
            check_measured(conditions, ["prose"], long=False)


def test_pictures_that_are_not_shown() -> None:
    conditions = parse_gate("kl_mean<1,image_kl<0.5")
    check_tower(conditions, has_tower=True)
    check_tower(conditions[:1], has_tower=False)
    with pytest.raises(RequestError, match=r"`image_kl<0\.5`: the packed model has no vision"):
        check_tower(conditions, has_tower=False)


def test_a_single_text_has_the_headline_figures(report: QualityReport) -> None:
    assert report.logits is not None
    single = replace(report, logits=replace(report.logits, kinds=(), text_name="notes.txt"))
    result = evaluate(parse_gate("notes.txt.kl_mean<0.03"), single)
    assert result[0].found == 0.02


def test_a_figure_that_is_not_known_is_no_figure(report: QualityReport) -> None:
    assert report.logits is not None
    few = replace(report, logits=replace(report.logits, kl_error=None))
    for condition in ("kl_stderr<1", "notes.txt.kl_stderr<1"):
        result = evaluate(parse_gate(condition), few)
        (row,) = gate_json(result)["conditions"]
        assert (row["found"], row["met"]) == (None, False)
        assert "was not measured, or on too few windows" in row["reason"]


def test_without_logits_only_the_size_is_known(report: QualityReport) -> None:
    bare = replace(report, logits=None)
    assert evaluate(parse_gate("bits_per_weight<5"), bare)[0].met
    (outcome,) = evaluate(parse_gate("kl_mean<1"), bare)
    assert (outcome.met, outcome.reason) == (False, "the logits were not measured")


def test_figures_of_long_texts(report: QualityReport) -> None:
    gate = parse_gate("long_kl<0.04,cache_kl<0.0003")
    for outcome in evaluate(gate, report):
        assert (outcome.met, outcome.found) == (False, None)
        assert outcome.reason == "which `report --long` measures"
    long = LongQuality(2048, 1, 0.03, 0.0004, (), (), ())
    outcomes = evaluate(gate, replace(report, long=long))
    assert [(outcome.met, outcome.found) for outcome in outcomes] == [(True, 0.03), (False, 0.0004)]
    with pytest.raises(RequestError, match="`cache_kl` is no figure of the text `prose`"):
        parse_gate("prose.cache_kl<1")
