"""`run` finds a kernel again by all that Triton compiles for."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from lowbit.runtime.kernels.launch import device
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.rows import embed, rms_norm, rms_norm_ref, swiglu, swiglu_ref


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_compiled", {})


def test_callees_are_hashed_before_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those named as a module's members too, each once, and a recursive function without end."""
    hashed: list[str] = []

    class Function:
        def __init__(self, fn: Callable[..., Any]) -> None:
            self.fn = fn

        @property
        def cache_key(self) -> str:
            hashed.append(self.fn.__name__)
            return ""

    module = ModuleType("library")
    names: dict[str, Any] = {"library": module}

    def function(name: str, body: str) -> Function:
        exec(f"def {name}(x):\n    return {body}\n", names)
        return Function(names[name])

    names["leaf"] = function("leaf", "x")
    vars(module)["member"] = function("member", "leaf(x)")
    names["inner"] = function("inner", "library.member(leaf(x)) + inner(x)")
    kernel = function("kernel", "inner(x) + len(x)")
    device.hash_callees_first(kernel)
    assert hashed == ["leaf", "member", "inner", "kernel"]


@pytest.mark.parametrize(
    ("capability", "caps"),
    [
        ((8, 0), {None: 168, 80: None, 96: 96, 255: 255}),
        ((8, 9), {None: 168, 80: None, 96: 96, 255: 255}),
        ((9, 0), {None: None, 80: 80, 96: 96, 255: 255}),
        ((12, 0), {None: None, 80: None, 96: None, 255: None}),
    ],
    ids=str,
)
def test_registers_are_capped_by_the_kind_of_card(
    capability: tuple[int, int], caps: dict[int | None, int | None]
) -> None:
    card = Card(capability)
    assert {measured: card.register_cap(measured) for measured in caps} == caps


@pytest.mark.parametrize(
    ("capability", "kb", "threads"),
    [((8, 0), 163, 2048), ((8, 6), 99, 1536), ((9, 0), 227, 2048), ((12, 0), 99, 1536)],
    ids=str,
)
def test_sizes_of_multiprocessors(capability: tuple[int, int], kb: int, threads: int) -> None:
    """As the CUDA programming guide's table of compute capabilities has them."""
    assert (Card(capability).shared_bytes, Card(capability).threads) == (kb << 10, threads)


@pytest.mark.gpu
def test_alignment_and_sizes_are_told_apart() -> None:
    """Vector loads of a kernel compiled for aligned rows would fault on these, or read others."""
    flat = torch.randn(1 << 14, dtype=torch.bfloat16, device="cuda")
    for start, M, N in ((0, 4, 2048), (1, 4, 2048), (0, 1, 2046), (8, 3, 2046), (0, 4, 2048)):
        x = flat[start : start + M * N].view(M, N)
        y = swiglu(x)
        torch.testing.assert_close(y.double(), swiglu_ref(x), rtol=2.0**-7, atol=1e-3)
    assert len(device._compiled) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_are_told_apart(dtype: torch.dtype) -> None:
    x = torch.randn(3, 512, device="cuda").bfloat16()
    for gain in (torch.rand(512, device="cuda").to(dtype), torch.rand(512, device="cuda")):
        for eps in (1e-6, 1.0):
            y = rms_norm(x, gain, eps)
            torch.testing.assert_close(y.double(), rms_norm_ref(x, gain, eps), rtol=0.01, atol=1e-3)
    assert len(device._compiled) == (1 if dtype == torch.float32 else 2)


@pytest.mark.gpu
def test_found_again_in_a_graph() -> None:
    """The stream is the one of the moment, not the one of the first launch."""
    table = torch.randn(50, 64, device="cuda").bfloat16()
    ids = torch.zeros(2, dtype=torch.int64, device="cuda")
    embed(ids, table)
    graph, rows = torch.cuda.CUDAGraph(), table
    with torch.cuda.graph(graph):
        rows = embed(ids, table)
    ids.copy_(torch.tensor([7, 49]))
    graph.replay()
    assert torch.equal(rows, table[[7, 49]])


def test_numbers_are_told_apart() -> None:
    """As Triton does: 1 is a constant, multiples of 16 may be vectors, large ones are int64."""
    numbers = (1, 3, 48, 2**31, 2**31 - 1, 2**31 + 1)
    kinds = [device._kind(number) for number in numbers]
    assert len(set(kinds)) == 5
    assert kinds[1] == kinds[4]
    assert len({device._kind(None), device._kind(1.0), *kinds}) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_interpreted_kernels_are_not_kept() -> None:
    x = torch.randn(2, 64).bfloat16()
    rms_norm(x, torch.ones(64), 1e-6)
    assert not device._compiled
