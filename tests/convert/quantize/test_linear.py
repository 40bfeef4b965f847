"""Damping chosen on windows held out, judged on inputs that neither choice has seen."""

import pytest
import torch
from torch import Tensor

from lowbit.convert.original import walk
from lowbit.convert.original.layer import Layer
from lowbit.convert.quantize import moments as calibrate_moments
from lowbit.convert.quantize.gptq import factorize
from lowbit.convert.quantize.linear import DAMPINGS, choose_damping, gptq
from lowbit.convert.quantize.moments import Moments, measure, token_norm_caps
from lowbit.convert.quantize.windows import WindowStates
from lowbit.formats.layout.scheme import Scheme

K, SCHEME = 128, Scheme(4, 32)
CPU = torch.device("cpu")


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
        factor = choose_damping(w, SCHEME, "signed", learned, held)
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
    assert torch.equal(choose_damping(w, SCHEME, "signed", learned, None).U, expected.U)


def test_no_token_is_louder_than_the_median() -> None:
    x = torch.randn(101, K, generator=torch.Generator().manual_seed(8))
    x[0] *= 1000
    x[1] = 0
    power = (x * token_norm_caps(x, 101)).square().sum(1)
    torch.testing.assert_close(power.max(), x.square().sum(1).median())
    below = x.square().sum(1) < power.max()
    assert torch.equal(x[below], (x * token_norm_caps(x, 101))[below])


def test_tokens_are_compared_with_those_around_them_alone() -> None:
    x = torch.randn(200, K, generator=torch.Generator().manual_seed(8))
    x[100:] *= 1000
    apart = torch.cat([token_norm_caps(x[:100], 100), token_norm_caps(x[100:], 100)])
    assert torch.equal(token_norm_caps(x, 100), apart)
    assert not torch.equal(token_norm_caps(x, 200), apart)


def one_linear() -> Layer:
    """A layer that is one linear."""
    module = torch.nn.ModuleDict({"proj": torch.nn.Linear(8, 8, bias=False)})
    module.forward = lambda hidden: module["proj"](hidden)
    return Layer(module, {})


@pytest.mark.parametrize("length", [384, 512, 2000, 4096, 10_000])
def test_moments_do_not_depend_on_the_batches_of_a_device(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is one linear, on batches as a CPU and as a GPU takes them."""
    own, generator = one_linear(), torch.Generator().manual_seed(3)
    hidden = torch.randn(24_000 // length + 1, length, 8, generator=generator)
    hidden *= torch.rand(len(hidden), 1, 1, generator=generator) * 100  # loud and quiet windows
    windows = WindowStates(hidden, hidden, len(hidden))
    expected, _ = measure(own, own, "proj", windows, CPU, None)
    on_gpu = walk.batches(hidden, torch.device("cuda"), walk.LEARNING_TOKENS)
    monkeypatch.setattr(calibrate_moments, "batches", lambda *_: on_gpu)
    found, _ = measure(own, own, "proj", windows, CPU, None)
    torch.testing.assert_close(found.H, expected.H, rtol=1e-4, atol=1e-3)
    assert sum(part.stop - part.start for part in on_gpu) == len(hidden)
    assert max(part.stop - part.start for part in on_gpu) * length <= max(8192, length)


def test_unchanged_inputs_are_passed_once() -> None:
    """They have the moments, and give the codes, that a copy of the layer's inputs has."""
    layer, generator = one_linear(), torch.Generator().manual_seed(4)
    hidden = torch.randn(8, 512, 8, generator=generator)
    once, _ = measure(layer, layer, "proj", WindowStates(hidden, hidden, 8), CPU, None)
    windows = WindowStates(hidden.clone(), hidden, 8)
    twice, _ = measure(layer, layer, "proj", windows, CPU, None)
    other, _ = measure(layer, one_linear(), "proj", WindowStates(hidden, hidden, 8), CPU, None)
    assert once.C is once.H
    for moments in (twice, other):
        assert moments.C is not moments.H
        assert torch.equal(moments.H, once.H)
        assert torch.equal(moments.C, once.H)
    w = torch.randn(6, 8, generator=generator)
    factor = factorize(once.damped(DAMPINGS[0]))
    assert torch.equal(once.target(w, factor), twice.target(w, factor))


def test_windows_to_learn_from_have_the_same_moments_alone() -> None:
    layer, generator = one_linear(), torch.Generator().manual_seed(5)
    hidden = torch.randn(8, 64, 8, generator=generator)
    for original in (hidden, torch.randn(8, 64, 8, generator=generator)):
        windows = WindowStates(hidden, original, 6)
        expected, heldout = measure(layer, layer, "proj", windows, CPU, None)
        found, none = measure(layer, layer, "proj", windows.only_learned, CPU, None)
        assert heldout is not None
        assert none is None
        assert torch.equal(found.H, expected.H)
        assert torch.equal(found.C, expected.C)
        assert (found.C is found.H) == (expected.C is expected.H)
