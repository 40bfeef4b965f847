"""Packed linears by kind, layer and error."""

import pytest

from lowbit.convert.report.linears import kinds, layer_of, main_bits, worst
from tests.convert.report.samples import linear, make_report


def test_most_weights_decide_the_bits() -> None:
    report = make_report()
    assert {row.bits for row in report.weights} == {4, 8}
    assert main_bits(report.weights) == 4
    assert main_bits(()) is None


def test_kinds_join_layers_and_part_schemes() -> None:
    rows = (
        linear("model.layers.0.mlp.up_proj", 4, 0.10),
        linear("model.layers.1.mlp.up_proj", 8, 0.01),
        linear("model.language_model.layers.10.mlp.up_proj", 4, 0.12),
        linear("lm_head", 8),
    )
    found = kinds(rows)
    assert [(kind.name, kind.scheme, len(kind.rows)) for kind in found] == [
        ("up_proj", "INT4 g128", 2),
        ("up_proj", "INT8 g128", 1),
        ("lm_head", "INT8 g128", 1),
    ]
    assert found[0].mean_error == pytest.approx(0.11)
    assert found[0].worst is rows[2]


def test_worst_come_first() -> None:
    rows = tuple(linear(str(n), error=n / 100) for n in (3, 9, 1, 7))
    assert [row.name for row in worst(rows, 2)] == ["9", "7"]


def test_worst_outputs_come_first() -> None:
    rows = (linear("a", error=0.9), linear("b", output=0.1), linear("c", output=0.2))
    assert [row.name for row in worst(rows, 3, by_output=True)] == ["c", "b", "a"]
    (kind,) = kinds(tuple(linear(f"layers.{n}.x.q", output=n / 10) for n in range(3)))
    assert kind.mean_output_error == pytest.approx(0.1)


def test_mtp_layers_are_no_layers_of_the_decoder() -> None:
    assert layer_of("mtp.layers.0.self_attn.q_proj") == (None, "mtp.q_proj")
    assert layer_of("mtp.fc") == (None, "mtp.fc")
    assert layer_of("model.language_model.layers.7.linear_attn.out_proj") == (7, "out_proj")
