"""Tokens in eight bits times a packed weight: the reference's bits, alone, in steps and prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lowbit.formats.activation_modes import Inputs
from lowbit.formats.activations import (
    activation_group,
    grouped_product_ref,
    quantize_activations,
    whole_product_ref,
)
from lowbit.formats.layout.packing import unpack
from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.launch import choose
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear import gemv_int8 as module
from lowbit.runtime.kernels.linear import mma_int8, quantize
from lowbit.runtime.kernels.linear.gemv import gemv
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.weights.linear import PackedLinear
from tests.lanes import in_kernels
from tests.runtime.kernels.emulator import run_kernel

MakePacked = Callable[[int, int, int, int], PackedLinear]
Randn = Callable[..., Tensor]

EPS = 1e-6
MOST = 11  # of which a launch takes eight
FP32 = torch.float32
kernels = pytest.mark.kernels  # make test-kernels runs them


@pytest.fixture(autouse=True)
def _emulated(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device == "cpu":
        for each in (module, mma_int8, quantize):
            monkeypatch.setattr(each, "run", run_kernel)
        yield
        return
    with monkeypatch.context() as patch:  # where `stream_int8` would take several tokens
        patch.setattr(choose, "stream_launch", lambda *_: None)
        choose.int8_variant.cache_clear()
        yield
    choose.int8_variant.cache_clear()


@dataclass(frozen=True, slots=True)
class Case:
    """A linear, and the type of its scales, whose signs differ."""

    bits: int
    N: int
    K: int
    G: int
    scales: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"INT{self.bits}-N{self.N}-K{self.K}-G{self.G}"


CASES = [
    Case(4, 72, 1024, 128),
    Case(8, 24, 576, 64, torch.float16),  # an odd number of 64 columns
    Case(8, 40, 1088, 1088, FP32),
    Case(2, 24, 1152, 128),  # half a step
    Case(3, 40, 1280, 256),
    Case(4, 33, 1120, 32),
    Case(8, 24, 1024, 512),
    Case(4, 7, 192, 96, FP32),
    Case(4, 24, 96, 96),
]
ON_GPU = [Case(bits, 200, 4096, 128) for bits in (2, 3, 4, 8)] + [
    Case(4, 4096, 12288, 128),
    Case(8, 1000, 2560, 256),
    Case(8, 2560, 4096, 32, torch.float16),
    Case(4, 6144, 4096, 4096),
    Case(4, 24, 25600, 128),
]


def made(case: Case, make_packed: MakePacked) -> PackedLinear:
    w = make_packed(case.bits, case.N, case.K, case.G)
    return replace(w, scales=w.scales.to(case.scales))


def product(x: Tensor, w: PackedLinear) -> Tensor:
    """The bits of a product: [M, N] float32."""
    q, s = quantize_activations(x, activation_group(w.group_size, w.K))
    return grouped_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales)


def whole_product(x: Tensor, w: PackedLinear) -> Tensor:
    """The bits of a product of tokens with one scale: [M, N] float32."""
    q, s = quantize_activations(x, w.K)
    return whole_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales, w.bits)


def check(x: Tensor, w: TiledLinear, expected: Tensor, **fused: Any) -> None:
    """Tokens alone, and among others, are the expected ones to the bit."""
    for count in (1, 3, MOST) if fused else (1, 2, 3, 4, 7, MOST):
        y = gemv(x[:count], w, dtype=FP32, **fused)
        assert torch.equal(y, expected[:count]), count
    last = gemv(x[-1:], w, dtype=FP32, **fused)
    assert torch.equal(last, expected[-1:])


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.gpu) for case in ON_GPU], ids=str
)
def test_a_product_has_the_bits_of_the_reference(
    case: Case, make_packed: MakePacked, randn: Randn
) -> None:
    w = made(case, make_packed)
    x = (randn(MOST, case.K) * torch.logspace(-2, 2, MOST).to(randn(1))[:, None]).bfloat16()
    x[0, : case.G // 2] = 0
    expected, bias = product(x, w), randn(1, case.N)
    tiled = cuda.prepare(w, inputs="int8")
    assert isinstance(tiled, TiledLinear)
    check(x, tiled, expected)
    check(x, tiled, expected + bias, added=bias)  # which is one rounding
    x[2, 40] = torch.nan
    y = gemv(x, tiled, dtype=FP32)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[torch.arange(MOST) != 2], expected[torch.arange(MOST) != 2])


LAUNCHES = [
    (1, GemvLaunch(2, 3, 4, registers=128, warp_groups=2, rounds=2)),
    (1, GemvLaunch(1, 1, 16, registers=96)),
    (2, GemvLaunch(1, 1, 8, registers=128, rounds=3)),
    (4, GemvLaunch(4, 2, 4, registers=255, warp_groups=4)),
    (8, GemvLaunch(1, 5, 8, early=True, registers=128, warp_groups=4, rounds=2)),
    (8, GemvLaunch(4, 2, 1, registers=255)),
]


@pytest.mark.parametrize(("room", "launch"), LAUNCHES, ids=str)
@pytest.mark.parametrize("bits", [3, 8])
def test_no_launch_changes_a_bit(
    make_packed: MakePacked, randn: Randn, bits: int, room: int, launch: GemvLaunch
) -> None:
    """Neither its tiles nor its steps nor its warps divide what there is."""
    w, x = make_packed(bits, 104, 1120, 32), randn(max(1, room - 1), 1120)
    tiled = cuda.prepare(w, inputs="int8")
    assert isinstance(tiled, TiledLinear)
    y = torch.full((len(x), 104), torch.nan, dtype=FP32, device=x.device)
    module.gemv_int8(x, tiled, y, launch, room, 0.0, None, None, None)
    assert torch.equal(y, product(x, w))


@pytest.mark.parametrize(("room", "launch"), LAUNCHES, ids=str)
def test_tokens_with_one_scale_have_the_bits_of_another_kernel(
    make_packed: MakePacked, randn: Randn, room: int, launch: GemvLaunch
) -> None:
    """A warp keeps its blocks or, with many tokens and few warps, loads them again."""
    w, x, gain = make_packed(4, 104, 1120, 32), randn(max(1, room - 1), 1120), randn(1120)
    tiled = cuda.prepare(w, inputs="whole")
    assert isinstance(tiled, TiledLinear)
    y = torch.full((len(x), 104), torch.nan, dtype=FP32, device=x.device)
    module.gemv_int8(x, tiled, y, launch, room, EPS, gain, None, None)
    assert torch.equal(y, mma_int8.mma_int8(x, tiled, norm=gain, eps=EPS, dtype=FP32))


FUSED = [(4, 1024, 128, fused) for fused in ("norm", "heads", "paired", "whole")]
WIDER = [(8, 2080, 32, fused) for fused in ("norm", "heads", "paired", "whole")]


@in_kernels("8-2080-32-norm")
@pytest.mark.parametrize(
    ("bits", "K", "G", "fused"),
    [*FUSED, WIDER[0], *(pytest.param(*case, marks=kernels) for case in WIDER[1:])],
)
def test_norms_and_pairs(
    make_packed: MakePacked, randn: Randn, fused: str, bits: int, K: int, G: int
) -> None:
    """Values are near, since roots and exponentials are; bits are the same in any company."""
    w, x, residual = make_packed(bits, 48, K, G), randn(MOST, K), randn(MOST, 48)
    given: dict[str, Any] = {"eps": EPS}
    heads = K // 16
    if fused == "heads":
        given["squares"] = (x.float() * 3).square().view(MOST, heads, SQUARES, -1).sum(-1)
        factors = torch.rsqrt(given["squares"].sum(-1) / 16 + EPS)
        expected = product((x.float().view(MOST, heads, 16) * factors[..., None]).view(MOST, K), w)
    else:
        given["norm"] = (1 + 0.3 * randn(K)).float()
        factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
        gained = (x.float() * given["norm"]).bfloat16()
        expected = (whole_product if fused == "whole" else product)(gained, w) * factor
    if fused == "paired":
        gate, up = expected.chunk(2, -1)
        expected = silu(gate) * up
    else:
        expected = expected + residual
        given["added"] = residual
    kind: Inputs = "whole" if fused == "whole" else "int8"
    tiled = cuda.prepare(w, paired=fused == "paired", inputs=kind)
    assert isinstance(tiled, TiledLinear)

    def compute(tokens: slice) -> Tensor:
        own = {n: v[tokens] if n in ("squares", "added") else v for n, v in given.items()}
        return gemv(x[tokens], tiled, dtype=FP32, **own)

    alone = torch.cat([compute(slice(i, i + 1)) for i in range(MOST)])
    bound = 0.01 if fused == "heads" else 1e-5  # where a code is another one near a half
    assert float((alone - expected).norm() / expected.norm()) < bound
    for count in (2, 3, 5, 8, MOST):
        assert torch.equal(compute(slice(0, count)), alone[:count]), count
    assert torch.equal(compute(slice(4, 8)), alone[4:8])
    everything = gemv(x, tiled, **given)
    assert torch.equal(everything, compute(slice(0, MOST)).bfloat16())


@dataclass(frozen=True, slots=True)
class Promise:
    """A linear, what is fused with it, and the tokens of a prompt."""

    case: Case
    fused: str  # of `norm`, `whole`, `paired`, `heads`, `added` and `bias`
    prompt: int

    def __str__(self) -> str:
        return f"{self.case}-{self.fused}-{self.prompt}"


PROMISES = [
    Promise(Case(4, 144, 640, 128), "norm bias", 100),
    Promise(Case(8, 48, 576, 64, torch.float16), "norm paired", 70),
    Promise(Case(4, 64, 1120, 32), "heads added", 30),
    Promise(Case(2, 48, 1152, 128), "norm", 20),
    Promise(Case(3, 32, 1280, 256, FP32), "added", 66),
    Promise(Case(8, 48, 1088, 1088), "bias", 17),
    Promise(Case(4, 144, 640, 128), "whole norm bias", 40),
    Promise(Case(4, 48, 1120, 32, FP32), "whole norm paired", 20),
    Promise(Case(2, 48, 1280, 256), "whole norm", 17),
    Promise(Case(8, 48, 1088, 1088), "whole norm paired", 30),
]
LARGER = [
    Promise(Case(bits, 6144, 4096, G), fused, 1000)
    for bits, G, fused in (
        (4, 128, "norm"),
        (8, 128, "norm paired"),
        (4, 32, "added"),
        (2, 512, "norm bias"),
        (3, 4096, "heads added"),
    )
]
LARGER += [
    Promise(Case(4, 256, 4096, 128), "heads added", 300),
    Promise(Case(8, 96, 1088, 64), "norm paired", 300),
    Promise(Case(4, 6144, 4096, 128), "whole norm bias", 1000),
    Promise(Case(4, 4096, 5120, 128), "whole norm paired", 300),
    Promise(Case(8, 2048, 2560, 128), "whole norm paired", 300),
    Promise(Case(3, 512, 896, 128), "whole norm", 300),
    Promise(Case(4, 512, 2048, 32, FP32), "whole norm", 300),
]


@in_kernels(
    "INT3-*-chosen",
    "INT4-N144-*-mma",
    "INT4-N64-*-chosen",
    "INT2-N48-K1280-*-mma",
    "INT4-N144-*-norm bias-100-chosen",
)
@pytest.mark.parametrize(
    ("promise", "kernel"),
    [
        *((promise, "chosen") for promise in PROMISES),
        *((promise, "mma") for promise in PROMISES[::2]),
        *(pytest.param(promise, "mma", marks=kernels) for promise in PROMISES[1::2]),
        *(
            pytest.param(promise, kernel, marks=pytest.mark.gpu)
            for promise in LARGER
            for kernel in ("chosen", "mma")
        ),
    ],
    ids=str,
)
def test_a_token_has_its_bits_in_any_step_and_prompt(
    make_packed: MakePacked, randn: Randn, promise: Promise, kernel: str
) -> None:
    case, most, fused = promise.case, promise.prompt, promise.fused
    x = (randn(most, case.K) * torch.logspace(-2, 2, most).to(randn(1))[:, None]).bfloat16()
    step = max(1, most // 8)
    x[step * 5, 3] = torch.inf
    kind: Inputs = "whole" if "whole" in fused else "int8"
    tiled = cuda.prepare(made(case, make_packed), "paired" in fused, inputs=kind)
    assert isinstance(tiled, TiledLinear)
    norm = (1 + 0.3 * randn(case.K)).float() if "norm" in fused else None
    added = randn(most if "added" in fused else 1, case.N)
    squares = x.float().square().view(most, case.K // 32, SQUARES, -1).sum(-1)

    def compute(kernel: str, tokens: slice) -> Tensor:
        given: dict[str, Any] = {"norm": norm, "eps": EPS}
        if "added" in fused or "bias" in fused:
            given["added"] = added[tokens] if "added" in fused else added
        if "heads" in fused:
            given["squares"] = squares[tokens]
        if kernel == "mma":
            return mma_int8.mma_int8(x[tokens], tiled, **given)
        return cuda.product(x[tokens], tiled, swiglu=tiled.paired, **given)

    some = range(0, most, step)
    alone = {i: compute("chosen", slice(i, i + 1))[0] for i in some}
    assert any(bool(row.isnan().all()) for row in alone.values())
    sizes = ((0, 2), (0, 8), (0, 9), (0, 65), (0, 256), (most // 3, most))
    for first, count in dict.fromkeys((at, min(size, most - at)) for at, size in sizes):
        y = compute(kernel, slice(first, first + count))
        for i in range(len(y)):
            if first + i in alone:
                assert same(y[i], alone[first + i]), (first, count, i)


def same(a: Tensor, b: Tensor) -> bool:
    """Equality of bits, but for those of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@in_kernels("INT4-N144-*", "INT3-*")
@pytest.mark.parametrize("promise", [p for p in PROMISES if "whole" not in p.fused], ids=str)
def test_partial_sums_of_many_tokens_have_the_bits_of_lone_ones(
    make_packed: MakePacked, randn: Randn, promise: Promise
) -> None:
    """As FP32, which nothing has rounded: with no norm and nothing added the reference's."""
    case, most = promise.case, min(promise.prompt, 40)
    x = (randn(most, case.K) * torch.logspace(-2, 2, most).to(randn(1))[:, None]).bfloat16()
    w = made(case, make_packed)
    tiled = cuda.prepare(w, inputs="int8")
    assert isinstance(tiled, TiledLinear)
    expected, added = product(x, w), randn(most, case.N)
    assert torch.equal(cuda.product(x, tiled, logits=True), expected)
    assert torch.equal(mma_int8.mma_int8(x[:13], tiled, dtype=FP32), expected[:13])
    squares = x.float().square().view(most, case.K // 32, SQUARES, -1).sum(-1)
    fused: list[dict[str, Any]] = [
        {"norm": 1 + 0.3 * randn(case.K), "eps": EPS, "added": added},
        {"squares": squares, "eps": EPS},
    ]
    for given in fused:
        lone = {n: v[-1:] if n in ("added", "squares") else v for n, v in given.items()}
        y = mma_int8.mma_int8(x, tiled, dtype=FP32, **given)
        assert y.dtype == FP32
        assert torch.equal(y[-1:], gemv(x[-1:], tiled, dtype=FP32, **lone))
