"""Compensated codes against a textbook computation in FP64, refitted scales against lstsq."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit.convert.quantize import gptq
from lowbit.convert.quantize.gptq import (
    Factor,
    Projected,
    compensated_codes,
    coordinate_descent,
    factorize,
    refitted_scales,
)
from lowbit.convert.quantize.moments import Moments
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import quantize, weighted_scales
from lowbit.formats.layout.scheme import Scheme

INT4 = Scheme(4, 32)
# Largest error of U as a share of its norm, by damping; factorizing the inverse in FP32 makes
# errors of 8.2e-7 and 1.6e-7.
FACTOR_ERROR = {0.01: 8e-7, 0.3: 1.5e-7}


def problem(N: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor, Moments]:
    """Weights, inputs [tokens, K] that depend on one another, and their moments."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, generator=generator) * 0.05
    mix = torch.randn(K, K, generator=generator) / K**0.5 + torch.eye(K)
    x = torch.randn(4 * K, K, generator=generator) @ mix * torch.linspace(0.2, 3, K)
    H = x.T @ x / len(x)
    return w, x, Moments(H, H)


def textbook(w: Tensor, scale: Tensor, H: Tensor, scheme: Scheme) -> Tensor:
    """Round a column; refit all later ones to what is wanted by least squares; next column."""
    K = w.shape[1]
    wide = H.double().numpy()
    steps = scale.double().repeat_interleave(K // scale.shape[1], 1).numpy()
    order = np.argsort(-H.diagonal().numpy(), kind="stable")
    wanted = w.double().numpy()
    value = wanted.copy()
    codes = np.zeros_like(value)
    for place, i in enumerate(order):
        codes[:, i] = np.clip(np.round(value[:, i] / steps[:, i]), scheme.code_min, scheme.code_max)
        value[:, i] = codes[:, i] * steps[:, i]
        fixed, rest = order[: place + 1], order[place + 1 :]
        if len(rest):
            error = (value - wanted)[:, fixed] @ wide[np.ix_(fixed, rest)]
            value[:, rest] = wanted[:, rest] - np.linalg.solve(wide[np.ix_(rest, rest)], error.T).T
    return torch.from_numpy(codes).to(torch.int8)


def objective(w: Tensor, codes: Tensor, scale: Tensor, H: Tensor) -> float:
    error = (dequantize(codes, scale) - w).double()
    return float(((error @ H.double()) * error).sum())


@pytest.mark.parametrize("K", [32, 96, 160, 256])
def test_codes_are_those_of_the_textbook(K: int) -> None:
    w, _, moments = problem(24, K)
    scale = weighted_scales(w, INT4, "signed", moments.H.diagonal())
    factor = factorize(moments.damped(0.01))
    codes = compensated_codes(w, scale, INT4, factor)
    expected = textbook(w, scale, factor.H, INT4)
    # FP32 against FP64: a weight on the edge of two codes may fall to either side.
    assert float((codes != expected).double().mean()) < 0.002
    assert objective(w, codes, scale, factor.H) == pytest.approx(
        objective(w, expected, scale, factor.H), rel=1e-3
    )


@pytest.mark.parametrize("damping", [0.01, 0.3])
def test_the_factor_is_that_of_the_inverse(damping: float) -> None:
    H = problem(1, 256)[2].damped(damping)
    factor = factorize(H)
    inverse = torch.linalg.inv(H.double()[factor.order][:, factor.order])
    exact = torch.linalg.cholesky(inverse, upper=True)
    assert float((factor.U.double() - exact).norm() / exact.norm()) < FACTOR_ERROR[damping]
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    solved = torch.linalg.solve(H.double(), rows.double().T).T
    error = (factor.solve(rows).double() - solved).norm() / solved.norm()
    assert float(error) < 1.5 * FACTOR_ERROR[damping]


@pytest.mark.parametrize("K", [1, 2, 7, 96, 129])
def test_an_inverse_by_halves_is_as_near_as_by_solving(
    K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    R = torch.linalg.cholesky(problem(1, K)[2].damped(0.01)).T.contiguous()
    exact = torch.linalg.inv(R.double())
    for solved, near in ((K, 1e-6), (2, 2e-6), (1, 2e-6)):
        monkeypatch.setattr(gptq, "SOLVED", solved)
        found = gptq._inverse(R)
        assert torch.equal(found, found.triu())
        assert (found - exact).norm() < near * exact.norm()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, None])
def test_every_step_lowers_the_error(bits: int, group: int | None) -> None:
    scheme = Scheme(bits, group)
    w, x, moments = problem(16, 160, seed=bits)
    factor = factorize(moments.damped(0.01))
    plain = quantize(w, scheme)
    scale = weighted_scales(w, scheme, "signed", moments.H.diagonal())
    codes = compensated_codes(w, scale, scheme, factor)
    projected = Projected.of(w, scale.shape[1], factor)
    refitted = refitted_scales(projected, codes, scale, factor)
    polished = coordinate_descent(w, codes, refitted, scheme, factor)
    steps = [
        objective(w, *plain, factor.H),
        objective(w, codes, scale, factor.H),
        objective(w, codes, refitted, factor.H),
        objective(w, polished, refitted, factor.H),
    ]
    assert steps[1] < 0.8 * steps[0]
    assert steps[2] <= steps[1] * 1.001  # stored in BF16, so not quite the optimum
    assert steps[3] <= steps[2]
    assert int(polished.min()) >= scheme.code_min
    assert int(polished.max()) <= scheme.code_max
    # And on the outputs themselves, which nothing above has looked at.
    outputs = [
        ((dequantize(q, s) - w) @ x.T).square().mean() for q, s in (plain, (polished, refitted))
    ]
    assert outputs[1] < 0.8 * outputs[0]


def test_no_single_code_could_be_better_after_polishing() -> None:
    scheme = Scheme(3, 32)
    w, _, moments = problem(6, 64)
    factor = factorize(moments.damped(0.01))
    scale = weighted_scales(w, scheme, "signed", moments.H.diagonal())
    codes = compensated_codes(w, scale, scheme, factor)
    for _ in range(20):
        codes = coordinate_descent(w, codes, scale, scheme, factor)
    best = objective(w, codes, scale, factor.H)
    for row in range(6):
        for column in range(64):
            for step in (-1, 1):
                other = codes.clone()
                other[row, column] = int(other[row, column]) + step
                if scheme.code_min <= int(other[row, column]) <= scheme.code_max:
                    assert objective(w, other, scale, factor.H) > best * (1 - 1e-9)


def test_refitted_scales_are_the_least_squares_solution() -> None:
    w, x, moments = problem(8, 128)
    codes, scale = quantize(w, INT4)
    factor = factorize(moments.H + 1e-7 * torch.eye(128))
    found = refitted_scales(Projected.of(w, scale.shape[1], factor), codes, scale, factor)
    for row in range(8):
        columns = x.double() * codes[row].double()  # [tokens, K]
        design = columns.view(len(x), 4, 32).sum(-1)
        wanted = x.double() @ w[row].double()
        exact = torch.linalg.lstsq(design, wanted[:, None]).solution[:, 0]
        # Half a unit of BF16, and the ridge.
        assert torch.allclose(found[row].double(), exact, rtol=2**-8, atol=0)


def test_a_group_of_zeros_keeps_its_scale() -> None:
    w, _, moments = problem(4, 64)
    w[:, :32] = 0
    codes, scale = quantize(w, INT4)
    factor = factorize(moments.damped(0.01))
    found = refitted_scales(Projected.of(w, scale.shape[1], factor), codes, scale, factor)
    assert torch.equal(found[:, 0], scale[:, 0])
    assert found.isfinite().all()


def test_inputs_that_never_vary() -> None:
    w, _, _ = problem(4, 64)
    x = torch.zeros(10, 64)
    x[:, :3] = 1.0  # rank one, 61 columns silent
    H = x.T @ x / 10
    moments = Moments(H, H)
    factor = factorize(moments.damped(0.01))
    scale = weighted_scales(w, INT4, "signed", moments.H.diagonal())
    codes = compensated_codes(w, scale, INT4, factor)
    assert objective(w, codes, scale, H) <= objective(w, *quantize(w, INT4), H)
    silent = factorize(Moments(torch.zeros(64, 64), torch.zeros(64, 64)).damped(0.01))
    assert torch.equal(
        compensated_codes(w, quantize(w, INT4)[1], INT4, silent), quantize(w, INT4)[0]
    )


def test_moments_that_are_not_positive_definite() -> None:
    with pytest.raises(QuantizationError, match="not positive definite"):
        factorize(-torch.eye(8))


def test_target_is_the_least_squares_solution() -> None:
    """Weights that give the original's output from other inputs, against lstsq."""
    w, x, _ = problem(8, 64)
    generator = torch.Generator().manual_seed(1)
    other = x + 0.1 * torch.randn(x.shape, generator=generator)  # what the quantized model sees
    moments = Moments(other.T @ other / len(x), x.T @ other / len(x))
    tokens = (other.double(), x.double() @ w.double().T)
    exact = torch.linalg.lstsq(*tokens).solution.T
    factor: Factor = factorize(moments.H)
    assert torch.allclose(moments.target(w, factor).double(), exact, atol=2e-5)
    # Damped, it still wins most of what can be won on the outputs.
    damped = moments.target(w, factorize(moments.damped(0.01)))
    errors = [(other @ v.T - x @ w.T).square().mean() for v in (w, damped, exact.float())]
    assert errors[0] - errors[1] > 0.8 * (errors[0] - errors[2]) > 0
