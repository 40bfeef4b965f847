"""Damping chosen on windows held out, judged on inputs that neither choice has seen."""

import torch
from torch import Tensor

from lowbit.convert.calibrate.damping import DAMPINGS, fitting_factor
from lowbit.convert.calibrate.gptq import factorize
from lowbit.convert.calibrate.linear import gptq
from lowbit.convert.calibrate.moments import Moments, quieted
from lowbit.formats.layout.scheme import Scheme

K, SCHEME = 128, Scheme(4, 32)


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs from a quantized model and from its original, correlated and not quite the same."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=torch.Generator().manual_seed(1)) / K**0.5 + torch.eye(K)
    y = torch.randn(tokens, K, generator=generator) @ mix
    return y + 0.05 * torch.randn(tokens, K, generator=generator), y


def moments(x: Tensor, y: Tensor) -> Moments:
    return Moments(x.T @ x / len(x), y.T @ x / len(x))


def error(w: Tensor, tokens: int, damping: float | None) -> tuple[float, float]:
    """The damping used, and the mean square error on fresh inputs, in FP64."""
    learned, held = moments(*inputs(tokens, 2)), moments(*inputs(512, 3))
    if damping is None:
        factor = fitting_factor(w, SCHEME, "signed", learned, held)
    else:
        factor = factorize(learned.damped(damping))
    found = gptq(w, SCHEME, "signed", learned, factor).weight.double()
    x, y = (part.double() for part in inputs(4096, 4))
    used = float((factor.H - learned.H).diagonal().mean() / learned.H.diagonal().mean())
    return used, float((x @ found.T - y @ w.double().T).square().mean())


def test_short_texts_are_damped_more() -> None:
    w = torch.randn(64, K, generator=torch.Generator().manual_seed(0)) * 0.05
    short, after_short = error(w, 96, None)
    long, after_long = error(w, 8192, None)
    assert short > 2 * long
    assert after_short < 0.6 * error(w, 96, 0.01)[1]
    assert after_short < error(w, 96, DAMPINGS[0])[1]
    assert after_long < 1.1 * error(w, 8192, 0.01)[1]


def test_the_moments_tell_the_error_of_the_output() -> None:
    x, y = inputs(1000, 5)
    w, found = torch.randn(2, 16, K, generator=torch.Generator().manual_seed(6))
    wide = [tensor.double() for tensor in (x, y, w, found)]
    square = (wide[0] @ wide[3].T - wide[1] @ wide[2].T).square().sum() / 1000
    constant = (wide[1] @ wide[2].T).square().sum() / 1000
    told = moments(x, y).error(w, found)
    torch.testing.assert_close(told, float(square - constant), rtol=1e-4, atol=1e-3)


def test_nothing_held_out() -> None:
    w = torch.randn(8, K)
    learned = moments(*inputs(512, 7))
    expected = factorize(learned.damped(DAMPINGS[0]))
    assert torch.equal(fitting_factor(w, SCHEME, "signed", learned, None).U, expected.U)


def test_no_token_is_louder_than_the_median() -> None:
    x = torch.randn(101, K, generator=torch.Generator().manual_seed(8))
    x[0] *= 1000
    x[1] = 0
    power = (x * quieted(x)).square().sum(1)
    torch.testing.assert_close(power.max(), x.square().sum(1).median())
    below = x.square().sum(1) < power.max()
    assert torch.equal(x[below], (x * quieted(x))[below])
