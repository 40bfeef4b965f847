"""Figures as text: fixed decimals for each kind of figure, and no negative zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert.report import formatting


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (0.0206, "+2.06 %"),
        (-0.000366, "-0.04 %"),
        (0.00099, "+0.10 %"),
        (-0.00001, "+0.00 %"),
        (0.0, "+0.00 %"),
        (-0.5, "-50.00 %"),
        (12.3456, "+1,234.56 %"),
        (math.inf, "+∞"),
    ],
)
def test_changes(ratio: float, shown: str) -> None:
    assert formatting.signed(ratio) == shown


@given(st.floats(-0.999, 1e6))
def test_changes_have_two_decimals(ratio: float) -> None:
    sign, figure = formatting.signed(ratio)[0], formatting.signed(ratio)[1:].removesuffix(" %")
    assert len(figure.partition(".")[2]) == 2
    rounded = float(figure.replace(",", ""))
    assert rounded == pytest.approx(abs(100 * ratio), abs=0.0051)
    assert (sign == "-") == (ratio < 0 and rounded > 0)


@given(st.floats(-1.0, 1.0))
def test_cosines_have_five_decimals(value: float) -> None:
    assert len(formatting.cosine(value).partition(".")[2]) == 5


def test_nan_cosine() -> None:
    assert formatting.cosine(math.nan) == "not finite"


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.018, 0.0003, "0.0180 ± 0.0003"),
        (0.018, None, "0.0180"),
        (0.018, 0.0, "0.0180"),
        (math.inf, 0.1, "∞"),
        (0.00009, 0.00001, "9.00e-05"),
    ],
)
def test_divergences(value: float, error: float | None, shown: str) -> None:
    assert formatting.kl_with_error(value, error) == shown


def test_counts() -> None:
    counts = [8_200_000_000, 596_000_000, 99_500_000, 99_400_000, 1000, 999]
    assert list(map(formatting.count, counts)) == ["8.2 B", "596 M", "100 M", "99 M", "1 k", "999"]
