"""Warnings about a report: sentences on noise, outliers, clipping and perplexity."""

from dataclasses import replace

import pytest

from lowbit.convert.measure.record import Flip, Noise, TextKind
from lowbit.convert.quantize.store import LayerError
from lowbit.convert.report.reporting import held_out_excess
from lowbit.convert.report.warnings import noise_in_words, warnings_of
from lowbit.convert.texts.evaluation import default_texts
from tests.convert.report.samples import LOGITS, linear, make_report


def test_noise_in_words() -> None:
    assert noise_in_words(LOGITS) == ""
    near = replace(LOGITS, kl_mean=0.0004, noise=Noise(0.0003, 0.001, 0.99))
    assert noise_in_words(near) == (
        "BF16 arithmetic alone moves the original by 0.000300 and changes 1.00 % of its top tokens."
    )
    far = replace(near, kl_mean=0.018)
    assert noise_in_words(far).endswith("; packing moves it 60 times as far.")
    assert noise_in_words(replace(far, noise=Noise(0.0, 0.0, 1.0))).endswith("top tokens.")


def test_nothing_to_say_about_a_good_file() -> None:
    assert warnings_of(make_report()) == []


@pytest.mark.parametrize(("bits", "cure"), [(4, "more bits"), (8, "or weights as stored")])
def test_outliers_are_found_among_equal_bits(bits: int, cure: str) -> None:
    rows = [linear(f"model.layers.{n}.mlp.up_proj", bits, 0.1) for n in range(9)]
    rows += [linear("model.layers.9.mlp.down_proj", bits, 0.3), linear("lm_head", 12 - bits, 0.006)]
    (sentence,) = warnings_of(make_report(tuple(rows)))
    assert sentence.startswith("model.layers.9.mlp.down_proj: relative error 30.00 %")
    assert sentence.endswith(f"{cure} there may pay.")


def test_clipping_and_lower_perplexity() -> None:
    rows = (linear("model.layers.0.mlp.up_proj", clipped=0.2),)
    found = warnings_of(make_report(rows, perplexity_packed=3.28))
    assert len(found) == 2
    assert "20.00 % of the weights are clipped" in found[0]
    assert "lower than the original" in found[1]


def flip(kind: str) -> Flip:
    return Flip(kind, "before", "a", "b", "c", 0.6, 0.2, 2.3)


def test_warnings_name_quotes_of_user_texts() -> None:
    (sentence,) = warnings_of(make_report(flips=(flip("notes.txt"), flip("notes.txt"))))
    assert "quote 2 passages of notes.txt, of up to 80 characters each" in sentence
    assert "before you publish" in sentence
    assert warnings_of(make_report(flips=())) == []


@pytest.mark.parametrize("first", [0, 1, 2])
def test_warnings_skip_quotes_of_bundled_texts(first: int) -> None:
    texts = default_texts()
    flips = tuple(flip(text.name) for text in texts)
    kinds = tuple(TextKind(t.name, t.sha256, 5110, 6.5, 6.6, 0.02, 0.95, 0.2) for t in texts)
    sha256 = texts[first].sha256
    assert warnings_of(make_report(text_sha256=sha256, kinds=kinds, flips=flips)) == []
    assert warnings_of(make_report(text_sha256=sha256, flips=flips[:1])) == []
    # A text of the user's own may have the name of a bundled one.
    own = (*kinds[:2], replace(kinds[2], sha256="ef" * 32))
    (sentence,) = warnings_of(make_report(text_sha256=sha256, kinds=own, flips=flips))
    assert "quote a passage of code," in sentence


def test_overfitting_is_told_from_the_errors_of_all_layers() -> None:
    """Layers count by their errors; those whose learned error is not known do not."""

    def excess(*rows: tuple[float, float | None]) -> float | None:
        return held_out_excess([LayerError(0, 0.2, chosen, seen) for chosen, seen in rows])

    assert excess((0.3, 0.2), (0.3, 0.2), (0.9, None)) == pytest.approx(0.5)
    assert excess((0.3, None)) is None
    assert excess((0.0, 0.0)) is None
    (sentence,) = warnings_of(replace(make_report(), held_out_excess=0.4))
    assert "40% above" in sentence
    assert "--calib-samples" in sentence
    for little in (None, 0.1):
        assert warnings_of(replace(make_report(), held_out_excess=little)) == []
