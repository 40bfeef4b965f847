"""One program that joins all splits has the bits of a program for each and a kernel that joins.

Emulated without a GPU, where the joining kernel is the formula below; `test_attention_decode` is
the same on a GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.attention import decode as module
from lowbit.runtime.kernels.attention.decode import attention_decode
from lowbit.runtime.kernels.launch.attention import NARROW, attention_launch
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span
from lowbit.runtime.weights.layers import AttentionLayer
from tests.lanes import in_kernels
from tests.runtime.kernels.coded_pages import in_codes
from tests.runtime.kernels.emulated_join import join_splits
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.paged import clone, random_pages, step_of

EPS = 1e-6
CONTEXT = 1024
LENGTHS = [257, 100, 1023, 0, 513]

kernels = pytest.mark.kernels  # make test-kernels runs them


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("a GPU runs the kernels itself")
    monkeypatch.setattr(module, "run", run_kernel)
    monkeypatch.setattr(module, "join_splits", join_splits)

    def empty(shape: tuple[int, ...], **kind: Any) -> Tensor:  # results are not rounded to BF16
        return torch.empty(shape, dtype=torch.float32)

    monkeypatch.setattr(module, "torch", SimpleNamespace(empty=empty, float32=torch.float32))


# query heads, kv heads, size, gated, dtype of the gains, whether keys and values are codes
SIZES = [
    (4, 2, 64, False, torch.bfloat16, False),
    (3, 1, 128, True, torch.float32, False),
    (6, 2, 128, False, torch.bfloat16, True),
    pytest.param(2, 1, 256, True, torch.float32, False, marks=kernels),
    # Several programs read a kv head.
    pytest.param(20, 2, 64, False, torch.bfloat16, False, marks=kernels),
    pytest.param(20, 2, 128, False, torch.float32, True, marks=kernels),
]


@in_kernels("4-2-64-*", "3-1-128-*")
@pytest.mark.parametrize(("Hq", "Hkv", "D", "gated", "gain", "coded"), SIZES, ids=str)
def test_one_program_joins_all_splits(
    make_rope: Callable[[int, int], Rope],
    monkeypatch: pytest.MonkeyPatch,
    Hq: int,
    Hkv: int,
    D: int,
    gated: bool,
    gain: torch.dtype,
    coded: bool,
) -> None:
    pages, tables = random_pages(1, Hkv, D, LENGTHS, CONTEXT, "cpu")
    pages = in_codes(pages) if coded else pages
    qkv = torch.randn(len(LENGTHS), ((2 if gated else 1) * Hq + 2 * Hkv) * D).bfloat16()
    q_norm, k_norm = (1.5 + 0.3 * torch.randn(2, D)).to(gain)
    layer = AttentionLayer(0, make_rope(CONTEXT, 64), EPS, q_norm, k_norm, gated)
    step = step_of(tables, [Span(row, length, 1) for row, length in enumerate(LENGTHS)])
    found = []
    apart, joined = (  # as many programs as so many tokens have
        attention_launch(Hkv, Hq // Hkv, D, CONTEXT, tokens, 1, coded) for tokens in (1, 1000)
    )
    assert apart.splits > 1
    assert not apart.joined
    assert joined.joined
    launches, narrow = [apart, replace(joined, warps=None)], replace(joined, warps=NARROW)
    if D == 256:
        launches.append(narrow)
    elif Hq % 4:  # rings hold rows of whole heads; the emulator takes long
        launches += [narrow, replace(narrow, ring=2)]
    else:
        launches += [replace(narrow, ring=3), replace(apart, ring=3)]
    for launch in launches:
        monkeypatch.setattr(module, "attention_launch", lambda *sizes, launch=launch: launch)
        own = clone(pages)
        out = attention_decode(qkv, layer, own, step)
        found.append((out, *(store.view(torch.int8) for store in own.stores)))
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(one, other)
