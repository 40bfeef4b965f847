"""Remarks about a report: sentences on noise, outliers, clipping and perplexity."""

from collections.abc import Callable
from dataclasses import replace

from lowbit.convert.quality.record import LogitQuality, Noise, QualityReport
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.remarks import noise_in_words, observations

MakeReport = Callable[..., QualityReport]
MakeRow = Callable[..., WeightQuality]


def test_noise_in_words(logits: LogitQuality) -> None:
    assert noise_in_words(logits) == ""
    near = replace(logits, kl_mean=0.0004, noise=Noise(0.0003, 0.001, 0.99))
    assert noise_in_words(near) == (
        "BF16 arithmetic alone moves the original by 0.000300 and changes 1.00 % of its top tokens."
    )
    far = replace(near, kl_mean=0.018)
    assert noise_in_words(far).endswith("; packing moves it 60 times as far.")
    assert noise_in_words(replace(far, noise=Noise(0.0, 0.0, 1.0))).endswith("top tokens.")


def test_nothing_to_say_about_a_good_file(make_report: MakeReport) -> None:
    assert observations(make_report()) == []


def test_outliers_are_found_among_equal_bits(make_report: MakeReport, make_row: MakeRow) -> None:
    rows = [make_row(f"model.layers.{n}.mlp.up_proj", error=0.1) for n in range(9)]
    rows += [make_row("model.layers.9.mlp.down_proj", error=0.3), make_row("lm_head", 8, 0.006)]
    (sentence,) = observations(make_report(tuple(rows)))
    assert sentence.startswith("model.layers.9.mlp.down_proj: relative error 30.00 %")


def test_clipping_and_lower_perplexity(make_report: MakeReport, make_row: MakeRow) -> None:
    rows = (make_row("model.layers.0.mlp.up_proj", clipped=0.2),)
    found = observations(make_report(rows, perplexity_packed=3.28))
    assert len(found) == 2
    assert "20.00 % of the weights are clipped" in found[0]
    assert "lower than the original" in found[1]
