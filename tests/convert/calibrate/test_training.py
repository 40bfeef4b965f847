"""Gradients of the layered computation against autograd on the whole, and what training does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.convert.calibrate.distill import Fixed, Head, Student, divergence
from lowbit.convert.calibrate.learned import POSITION_RATE, Learned, layer_gradient
from lowbit.convert.calibrate.linear import Chosen, nearest
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.threads import alone_on_threads, ordered
from lowbit.convert.original.walk import load_layer
from lowbit.convert.original.weights import open_weights
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

    def above(out: Tensor, part: slice) -> Tensor:
        return out.sub(wanted[part])

    alone = layer_gradient(layer, NAMES, x, above, None)
    with alone_on_threads(CPU) as pool:
        threads = layer_gradient(layer, NAMES, x, above, pool)
    inputs = x.clone().requires_grad_(True)
    weights = [layer.weight(name).requires_grad_(True) for name in NAMES]
    loss = (layer(inputs) - wanted).square().sum() / 2
    below, *exact = torch.autograd.grad(loss, (inputs, *weights))
    for found, by_name in (alone, threads):
        assert torch.allclose(found, below, atol=1e-4 * float(below.abs().max()))
        for name, gradient in zip(NAMES, exact, strict=True):
            error = (by_name[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5


def test_divergence_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    states, original = torch.randn(2, 3, 100, 16, generator=generator)
    heads = torch.randn(2, 50, 16, generator=generator)
    head = Head(torch.nn.Identity(), heads[0], heads[1])
    loss, gradient = divergence(states, original, head)
    x = states.double().requires_grad_(True)
    log_p = (original.double() @ heads[0].double().T).log_softmax(-1)
    log_q = (x @ heads[1].double().T).log_softmax(-1)
    exact = torch.nn.functional.kl_div(
        log_q.flatten(0, 1), log_p.flatten(0, 1), reduction="batchmean", log_target=True
    )
    (by_states,) = torch.autograd.grad(exact, x)
    assert loss == pytest.approx(exact.item(), rel=1e-5)
    assert torch.allclose(gradient.double(), by_states, atol=1e-6)


def test_a_step_follows_the_gradient_of_every_scale_and_position(tiny: Path) -> None:
    """Two of three layers learned, through norm and head, against autograd on the same chain."""
    model = load_layered_model(open_weights(tiny), 16, CPU)
    layers = [load_layer(model, n, CPU) for n in range(3)]
    scheme = Scheme(4, 64)
    linears: list[dict[str, Fixed | Learned]] = []
    for number, layer in enumerate(layers):
        row: dict[str, Fixed | Learned] = {}
        for name in NAMES:
            w = layer.weight(name).data.clone()
            chosen = nearest(w, scheme, "signed")
            fixed = number == 1
            row[name] = (
                Fixed.of(chosen, scheme, CPU) if fixed else Learned.begin(chosen, w, scheme, CPU)
            )
        linears.append(row)
    generator = torch.Generator().manual_seed(2)
    hidden, original = torch.randn(2, 3, 16, 256, generator=generator)
    head = Head(torch.nn.Identity(), *torch.randn(2, 40, 256, generator=generator) * 0.1)
    student = Student(layers, linears, head, None)

    learned = [linear for row in linears for linear in row.values() if isinstance(linear, Learned)]
    scales = [linear.scale.clone().requires_grad_(True) for linear in learned]
    codes = [linear.codes().requires_grad_(True) for linear in learned]
    x, place = hidden, 0
    for layer, row in zip(layers, linears, strict=True):
        weights = {}
        for name, linear in row.items():
            if isinstance(linear, Learned):
                weights[f"{name}.weight"] = (codes[place] * scales[place]).flatten(1)
                place += 1
            else:
                weights[f"{name}.weight"] = linear.weight()
        x = torch.func.functional_call(layer.module, weights, (x,), dict(layer.arguments))
    log_p = (original @ head.original.T).log_softmax(-1)
    log_q = (x @ head.packed.T).log_softmax(-1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    by_scale = torch.autograd.grad(loss, scales, retain_graph=True)
    by_code = torch.autograd.grad(loss, codes)

    before = [linear.position.value.clone() for linear in learned]
    assert student.step(hidden, original, 1.0) == pytest.approx(loss.item(), rel=1e-5)
    for i, linear in enumerate(learned):
        wanted = by_scale[i] * linear.scale  # by the relative change
        # Adam's running mean after its first step
        found = linear.adam.state[linear.change]["exp_avg"] / 0.1
        assert (found - wanted).norm() / wanted.norm() < 1e-4
        inside = (before[i] - before[i].round().clamp(-8, 7)).abs() <= 0.5
        gradient = by_code[i] * inside
        wanted = -POSITION_RATE * gradient / gradient.square().mean(-1, keepdim=True).sqrt()
        moved = linear.position.value - before[i]
        assert (moved - wanted).norm() / wanted.norm() < 1e-3


def test_learning_begins_at_the_codes_chosen(tiny: Path) -> None:
    w = open_weights(tiny).read("model.layers.0.mlp.up_proj.weight", (768, 256), CPU)
    for bits in (2, 4, 8):
        scheme = Scheme(bits, 32)
        chosen = nearest(w, scheme, "signed")
        other = Chosen((chosen.codes + 1).clamp(max=scheme.code_max), chosen.scale)
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
