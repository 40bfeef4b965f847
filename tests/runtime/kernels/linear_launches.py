"""Launches of linears that `test_compile` records: those of real models, of 1 to 64 tokens."""

import itertools
from collections.abc import Iterator
from functools import partial

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.kernels.codec import CODECS
from tests.runtime.kernels.meta_inputs import weight, zeros

EPS = 1e-6
# hidden, inner, rows of q, k and v, heads times their size
MODELS = {
    "0.6B": (1024, 3072, 4096, 2048),
    "1.7B": (2048, 6144, 4096, 2048),
    "4B": (2560, 9728, 6144, 4096),
    "8B": (4096, 12288, 6144, 4096),
    "14B": (5120, 17408, 7168, 5120),
    "3.5-27B": (5120, 17408, 16384, 6144),
    "32B": (5120, 25600, 10240, 8192),
}
LARGE = ("14B", "3.5-27B", "32B")
# Models and tokens in eight bits whose launches on Hopper are those of no other step: the share of
# `stream_int8` follows from all sizes, and `gemv_int8` and `gemm_int8` have what it leaves.
FEW = (("0.6B", 4), ("0.6B", 32), ("8B", 32), ("14B", 16), ("32B", 16))
VOCABULARY = 151936
TIGHTEST = [(8, 5120, 5120), (4, 5120, 17408)]  # of 14B, on compute capability 8.6
# Bits, rows and columns of other real linears, whose launches are those of no table.
UNMEASURED = [
    *((4, 3072, 8192), (4, 17408, 3072), (4, 20480, 3072)),  # 3.5-122B-A10B
    *((8, 3072, 8192), (8, 17408, 3072), (8, 20480, 3072), (8, 248320, 3072)),
    *((4, 4096, 14336), (8, 4096, 14336), (8, 128256, 4096)),  # Llama-3.1-8B
    *((4, 28672, 4096), (8, 28672, 4096)),
    *((8, 2048, 4096), (8, 9216, 2048), (8, 10240, 4096), (8, 12288, 4096)),  # 3.5-35B-A3B, 9B
    *((8, 14336, 5120), (8, 248320, 5120)),  # 3.5-27B
]


def linears_of_models(full: bool) -> Iterator[str]:
    """Linears of all models for a token, of some for several, and what the table has beside."""
    some = [("8B", 4), ("8B", 8), ("8B", 2), ("8B", 3)]
    whole = [(model, 4) for model in MODELS] + [(model, 8) for model in ("0.6B", "8B", *LARGE)]
    for model, bits in dict.fromkeys((*whole, *some)) if full else some:
        yield from linears(model, bits, 1)
    for tokens in (2, 4, 8, 16, 32, 64) if full else (4, 16, 32):
        yield from linears("8B", 4, tokens)
    if full:
        for bits, G, tokens in ((4, 64, 16), (4, 64, 32), (4, 64, 64), (4, 32, 64), (8, 32, 64)):
            yield from linears("8B", bits, tokens, G=G)
        yield from linears("0.6B", 8, 64)
        for tokens in (4, 16):
            yield from linears("0.6B", 8, tokens)
        for bits, tokens in itertools.product((4, 8), (2, 4, 8, 16, 32, 64)):
            yield from longest(bits, tokens)
        yield from measured(
            {size for model, bits in (*whole, *some) for size in sizes(model, bits)}
        )


def in_eight_bits(full: bool) -> Iterator[str]:
    """Linears whose inputs are rounded: of a token of all models, of several, and of a prompt."""
    from lowbit.runtime.backends import cuda

    for model, bits in itertools.product(MODELS, (4, 8)) if full else [("8B", 4), ("14B", 8)]:
        yield from linears(model, bits, 1, "int8")
    for bits, tokens in itertools.product((2, 3, 4, 8), (2, 4, 8, 16, 64, 600)):
        if full or (bits == 4 and tokens != 4):
            yield from linears("8B", bits, tokens, "int8")
    for (model, tokens), bits in itertools.product(FEW, (4, 8)) if full else ():
        yield from linears(model, bits, tokens, "int8")
    for bits, G in itertools.product((4, 8), (32, 64)) if full else ():
        for tokens in (1, 8, 32, 64, 600):
            x, w = zeros(tokens, 4096), weight(bits, 4096, 4096, G, activations="int8")
            cuda.product(x, w, added=x)
            yield f"G{G} INT{bits} B{tokens} int8"
    yield from behind_norms(full)
    for bits, tokens in [(8, 1), (8, 16), (8, 64), *([(4, 4), (4, 64)] if full else [])]:
        head = weight(bits, VOCABULARY, 4096, activations="int16")
        cuda.product(zeros(tokens, 4096), head, norm=zeros(4096), eps=EPS, logits=True)
        yield f"head INT{bits} B{tokens} int16"


def behind_norms(full: bool) -> Iterator[str]:
    """Linears of rotated models, whose tokens have one scale."""
    from lowbit.runtime.backends import cuda

    cases = [("8B", 4, 128, 2), ("8B", 4, 128, 16), ("8B", 4, 128, 600), ("14B", 8, 128, 1)]
    if full:
        cases = [(model, bits, 128, 1) for model in MODELS for bits in (4, 8)]
        cases += [("8B", bits, 128, n) for bits in (2, 3, 4, 8) for n in (2, 4, 8, 16, 64, 600)]
        cases += [(model, bits, 128, tokens) for model, tokens in FEW for bits in (4, 8)]
        cases += [("8B", bits, 32, n) for bits in (4, 8) for n in (1, 8, 32, 64, 600)]
    for model, bits, G, tokens in cases:
        hidden, inner, qkv, _ = MODELS[model]
        x, gain = zeros(tokens, hidden), zeros(hidden)
        for rows, paired in ((qkv, False), (2 * inner, True)):
            w = weight(bits, rows, hidden, G, paired=paired, activations="whole")
            cuda.product(x, w, norm=gain, eps=EPS, swiglu=paired)
        yield f"{model} INT{bits} G{G} B{tokens} whole"


def linears(
    model: str, bits: int, tokens: int, activations: Activations = "exact", G: int = 128
) -> Iterator[str]:
    """Every linear of a model."""
    from lowbit.runtime.backends import cuda

    hidden, inner, qkv, heads = MODELS[model]
    label = f"{model} INT{bits} B{tokens}" + ("" if activations == "exact" else " int8")
    label += "" if G == 128 else f" G{G}"
    made = partial(weight, G=G, activations=activations)
    x, gain = zeros(tokens, hidden), zeros(hidden)
    cuda.product(x, made(bits, qkv, hidden), norm=gain, eps=EPS)
    yield f"qkv {label}"
    cuda.product(zeros(tokens, heads), made(bits, hidden, heads), added=x)
    yield f"o {label}"
    cuda.product(x, made(bits, 2 * inner, hidden, paired=True), norm=gain, eps=EPS, swiglu=True)
    yield f"gate_up {label}"
    cuda.product(zeros(tokens, inner), made(bits, hidden, inner), added=x)
    yield f"down {label}"
    if bits == 8 and activations == "exact":
        cuda.product(x, made(8, VOCABULARY, hidden), norm=gain, eps=EPS, logits=True)
        yield f"head {label}"


def longest(bits: int, tokens: int) -> Iterator[str]:
    """The linears with the longest rows: `down` of the large models."""
    from lowbit.runtime.backends import cuda

    for K in (17408, 25600):
        cuda.product(zeros(tokens, K), weight(bits, 5120, K), added=zeros(tokens, 5120))
        yield f"5120x{K} INT{bits} B{tokens}"


def sizes(model: str, bits: int) -> set[tuple[int, int, int]]:
    """Bits, tiles and steps of a model's linears."""
    hidden, inner, qkv, heads = MODELS[model]
    shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
    return {(bits, N // 16, K // CODECS[bits].STEP_K) for N, K in shapes}


def lone(full: bool) -> Iterator[str]:
    """Every launch of real linears for a token; else those that come closest to spilling."""
    from lowbit.runtime.backends import cuda

    if not full:
        for bits, N, K in TIGHTEST:
            cuda.product(zeros(1, K), weight(bits, N, K), added=zeros(1, N))
            yield f"INT{bits} {N}x{K}"
        return
    models = [(model, bits) for model in MODELS for bits in (4, 8)]
    models += [("8B", 2), ("8B", 3)]
    for model, bits in models:
        yield from linears(model, bits, 1)
    yield from measured({size for model, bits in models for size in sizes(model, bits)})
    for bits, N, K in UNMEASURED:
        if N > K:
            cuda.product(zeros(1, K), weight(bits, N, K), norm=zeros(K), eps=EPS)
        else:
            cuda.product(zeros(1, K), weight(bits, N, K), added=zeros(1, N))
        yield f"INT{bits} {N}x{K}"


def measured(known: set[tuple[int, int, int]]) -> Iterator[str]:
    """Every other launch of the table, in front of attention or MLP or after them."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.kernels.launch.linear import measured

    for bits, tiles, steps in sorted(
        (measured("one").keys() - known) | measured("unpaired").keys()
    ):
        N, K = 16 * tiles, steps * CODECS[bits].STEP_K
        if N > K:
            cuda.product(zeros(1, K), weight(bits, N, K), norm=zeros(K), eps=EPS)
        else:
            cuda.product(zeros(1, K), weight(bits, N, K), added=zeros(1, N))
        yield f"INT{bits} {N}x{K}"
