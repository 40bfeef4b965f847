"""The one choice of a linear's product: which kernel multiplies so many tokens, and its launch."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lowbit.formats.activations import activation_group
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.launch.card import Card, power_of_two
from lowbit.runtime.kernels.launch.int8 import STEP_K, Int8Launch, int8_launch
from lowbit.runtime.kernels.launch.linear import (
    MOST_AHEAD,
    GemvLaunch,
    Tuned,
    WgmmaLaunch,
    gemv_int8_launch,
    gemv_launch,
    wgmma_launch,
)
from lowbit.runtime.kernels.launch.stream import StreamLaunch, stream_launch
from lowbit.runtime.kernels.linear.program import Packed, int8_bytes, places_bytes, places_of
from lowbit.runtime.kernels.linear.tiles import TILE, GpuLinear
from lowbit.runtime.thresholds import (
    DENSE_TOKENS,
    GEMV_TOKENS,
    INT8_GEMV_TOKENS,
    PACKED_TOKENS,
    ROWS_TOKENS,
    WGMMA_TOKENS,
)
from lowbit.runtime.weights.linear import DenseLinear

Size = tuple[int, int, int, bool]  # bits, tiles, steps, paired
WGMMA_BITS = (4, 8)  # of codes that `gemm_int8` multiplies
# Tokens from which Hopper rounds x before a product, of STREAM_K columns and more, and of all: with
# fewer each program of `gemv_int8` rounds them sooner for itself.
STREAM_TOKENS, STREAM_K, STREAM_ALL = 3, 4096, 5
GEMM_K = 128  # columns of a step of `gemm`, which takes no weight of one step


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to multiply tokens by a weight."""

    # kernel: `gemv` and `wgmma` multiply packed codes; `gemv`, `stream`, `int8` and `mma` by x
    # in eight bits; `gemm` widens codes in registers, `widened` in memory, for cuBLAS; `rows` and
    # `cublas` multiply dense rows
    way: Literal["gemv", "wgmma", "gemm", "stream", "int8", "mma", "widened", "rows", "cublas"]
    most: int  # tokens of a launch, of which more tokens take several
    room: int = 0  # power of two of tokens that the launch of a packed weight has room for
    # share of a program of `gemv`, `wgmma`, `stream` or `int8`
    launch: GemvLaunch | WgmmaLaunch | StreamLaunch | Int8Launch | None = None
    parts: int = 1  # into which these divide K
    staged: bool = False  # programs of `gemv` turn x into digits; else a kernel before does

    @property
    def int8(self) -> Int8Launch:
        """The launch of `gemm_int8`."""
        if not isinstance(self.launch, Int8Launch):
            raise TypeError(f"{self.way} has no launch of a product in eight bits")
        return self.launch

    @property
    def stream(self) -> StreamLaunch:
        """The launch of `stream_int8`."""
        if not isinstance(self.launch, StreamLaunch):
            raise TypeError(f"{self.way} has no launch of a product of few tokens in eight bits")
        return self.launch

    @property
    def gemv(self) -> GemvLaunch:
        """The launch of `gemv`."""
        if not isinstance(self.launch, GemvLaunch):
            raise TypeError(f"{self.way} has no launch of a GEMV")
        return self.launch


def choose(
    w: GpuLinear,
    tokens: int,
    card: Card,
    *,
    normed: bool = False,
    logits: bool = False,
    beside: bool = False,
) -> Variant:
    """The fastest product of a weight for so many tokens; a token's bits are the same in any few.

    Args:
        tokens: of a step or a chunk.
        normed: x is, by the gain of a norm.
        logits: the result is FP32, and exact inputs are not multiplied by `gemm`.
        beside: with dense rows in the same launch (`takes_rows`).
    """
    if isinstance(w, DenseLinear):
        return Variant("rows" if tokens <= DENSE_TOKENS else "cublas", DENSE_TOKENS)
    whole = w.N % TILE == 0
    if w.activations == "int8":
        return int8_variant(w.constants, w.size, whole, w.tuned, card, (tokens, normed))
    asked = tokens, normed, logits, beside
    return packed_variant(w.constants, w.size, whole, w.tuned, card, asked)


@cache
def packed_variant(
    W: Packed,
    size: Size,
    whole: bool,
    tuned: Tuned,
    card: Card,
    asked: tuple[int, bool, bool, bool],
) -> Variant:
    """See `choose`; whole: there are no padded rows; asked: its arguments after the card."""
    bits, tiles, steps, paired = size
    tokens, normed, logits, beside = asked
    count = card.multiprocessors
    if tokens > PACKED_TOKENS:
        fits = whole and W.K > GEMM_K and W.SCALES == "bf16"
        return Variant("gemm" if card.is_hopper and fits and not logits else "widened", tokens)
    parts = gemv_launch(bits, tiles, steps, 1, paired, tuned).parts

    def on_hopper(room: int) -> WgmmaLaunch | None:
        if beside or not card.is_hopper or W.SCALES == "fp32" or room not in MOST_AHEAD:
            return None
        return wgmma_launch(bits, tiles, steps, W.G, room, parts, count)

    def on_any(room: int) -> Variant:
        measured = gemv_launch(bits, tiles, steps, room, paired, tuned, count)
        launch, staged = _staged(W, measured, room, normed, card.shared_bytes)
        return Variant("gemv", most, room, launch, launch.parts, staged)

    most = WGMMA_TOKENS if on_hopper(WGMMA_TOKENS) else GEMV_TOKENS
    room = power_of_two(min(tokens, most))
    if hopper := on_hopper(room):
        return Variant("wgmma", most, room, hopper, parts)
    found = on_any(room)
    # The kernel for one token has no other way than to stage it.
    return found if found.staged or room > 1 else on_any(2)


@cache
def int8_variant(
    W: Packed,
    size: Size,
    whole: bool,
    tuned: Tuned,
    card: Card,
    asked: tuple[int, bool],
) -> Variant:
    """`packed_variant` of a weight whose inputs are rounded to eight bits.

    asked: tokens, and whether they are normed.

    Raises:
        UnsupportedModelError: a row that fits no kernel's shared memory.
    """
    bits, tiles, steps, paired = size
    tokens, normed = asked
    by_wgmma = whole and card.is_hopper and bits in WGMMA_BITS
    group, row_steps = activation_group(W.G, W.K), -(-W.K // STEP_K)
    long = W.K >= STREAM_K and tokens >= STREAM_TOKENS
    if by_wgmma and (long or tokens >= STREAM_ALL):
        few = stream_launch(bits, tiles, row_steps, group, tokens, card.multiprocessors, W.WHOLE)
        if few is not None:
            return Variant("stream", tokens, launch=few)
    room = power_of_two(min(tokens, INT8_GEMV_TOKENS))
    while room > 0 and (tokens <= INT8_GEMV_TOKENS or not whole):
        one = gemv_launch(bits, tiles, steps, 1, paired, tuned, card.multiprocessors)
        share = gemv_int8_launch(one, bits, tiles, W.K, room, card.multiprocessors)
        launch = _fitting_launch(W, share, room, normed, card)
        if launch is not None:
            return Variant("gemv", room, room, launch, launch.parts, staged=True)
        room = 0 if whole else room // 2
    if not whole:
        raise UnsupportedModelError(
            f"rows of {W.K} columns have no GPU kernel with activations in eight bits",
            hint="use --activations exact",
        )
    if by_wgmma:
        sizes = bits, tiles * TILE, row_steps, group, W.SCALES == "fp32"
        own = int8_launch(*sizes, tokens, card.multiprocessors, W.WHOLE)
        if own is not None:
            return Variant("int8", tokens, launch=own)
    return Variant("mma", tokens)


def _fitting_launch(
    W: Packed, launch: GemvLaunch, tokens: int, normed: bool, card: Card
) -> GemvLaunch | None:
    """Shrink a launch of `gemv_int8` until it fits shared memory; None where x alone does not."""
    for own in (launch, replace(launch, tiles=1, rounds=launch.rounds * launch.tiles)):
        if int8_bytes(W, own, tokens, normed) <= card.shared_bytes:
            return own
    return None


def takes_rows(tokens: int) -> bool:
    """True if the launch of a packed weight multiplies rows of a dense one, too."""
    return tokens <= ROWS_TOKENS


def _staged(
    W: Packed, launch: GemvLaunch, tokens: int, normed: bool, limit: int
) -> tuple[GemvLaunch, bool]:
    """The launch as it can be, and whether its programs stage x in so much shared memory."""
    if tokens == 1 and launch.split > 1 and normed:  # every program needs all squares
        launch = replace(
            launch, warps=launch.parts, warp_groups=1, rounds=1, split=1, registers=128
        )
    places = places_of(W.K, launch, tokens, W.CODEC.STEP_K)
    needed = places_bytes(places, normed) + launch.sums_bytes(tokens)
    alone = launch.split == 1 or tokens == 1
    return launch, launch.staged and alone and needed <= limit
