"""Scheme: refusals, number of scales in a row, short form."""

import pytest

from lowbit.formats.errors import FormatError, LowbitError, QuantizationError
from lowbit.formats.layout.scheme import GROUP_SIZES, Scheme, fitting_group_size


@pytest.mark.parametrize("bits", range(2, 9))
def test_code_range(bits: int) -> None:
    scheme = Scheme(bits)
    assert scheme.code_max - scheme.code_min == 2**bits - 1
    assert scheme.code_min == -scheme.code_max - 1


@pytest.mark.parametrize("bits", [-4, 0, 1, 9, 16])
def test_bits_are_2_to_8(bits: int) -> None:
    with pytest.raises(FormatError, match=f"2 to 8, got {bits}"):
        Scheme(bits)


@pytest.mark.parametrize("group_size", [0, -1, -128])
def test_group_size_is_positive(group_size: int) -> None:
    with pytest.raises(FormatError, match=f"positive, got {group_size}"):
        Scheme(4, group_size)


def test_groups_of_a_row() -> None:
    assert Scheme(4, 128).groups("x", 1024) == 8
    assert Scheme(4, None).groups("x", 1001) == 1


def test_group_size_that_does_not_divide_names_the_ones_that_do() -> None:
    with pytest.raises(QuantizationError) as error:
        Scheme(4, 128).groups("model.layers.3.mlp.up_proj", 960)
    assert str(error.value) == (
        "`model.layers.3.mlp.up_proj`: group size 128 does not divide K = 960"
    )
    assert error.value.hint == "use --group-size with one of [32, 64] or `row`"
    with pytest.raises(QuantizationError) as error:
        Scheme(4, 128).groups("x", 1001)
    assert error.value.hint == "leave it as stored: --bits 'x=16'"


@pytest.mark.parametrize(
    ("K", "wanted", "fitting"),
    [
        (1536, 128, 128),
        (576, 128, 64),
        (576, 512, 64),
        (896, 256, 128),
        (960, 128, 64),
        (96, 64, 32),
        (1024, None, None),
        (1001, None, None),
    ],
)
def test_fitting_group_size(K: int, wanted: int | None, fitting: int | None) -> None:
    assert fitting_group_size(K, wanted) == fitting


@pytest.mark.parametrize("wanted", GROUP_SIZES)
def test_a_fitting_group_size_is_never_above_the_wanted_one(wanted: int) -> None:
    for K in range(32, 2048, 32):
        fitting = fitting_group_size(K, wanted)
        assert fitting is not None
        divisors = [size for size in GROUP_SIZES if size <= wanted and K % size == 0]
        assert fitting == divisors[-1]


def test_no_fitting_group_size_leaves_the_refusal_to_the_scheme() -> None:
    assert fitting_group_size(1001, 128) == 128
    assert fitting_group_size(576 + 16, 32) == 32
    with pytest.raises(QuantizationError, match="`x`: group size 128 does not divide K = 1001"):
        Scheme(4, fitting_group_size(1001, 128)).groups("x", 1001)


def test_prints_short() -> None:
    assert str(Scheme(4)) == "INT4 g128"
    assert str(Scheme(8, None)) == "INT8 row"
    assert str(Scheme(3, 32, symmetric=False)) == "INT3 g32 asym"


def test_errors_are_one_family() -> None:
    error = LowbitError("what", hint="do this")
    assert str(error) == "what"
    assert error.hint == "do this"
    assert issubclass(QuantizationError, LowbitError)
