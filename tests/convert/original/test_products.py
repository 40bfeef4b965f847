"""FP32 products of BF16 parts, beside FP64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.convert.original import products
from lowbit.convert.original.products import in_parts, product

LEFT_OUT = 3 * 2.0**-18  # of a term: each operand's rest, and the product of both second parts
# Error as a share of the result's norm, above what an H200 has for 4,096 columns (2e-5): tensor
# cores truncate their sums.
TRUNCATED = 4e-5

Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "rows": Tensor.contiguous,
    "columns": lambda x: x.T.contiguous().T,
    "a slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "a slice of columns": lambda x: torch.cat([x, x]).T.contiguous().T[: len(x)],
}


def spread(rows: int, columns: int, seed: int) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(rows, columns, generator=generator)
    return plain * (3 * torch.randn(rows, columns, generator=generator)).exp()


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 33, 5), (1, 1, 1), (3, 0, 2), (0, 4, 2)])
def test_two_parts_of_each_operand_keep_sixteen_bits(
    left: str, right: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    M, K, N = shape
    a, b = LAYOUTS[left](spread(M, K, 1)), LAYOUTS[right](spread(K, N, 2))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        return a.double() @ b.double()

    monkeypatch.setattr(products, "_multiply", multiply)
    off = product(a, b) - a.double() @ b.double()
    assert off.shape == (M, N)
    assert (off.abs() <= LEFT_OUT * (a.double().abs() @ b.double().abs())).all()


def test_what_lies_on_a_cpu_is_multiplied_as_ever() -> None:
    x, weight, bias = spread(6, 9, 1), spread(4, 9, 2), spread(1, 4, 3)[0]

    def results() -> tuple[Tensor, ...]:
        added = bias.repeat(6, 1).addmm_(x, weight.T, alpha=-2)
        return linear(x, weight, bias), x @ weight.T, added

    plain = results()
    with in_parts():
        found = results()
    assert all(map(torch.equal, plain, found))


def test_calls_with_other_arguments_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = spread(6, 9, 1), spread(4, 9, 2), spread(1, 4, 3)[0]
    calls: dict[str, tuple[Callable[[], Tensor], bool]] = {
        "linear": (lambda: linear(x, weight, bias), True),
        "bias": (lambda: linear(x, weight, bias=bias), True),
        "weight": (lambda: linear(x, weight=weight), False),
        "all": (lambda: linear(input=x, weight=weight, bias=bias), False),
        "operator": (lambda: x @ weight.T, True),
        "matmul": (lambda: torch.matmul(x, other=weight.T), False),
        "alpha": (lambda: bias.repeat(6, 1).addmm_(x, weight.T, alpha=-2), True),
        "beta": (lambda: bias.repeat(6, 1).addmm_(x, weight.T, beta=0.5), False),
        "few columns": (lambda: x[:, :8] @ weight.T[:8], False),
        "little work": (lambda: x[:5] @ weight.T, False),
        "matrices": (lambda: bias.repeat(6, 1).addmm_(mat1=x, mat2=weight.T), False),
    }
    plain = {name: call() for name, (call, _) in calls.items()}
    made = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        made.append(a)
        return a.float() @ b.float()

    def multiply_onto(out: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        return out.add_(multiply(a, b), alpha=alpha)

    monkeypatch.setattr(products, "_multiply", multiply)
    monkeypatch.setattr(products, "_multiply_onto", multiply_onto)
    monkeypatch.setattr(products, "LEAST_INNER", 9)
    monkeypatch.setattr(products, "LEAST_WORK", 6 * 9 * 4)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for name, (call, taken) in calls.items():
        made.clear()
        with in_parts():
            found = call()
        assert (len(made) == 1) == taken, name
        assert torch.allclose(found, plain[name], rtol=1e-3, atol=1e-2), name


@pytest.mark.gpu
def test_products_on_a_gpu_are_finer_than_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    x, weight = (torch.randn(rows, 4096, device="cuda") for rows in (96, 80))
    bias = torch.randn(80, device="cuda")
    exact = x.double() @ weight.double().T
    with in_parts():
        found = {
            "linear": linear(x, weight),
            "with a bias": linear(x.view(2, 48, -1), weight, bias=bias).view(96, 80) - bias,
            "operator": x @ weight.T,
            "of columns": (weight @ x.T.contiguous()).T,
            "added": bias - bias.repeat(96, 1).addmm_(x, weight.T, alpha=-1),
        }
        coarse = linear(x.bfloat16(), weight.bfloat16())
        wide = x.double() @ weight.double().T
        learned = weight.requires_grad_()
        slope = torch.autograd.grad(linear(x, learned).sum(), learned)[0]
    for each in found.values():
        assert 0 < (each - exact).norm() / exact.norm() < TRUNCATED
    assert coarse.dtype == torch.bfloat16
    assert torch.equal(wide, exact)
    assert slope.shape == weight.shape
