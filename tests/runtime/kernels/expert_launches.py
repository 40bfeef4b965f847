"""Launches of mixtures of experts for `test_compile`."""

from collections.abc import Iterator
from dataclasses import replace

from tests.runtime.kernels.meta_inputs import tiled_experts, zeros

EXPERTS_TOGETHER = {
    "experts_groups",
    "experts_gate_up_together",
    "experts_down_together",
    "experts_weigh",
}
EXPERTS_INT8 = {
    "experts_gate_up_int8",
    "experts_down_int8",
    "experts_lists",
    "quantize",
    "experts_gate_up_int8_grouped",
    "experts_down_int8_grouped",
}
EXPERTS_DECODE = {"experts_route", "experts_gate_up", "experts_down"} | EXPERTS_TOGETHER
EXPERTS_DECODE |= EXPERTS_INT8
EXPERTS_PREFILL = {"experts_blocks", "experts_gate_up_gemm", "experts_down_gemm", "experts_sum"}
EPS = 1e-6


def tokens_of(full: bool, bits: int, shared: bool) -> tuple[int, ...]:
    """Steps and prompts: several tokens, and INT8 prompts of one size, on one card."""
    few = (1, 4, 16) if full else (1, 16)  # 16 read an expert together
    return (*few, 1024) if bits == 4 or (full and shared) else few


def mixtures(full: bool) -> Iterator[str]:
    """Experts of Qwen3.5-35B-A3B and Qwen3-30B-A3B, for a step and for a prompt."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.weights.linear import ExpertWeights

    # hidden, experts, width of one, a shared one
    sizes = [(2048, 256, 512, True), (2048, 128, 768, False)]
    for h, E, inner, shared in sizes if full else sizes[:1]:
        for bits in (4, 8):
            count = E + shared
            experts = ExpertWeights(
                router=zeros(count, h),
                gate_up=tiled_experts(bits, count, 2 * inner, h, paired=True),
                down=tiled_experts(bits, count, h, inner),
                chosen=8,
                shared=shared,
            )
            for tokens in tokens_of(full, bits, shared):
                cuda.moe(zeros(tokens, h), zeros(h), EPS, experts)
                yield f"{E} of {inner} INT{bits} B{tokens}"
            rounded = replace(
                experts,
                gate_up=tiled_experts(bits, count, 2 * inner, h, True, "int8"),
                down=tiled_experts(bits, count, h, inner, activations="int8"),
            )
            for tokens in tokens_of(full, bits, shared):
                cuda.moe(zeros(tokens, h), zeros(h), EPS, rounded)
                yield f"{E} of {inner} INT{bits} A8 B{tokens}"
            if full and bits == 4 and not shared:
                for tokens in (1, 4):
                    cuda.moe(zeros(tokens, h), zeros(h), EPS, replace(experts, normed=False))
                    yield f"{E} of {inner} INT{bits} B{tokens} unnormed"
