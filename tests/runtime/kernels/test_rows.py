"""Embedding, RMS norm and SwiGLU against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.head import head_input, head_input_ref, store_hidden
from lowbit.runtime.kernels.rows import (
    embed,
    embed_ref,
    rms_norm,
    rms_norm_ref,
    swiglu,
    swiglu_ref,
)
from lowbit.runtime.weights.table import PackedTable

Randn = Callable[..., Tensor]


@pytest.mark.parametrize(("M", "h"), [(1, 64), (3, 1500), (5, 2048)])
def test_embed(randn: Randn, device: str, M: int, h: int) -> None:
    table = randn(50, h)
    ids = torch.tensor([49, 0, 7, 7, 1], device=device)[:M]
    assert torch.equal(embed(ids, table), embed_ref(ids, table))


@pytest.mark.parametrize(("M", "h", "group"), [(1, 64, 32), (3, 1536, 128), (5, 2048, 2048)])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_embed_of_a_packed_table(
    randn: Randn, device: str, bf16_error: float, M: int, h: int, group: int, scales: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-(2**31), 2**31, (50, h // 4), generator=generator, dtype=torch.int64)
    table = PackedTable(
        codes.to(torch.int32).to(device), randn(50, h // group).to(scales), torch.bfloat16
    )
    ids = torch.tensor([49, 0, 7, 7, 1], device=device)[:M]
    found, ref = embed(ids, table), embed_ref(ids, table)
    if device == "cpu":  # the interpreter cuts digits off where a GPU rounds
        ref = ref.double()
        assert bool(((found.double() - ref).abs() <= bf16_error * ref.abs()).all())
        return
    assert torch.equal(found, ref)
    on_cpu = PackedTable(table.codes.cpu(), table.scales.cpu(), table.dtype)
    assert torch.equal(found.cpu(), on_cpu.rows(ids.cpu()))


@pytest.mark.gpu
def test_embed_of_a_packed_table_beyond_two_gigabytes(device: str) -> None:
    """Rows of a prompt of 8,192 tokens, far into a table of more bytes than an int32 counts."""
    V, h = 600_000, 4096
    table = PackedTable(
        torch.randint(-(2**31), 2**31 - 1, (V, h // 4), dtype=torch.int32, device=device),
        torch.rand(V, h // 128, device=device).to(torch.bfloat16),
        torch.bfloat16,
    )
    ids = torch.arange(V - 8192, V, device=device)
    assert torch.equal(embed(ids, table), table.rows(ids))


@pytest.mark.parametrize(("M", "K"), [(1, 256), (5, 100), (3, 2560)])
def test_rms_norm(randn: Randn, bf16_error: float, M: int, K: int) -> None:
    x, gain = 100 * randn(M, K), randn(K)
    y, ref = rms_norm(x, gain, 1e-6).double(), rms_norm_ref(x, gain, 1e-6)
    assert bool(((y - ref).abs() <= bf16_error * ref.abs()).all())


@pytest.mark.parametrize(("M", "N"), [(1, 128), (3, 3000), (2, 1536)])
def test_swiglu(randn: Randn, bf16_error: float, M: int, N: int) -> None:
    x = 4 * randn(M, N)
    y, ref = swiglu(x).double(), swiglu_ref(x)
    assert bool(((y - ref).abs() <= bf16_error * ref.abs()).all())


def test_swiglu_of_some_columns(randn: Randn, bf16_error: float) -> None:
    x, whole = 4 * randn(3, 3000), torch.zeros(3, 4000, dtype=torch.bfloat16)
    y = whole.to(x.device)
    assert swiglu(x, y[:, 1000:2100]).shape == (3, 1100)
    ref = swiglu_ref(x)[:, :1100]
    assert bool(((y[:, 1000:2100].double() - ref).abs() <= bf16_error * ref.abs()).all())
    assert not bool(y[:, :1000].any())
    assert not bool(y[:, 2100:].any())


def test_rms_norm_with_an_fp32_gain(randn: Randn, bf16_error: float) -> None:
    """The gain is rounded with the product, not before it."""
    x, gain = randn(3, 500), 1 + 0.1 * randn(500).float() ** 2
    y, ref = rms_norm(x, gain, 1e-6).double(), rms_norm_ref(x, gain, 1e-6)
    assert bool(((y - ref).abs() <= bf16_error * ref.abs()).all())


@pytest.mark.parametrize(("M", "h"), [(1, 64), (5, 300), (3, 2560)])
def test_head_input(randn: Randn, bf16_error: float, M: int, h: int) -> None:
    table, x, gains = randn(50, h), 30 * randn(M, h), (randn(h), 1 + 0.1 * randn(h), randn(h))
    ids = torch.tensor([49, 0, 7, 7, 1], device=x.device)[:M]
    y = head_input(ids, table, x, gains, 1e-6).double()
    ref = head_input_ref(ids, table, x, gains, 1e-6)
    assert y.shape == (M, 2 * h)
    # the state is rounded before its second norm as well
    assert bool(((y - ref).abs() <= 3 * bf16_error * ref.abs()).all())
    one_by_one = rms_norm(rms_norm(x, gains[1], 1e-6), gains[2], 1e-6)
    assert torch.equal(y[:, h:], one_by_one.double())
    assert torch.equal(y[:, :h], rms_norm(embed(ids, table), gains[0], 1e-6).double())


def test_leave_rows(randn: Randn) -> None:
    x, hidden_ring = randn(4, 1500), randn(3, 8, 1500)
    rows, positions = torch.tensor([[2, 0, 2, 1], [7, 0, 8, 21]], dtype=torch.int32).to(x.device)
    expected = hidden_ring.clone()
    for token, (row, place) in enumerate([(2, 7), (0, 0), (2, 0), (1, 5)]):
        expected[row, place] = x[token]
    store_hidden(x, rows, positions, hidden_ring)
    assert torch.equal(hidden_ring, expected)
