"""The method that `auto` stands for."""

import pytest

from lowbit.convert.plan.choice_of_method import (
    GAINS,
    GPTQ,
    LONGEST_SECONDS,
    METHODS,
    WEIGHTED,
    automatic_method,
)
from lowbit.convert.plan.method import RTN, Method
from lowbit.formats.layout.scheme import Scheme

INT4 = {"a": Scheme(4), "b": Scheme(8), "c": None}


@pytest.mark.parametrize(
    ("device", "minutes", "method"),
    [("cuda", 1, GPTQ), ("cuda", 600, GPTQ), ("cpu", 15, GPTQ), ("cpu", 16, WEIGHTED)],
)
def test_few_bits_are_calibrated(device: str, minutes: int, method: Method) -> None:
    assert LONGEST_SECONDS == 15 * 60
    assert automatic_method(INT4, device, 60.0 * minutes) == method


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_eight_bits_are_not(device: str) -> None:
    assert automatic_method({"a": Scheme(8), "b": None}, device, 1.0) == RTN


def test_every_step_leads_to_a_method_that_is_estimated() -> None:
    for method, gain in GAINS.items():
        assert METHODS.index(gain.method) == METHODS.index(method) + 1
        assert gain.words
        assert gain.evidence
