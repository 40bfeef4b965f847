"""What the figures are said to mean."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lowbit.convert.quality.record import LogitQuality, Noise, QualityReport
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.verdict import (
    judge,
    kinds,
    layer_of,
    main_bits,
    noise_in_words,
    observations,
    worst,
)

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]


@pytest.mark.parametrize(
    ("bits", "kl", "level"),
    [
        (4, 0.03, "good"),
        (4, 0.031, "caution"),
        (4, 0.061, "bad"),
        (8, 0.003, "good"),
        (8, 0.004, "caution"),
        (8, 0.02, "bad"),
        (3, 0.03, "good"),
        (2, 0.2, "bad"),
        (6, 0.001, "unknown"),
    ],
)
def test_level(
    make_report: MakeReport, make_row: MakeRow, bits: int, kl: float, level: str
) -> None:
    report = make_report((make_row("model.layers.0.mlp.up_proj", bits),), kl_mean=kl)
    assert judge(report).level == level


def test_without_logits_nothing_is_judged(make_report: MakeReport) -> None:
    verdict = judge(make_report(measured=False))
    assert verdict.level == "unknown"
    assert "not measured" in verdict.reason


def test_fewer_bits_are_held_to_the_measure_of_four(
    make_report: MakeReport, make_row: MakeRow
) -> None:
    report = make_report((make_row("x", 3),), kl_mean=0.05)
    assert judge(report).reason == (
        "mean KL 0.0500 nats per token, while good 4-bit files stay below 0.03"
    )


def test_noise_in_words(logits: LogitQuality) -> None:
    assert noise_in_words(logits) == ""
    near = replace(logits, kl_mean=0.0004, noise=Noise(0.0003, 0.001, 0.99))
    assert noise_in_words(near) == (
        "BF16 arithmetic alone moves the original by 0.000300 and changes 1.00 % of its top tokens."
    )
    far = replace(near, kl_mean=0.018)
    assert noise_in_words(far).endswith("; packing moves it 60 times as far.")
    assert noise_in_words(replace(far, noise=Noise(0.0, 0.0, 1.0))).endswith("top tokens.")


def test_most_weights_decide_the_guidance(make_report: MakeReport) -> None:
    report = make_report()
    assert {row.bits for row in report.weights} == {4, 8}
    assert main_bits(report.weights) == 4
    assert main_bits(()) is None


def test_kinds_join_layers_and_part_schemes(make_row: MakeRow) -> None:
    rows = (
        make_row("model.layers.0.mlp.up_proj", 4, 0.10),
        make_row("model.layers.1.mlp.up_proj", 8, 0.01),
        make_row("model.language_model.layers.10.mlp.up_proj", 4, 0.12),
        make_row("lm_head", 8),
    )
    found = kinds(rows)
    assert [(kind.name, kind.scheme, len(kind.rows)) for kind in found] == [
        ("up_proj", "INT4 g128", 2),
        ("up_proj", "INT8 g128", 1),
        ("lm_head", "INT8 g128", 1),
    ]
    assert found[0].mean_error == pytest.approx(0.11)
    assert found[0].worst is rows[2]


def test_worst_come_first(make_row: MakeRow) -> None:
    rows = tuple(make_row(str(n), error=n / 100) for n in (3, 9, 1, 7))
    assert [row.name for row in worst(rows, 2)] == ["9", "7"]


def test_worst_outputs_come_first(make_row: MakeRow) -> None:
    rows = (make_row("a", error=0.9), make_row("b", output=0.1), make_row("c", output=0.2))
    assert [row.name for row in worst(rows, 3, by_output=True)] == ["c", "b", "a"]
    (kind,) = kinds(tuple(make_row(f"layers.{n}.x.q", output=n / 10) for n in range(3)))
    assert kind.mean_output_error == pytest.approx(0.1)


def test_nothing_to_say_about_a_good_file(make_report: MakeReport) -> None:
    assert observations(make_report()) == []


def test_outliers_are_found_among_equal_bits(make_report: MakeReport, make_row: MakeRow) -> None:
    rows = [make_row(f"model.layers.{n}.mlp.up_proj", error=0.1) for n in range(9)]
    rows += [make_row("model.layers.9.mlp.down_proj", error=0.3), make_row("lm_head", 8, 0.006)]
    (sentence,) = observations(make_report(tuple(rows)))
    assert sentence.startswith("model.layers.9.mlp.down_proj: relative error 30.00 %")


def test_clipping_small_samples_and_lower_perplexity(
    make_report: MakeReport, make_row: MakeRow
) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", clipped=0.2),)
    found = observations(make_report(rows, scored_tokens=1022, perplexity_packed=3.28))
    assert len(found) == 3
    assert "20.00 % of the weights are clipped" in found[0]
    assert "Only 1,022 tokens" in found[1]
    assert "lower than the original" in found[2]


def test_mtp_layers_are_no_layers_of_the_decoder() -> None:
    assert layer_of("mtp.layers.0.self_attn.q_proj") == (None, "mtp.q_proj")
    assert layer_of("mtp.fc") == (None, "mtp.fc")
    assert layer_of("model.language_model.layers.7.linear_attn.out_proj") == (7, "out_proj")
