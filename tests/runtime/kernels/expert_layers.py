"""Random mixtures of experts as the GPU keeps them, and what they make of tokens in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.kernels.experts.tiled import TiledExperts, gathered, stacked
from lowbit.runtime.kernels.linear.tiles import (
    GpuLinear,
    TiledLinear,
    dequantized,
    rounding,
    tiled,
)
from lowbit.runtime.weights.linear import ExpertWeights, PackedLinear

EPS = 1e-6
FP32_ERROR = 5e-6  # relative to the norm of the result


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a layer; shared: beside E experts there is one of every token."""

    bits: int
    h: int
    inner: int
    E: int
    chosen: int
    shared: bool
    G: int = 128
    normed: bool = True

    def __str__(self) -> str:
        beside = "+1" if self.shared else ""
        end = "" if self.normed else "-unnormed"
        return (
            f"INT{self.bits}-h{self.h}-I{self.inner}-{self.chosen}{beside}of{self.E}-G{self.G}{end}"
        )


# Tails of a step and of a block, groups of several steps and several in one, one expert or all.
SMALL = [
    Size(4, 256, 128, 6, 2, True),
    Size(8, 96, 96, 5, 3, True, 32),
    Size(4, 160, 32, 3, 3, False, 32),
    Size(8, 128, 64, 40, 1, False, 64),
    Size(4, 512, 256, 34, 8, True, 256),
    Size(4, 160, 64, 70, 4, True, 32, normed=False),
    Size(3, 160, 96, 6, 2, True, 32),
    Size(2, 256, 128, 6, 3, False),
]
WIDE = Size(8, 64, 1600, 2, 2, True, 64)  # more shared memory than a kernel can declare
REAL = [
    Size(4, 2048, 512, 256, 8, True),
    Size(8, 2048, 512, 256, 8, True),
    Size(4, 2048, 768, 128, 8, False),
    Size(8, 2048, 768, 128, 8, False),
    Size(3, 2048, 768, 128, 8, False),
    Size(2, 2048, 512, 256, 8, True),
]


def random_experts(
    size: Size, device: str, activations: Activations = "exact"
) -> ExpertWeights[GpuLinear]:
    """Codes of every value; scales are powers of two, so that weights are exact in BF16."""
    count = size.E + size.shared

    def stack(N: int, K: int, paired: bool) -> TiledExperts:
        def read(first: int, stop: int) -> GpuLinear:
            shape = (stop - first) * N, K * size.bits // 32
            codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
            powers = torch.randint(-2, 2, (shape[0], K // size.G), device=device)
            scales = torch.exp2(powers.float()) / (2**size.bits * K**0.5)
            scales *= torch.randint(0, 2, scales.shape, device=device) * 2 - 1
            packed = PackedLinear(codes, _power_of_two(scales).bfloat16(), size.bits, size.G)
            return tiled(packed, paired, activations)

        return gathered(read, count)

    router = torch.randn(count, size.h, device=device) * 2 / size.h**0.5
    return ExpertWeights(
        router=router.bfloat16(),
        gate_up=stack(2 * size.inner, size.h, True),
        down=stack(size.h, size.inner, False),
        chosen=size.chosen,
        shared=size.shared,
        normed=size.normed,
    )


def _power_of_two(x: Tensor) -> Tensor:
    return torch.exp2(x.abs().log2().round()) * x.sign()


def routes(
    scores: Tensor, chosen: int, shared: bool, normed: bool = True
) -> list[list[tuple[int, float]]]:
    """Experts of every token with their shares, the likeliest first, the shared one last."""
    found = []
    for row in scores.double().cpu():
        own = row[: len(row) - shared]
        best = sorted(range(len(own)), key=lambda e: (-float(own[e]), e))[:chosen]
        part = (own[best].softmax(0) if normed else own.softmax(0)[best]).tolist()
        pairs = list(zip(best, part, strict=True))
        if shared:
            pairs.append((len(own), float(torch.sigmoid(row[-1]))))
        found.append(pairs)
    return found


def normed(x: Tensor, norm: Tensor) -> Tensor:
    """The norm as the kernels do it: products with the gain are rounded once."""
    factor = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    return (x.float() * norm.float()).bfloat16().double() * factor


def with_random_scales(experts: TiledExperts, dtype: torch.dtype) -> TiledExperts:
    """Give codes scales that are no powers of two, so that weights are not exact in BF16."""
    factors = 1 + torch.rand(experts.scales.shape, device=experts.scales.device)
    scales = (experts.scales.float() * factors).to(dtype)
    scaled = replace(experts, scales=scales)
    if experts.bounds is None:
        return scaled
    bounds = [rows for each in scaled if (rows := rounding(each).rows) is not None]
    return replace(scaled, bounds=torch.stack(bounds))


def rounded(w: TiledLinear) -> Tensor:
    """The weight in float64, rounded to BF16 as kernels of prompts do it.

    Codes times powers of two, as `random_experts` makes them, remain exact.
    """
    return dequantized(w).bfloat16().double()


def acts(h: Tensor, scores: Tensor, w: ExpertWeights[GpuLinear]) -> Tensor:
    """silu(gate) * up of every token and slot: [M, slots, I] float64."""
    rows, gate_up = [], stacked(w.gate_up)
    for token, pairs in zip(h.double(), routes(scores, w.chosen, w.shared, w.normed), strict=True):
        made = [rounded(gate_up[e]) @ token for e, _ in pairs]
        halves = [one.chunk(2) for one in made]
        rows.append(torch.stack([torch.nn.functional.silu(gate) * up for gate, up in halves]))
    return torch.stack(rows)


def added(act: Tensor, scores: Tensor, w: ExpertWeights[GpuLinear]) -> Tensor:
    """What the experts add to every token: [M, h] float64."""
    out, down = [], stacked(w.down)
    for slots, pairs in zip(
        act.double(), routes(scores, w.chosen, w.shared, w.normed), strict=True
    ):
        parts = [
            share * (rounded(down[e]) @ slot) for slot, (e, share) in zip(slots, pairs, strict=True)
        ]
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def scores_of(M: int, size: Size, device: str) -> Tensor:
    """Scores of which every other token has equal ones, zeros of both signs among them."""
    scores = 2 * torch.randn(M, size.E + size.shared, device=device)
    scores[1::2] = scores[1::2].round() / 2
    return torch.where(scores.abs() < 0.2, -0.0 * scores, scores)
