"""The method that `auto` stands for."""

import itertools

import pytest

from lowbit.convert.plan.choice_of_method import (
    GPTQ,
    LONGEST_SECONDS,
    WEIGHTED,
    WITH_EXPERTS,
    automatic_method,
    check_method,
    gain_of,
    methods,
)
from lowbit.convert.plan.method import RTN, Method
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import Scheme

ROTATED = Method("gptq", rotate=True)
INT4 = {"a": Scheme(4), "b": Scheme(8), "c": None}


@pytest.mark.parametrize(
    ("device", "operations", "cores", "method"),
    [
        ("cuda", 1e9, 1, ROTATED),
        ("cuda", 1e18, 1, ROTATED),
        ("cpu", 90e12, 2, ROTATED),  # 15 minutes of two cores
        ("cpu", 91e12, 2, WEIGHTED),
        ("cpu", 91e12, 3, ROTATED),
    ],
)
def test_few_bits_are_calibrated(
    device: str, operations: float, cores: int, method: Method
) -> None:
    assert LONGEST_SECONDS == 15 * 60
    assert automatic_method(INT4, device, operations, cores, rotatable=True) == method


def test_no_rotation_where_it_would_change_the_model() -> None:
    assert automatic_method(INT4, "cuda", 1.0, 1, rotatable=False) == GPTQ


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_eight_bits_are_not(device: str) -> None:
    assert automatic_method({"a": Scheme(8), "b": None}, device, 1.0, 1, rotatable=True) == RTN


@pytest.mark.parametrize("rotatable", [False, True])
def test_steps_lead_to_methods_that_are_estimated(rotatable: bool) -> None:
    shown = methods(rotatable)
    for method, better in itertools.pairwise(shown[:3] if rotatable else shown):
        gain = gain_of(method, rotatable)
        assert gain is not None
        assert gain.method == better
    assert gain_of(shown[-1], rotatable) is None


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    assert gain_of(ROTATED, rotatable=True) is None


def test_plain_gptq_is_told_of_rotation() -> None:
    gain = gain_of(GPTQ, rotatable=True)
    assert gain is not None
    assert gain.method == ROTATED


def test_mixtures_of_experts_have_methods_of_their_own() -> None:
    assert methods(rotatable=False, experts=True) == WITH_EXPERTS
    schemes = {"model.layers.0.mlp.experts.0.up_proj": Scheme(4, 128)}
    assert automatic_method(schemes, "cuda", 1.0, 1, False, experts=True) in WITH_EXPERTS
    assert gain_of(WITH_EXPERTS[-1], rotatable=False, experts=True) is None
    check_method(WITH_EXPERTS[-1], experts=True)
    check_method(Method.parse("gptq+autoround"), experts=False)
    with pytest.raises(QuantizationError, match=r"`gptq\+autoround` is not implemented for mix"):
        check_method(Method.parse("gptq+autoround"), experts=True)
