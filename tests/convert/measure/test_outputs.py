"""Output errors of linears, with FP64 arithmetic as the oracle."""

import math

import pytest
import torch

from lowbit.convert.measure.logits import output_error, recorded_linears, squares


@torch.no_grad()
def test_equal_to_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.nn.Linear(96, 64), torch.nn.Linear(64, 32, bias=False)
    layer = torch.nn.Sequential(first, torch.nn.Tanh(), second)
    packed = torch.nn.Linear(64, 32, bias=False)
    packed.weight.copy_(
        second.weight + 0.01 * torch.randn(second.weight.shape, generator=generator)
    )
    batches = [torch.randn(5, 96, generator=generator) for _ in range(3)]
    with recorded_linears(layer) as calls:
        for x in batches:
            layer(x)
    layer(batches[0])  # no longer recorded
    assert {name: len(made) for name, made in calls.items()} == {"0": 3, "2": 3}
    found = output_error(squares(packed, calls["2"]))
    hidden = torch.cat([first(x).tanh() for x in batches]).double()
    exact, other = second.weight.double(), packed.weight.double()
    expected = (hidden @ (exact - other).T).norm() / (hidden @ exact.T).norm()
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert output_error(squares(packed, calls["2"][::-1])) == found  # threads record in any order


@torch.no_grad()
def test_a_linear_that_gives_nothing() -> None:
    zero, one = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    zero.weight.data.zero_()
    calls = [(torch.ones(2, 4), torch.zeros(2, 4))]
    assert output_error(squares(zero, calls)) == 0.0
    assert output_error(squares(one, calls)) == math.inf
