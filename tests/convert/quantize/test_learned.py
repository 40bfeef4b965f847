"""Gradients of the layered computation against autograd on the whole, and what training does."""

from pathlib import Path

import pytest
import torch

from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.threads import alone_on_threads, ordered
from lowbit.convert.original.walk import load_layer
from lowbit.convert.original.weights import open_weights
from lowbit.convert.quantize.learned import POSITION_RATE, Learned, layer_gradient
from lowbit.convert.quantize.linear import QuantizedLinear, nearest
from lowbit.formats.layout.scheme import Scheme

CPU = torch.device("cpu")
NAMES = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture
def layer(tiny: Path) -> Layer:
    """The second decoder layer, for windows of 16 tokens."""
    model = load_layered_model(open_weights(tiny), 16, CPU)
    return load_layer(model, 1, CPU)


def test_gradients_are_those_of_autograd(layer: Layer) -> None:
    generator = torch.Generator().manual_seed(0)
    x, wanted = torch.randn(2, 5, 16, 256, generator=generator)
    alone = layer_gradient(layer, NAMES, x, wanted, None)
    with alone_on_threads(CPU) as pool:
        threads = layer_gradient(layer, NAMES, x, wanted, pool)
    weights = [layer.weight(name).requires_grad_(True) for name in NAMES]
    loss = (layer(x) - wanted).square().sum() / 2
    exact = torch.autograd.grad(loss, weights)
    for by_name in (alone, threads):
        for name, gradient in zip(NAMES, exact, strict=True):
            error = (by_name[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5


def test_a_step_follows_the_gradient_of_every_scale_and_position(layer: Layer) -> None:
    """Against autograd on codes times scales, through the layer and a squared error."""
    scheme = Scheme(4, 64)
    generator = torch.Generator().manual_seed(2)
    hidden, wanted = torch.randn(2, 3, 16, 256, generator=generator)
    learned = {}
    for name in NAMES:
        w = layer.weight(name).data.clone()
        learned[name] = Learned.begin(nearest(w, scheme, "signed"), w, scheme, CPU)
    rows = list(learned.values())
    scales = [row.scale.clone().requires_grad_(True) for row in rows]
    codes = [row.codes().requires_grad_(True) for row in rows]
    weights = {
        f"{name}.weight": (q * s).flatten(1)
        for name, q, s in zip(NAMES, codes, scales, strict=True)
    }
    out = torch.func.functional_call(layer.module, weights, (hidden,), dict(layer.arguments))
    loss = (out - wanted).square().sum() / 2
    by_scale = torch.autograd.grad(loss, scales, retain_graph=True)
    by_code = torch.autograd.grad(loss, codes)

    before = [row.position.value.clone() for row in rows]
    layer.put({name: row.weight() for name, row in learned.items()})
    for name, gradient in layer_gradient(layer, NAMES, hidden, wanted, None).items():
        learned[name].step(gradient, 1.0)
    for i, row in enumerate(rows):
        by_change = by_scale[i] * row.scale  # relative
        # Adam's running mean after its first step
        found = row.adam.state[row.change]["exp_avg"] / 0.1
        assert (found - by_change).norm() / by_change.norm() < 1e-4
        inside = (before[i] - before[i].round().clamp(-8, 7)).abs() <= 0.5
        gradient = by_code[i] * inside
        moved = row.position.value - before[i]
        expected = -POSITION_RATE * gradient / gradient.square().mean(-1, keepdim=True).sqrt()
        assert (moved - expected).norm() / expected.norm() < 1e-3


def test_learning_begins_at_the_codes_chosen(tiny: Path) -> None:
    w = open_weights(tiny).read("model.layers.0.mlp.up_proj.weight", (768, 256), CPU)
    for bits in (2, 4, 8):
        scheme = Scheme(bits, 32)
        chosen = nearest(w, scheme, "signed")
        other = QuantizedLinear((chosen.codes + 1).clamp(max=scheme.code_max), chosen.scale)
        for start in (chosen, other):
            begun = Learned.begin(start, w, scheme, CPU)
            assert torch.equal(begun.chosen().codes, start.codes)
            assert torch.equal(begun.chosen().scale, start.scale)
            assert torch.equal(begun.weight(), start.weight)


def test_results_in_order_without_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    with alone_on_threads(CPU) as pool:
        found = list(ordered(pool, lambda item: (item, (weight * item).requires_grad), range(100)))
    assert found == [(item, False) for item in range(100)]


def test_an_error_on_a_thread_comes_through() -> None:
    with alone_on_threads(CPU) as pool, pytest.raises(ZeroDivisionError):
        list(ordered(pool, lambda item: 1 / item, [2, 1, 0, 1]))
