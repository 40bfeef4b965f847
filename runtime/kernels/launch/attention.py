"""Launches of attention for one step: how keys are split.

Measured on an H200; elsewhere the same but for `hopper_registers`.
"""

from dataclasses import dataclass
from typing import Literal

from lowbit.runtime.kernels.launch.device import STATIC_SHARED, power_of_two
from lowbit.runtime.thresholds import PROMPT_TOKENS, SEQUENCE_TOKENS


@dataclass(frozen=True, slots=True)
class KeySplit:
    """The order in which the keys before a token are added up; it decides every bit of the result.

    It follows from the sizes of heads alone, so a token has the same in any step and on any GPU.
    Up to `whole` keys there are `groups` splits that take turns; more keys are divided into splits
    of whole turns, as few turns as leave no more than `most` splits. In a turn each warp of a split
    takes its blocks, one warp after another. Warps are added up in order, then splits.
    """

    most: int  # splits of one sequence; a power of two
    warps: int  # of a split
    groups: int  # splits up to `whole` keys, 1 or 2
    blocks: int  # of 8 keys that a warp takes at a time: 1 or 2; 4 of codes, of half the bytes
    whole: int  # keys, a multiple of a turn of all groups

    @property
    def turn(self) -> int:
        """Keys that a split takes at a time."""
        return KEYS * self.blocks * self.warps


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Programs of a decode step's attention; nothing but `keys` changes a bit."""

    keys: KeySplit  # the order in which keys are added up
    splits: int  # for each kv head and token; 1 where a program takes all keys
    # of the columns of the values, where a program takes all keys: programs of a kv head that all
    # do
    parts: int = 1
    # turns of keys and values that a program loads at first, of `keys.whole` keys at most; 0 loads
    # each turn during the one before
    ahead: int = 0
    # whether the next kernel may start before this one has its input; where the keys are split,
    # while they are still read
    early: bool = False
    # of a thread on Hopper; None leaves them to the compiler. With more than 168 two programs of
    # four warps fit on a multiprocessor, not three; with more than 128 one of eight warps, not two.
    registers: int | None = None
    # one program takes all splits, a warp each in turn, and no kernel joins them
    joined: bool = False
    # of a program that takes all keys or all splits, by turns where they are fewer; None for those
    # of all groups
    warps: int | None = None
    # blocks of keys and values that a warp has in shared memory where keys are split: one in use,
    # the rest on their way; 0 loads one into registers while another is multiplied
    ring: int = 0


@dataclass(frozen=True, slots=True)
class Ring:
    """Shared memory of a warp's ring."""

    entry: int  # bytes of a block
    scales: int  # bytes from its begin to the words with scales
    bytes: int  # of all


KEYS = 8  # of a block
KEYS_OF_ONE = 256  # up to here a program takes all keys of a kv head
UNSPLIT = 1 << 30  # more keys than there are
PART = 64  # columns of the values
MOST_COLUMNS = 128  # for whose sums a program that joins splits has registers
WIDTH = 2048  # of all query heads; more make the kernels around attention large
SHORT = 1024  # keys
MOST_SPLITS = 64
REGISTERS = 224  # less makes Triton 3.9 spill
JOINED_REGISTERS = 128  # with which 16 warps fit on a multiprocessor
# Warps of a program that takes all keys: four on a multiprocessor, which load at different times.
NARROW = 4
MOST_WIDE = 256  # such programs of eight warps that run at a time; of more, narrow ones are faster
SHORT_TURN = 64  # keys of a split, of which narrow programs take more in turn without loss
LOADED = 4  # splits whose highest scores are loaded from shared memory at once
# Programs whose codes come through rings: bytes of a row, of a head; registers with which three
# of four warps fit on a multiprocessor; entries where the keys are split; programs from which on
# three at a time are faster than two or four; splits up to which four warps are.
RING_ROW = 128
RING_REGISTERS = 168
SPLIT_RING = 3
MANY_PROGRAMS = 1024
MOST_NARROW_SPLITS = 8
CROWDED = 128  # programs that leave no multiprocessor for more parts, nor for splits


def key_split(kv_heads: int, shared: int, head_dim: int, quantized: bool = False) -> KeySplit:
    """The order of keys for `shared` query heads on each of `kv_heads` kv heads.

    quantized: keys and values are INT8 codes.
    """
    wide_bytes = join_bytes(shared, head_dim, 8, 1, SEQUENCE_TOKENS, quantized)
    wide = head_dim > 128 and wide_bytes <= STATIC_SHARED
    most = min(MOST_SPLITS, (128 if wide else 256) // kv_heads)  # on some 130 multiprocessors
    return KeySplit(
        most=1 << max(most, 1).bit_length() - 1,
        warps=8 if wide else 4,
        groups=1 if wide else 2,
        blocks=4 if quantized else 2,
        whole=KEYS_OF_ONE if most > 1 else UNSPLIT,
    )


def attention_launch(
    kv_heads: int,
    shared: int,
    head_dim: int,
    max_kv_len: int,
    tokens: int,
    tokens_per_sequence: int = 1,
    quantized: bool = False,
    rings: bool = False,
) -> AttentionLaunch:
    """The programs of a step of `tokens` tokens at positions below `max_kv_len`.

    Args:
        shared: query heads of each.
        max_kv_len: keys that there may be.
        tokens_per_sequence: most of them of one sequence, a power of two.
        quantized: keys and values are INT8 codes.
        rings: a multiprocessor has shared memory for rings, as Hopper's, and pages have an even
            number of kv heads, whose scales two share a word.
    """
    keys = key_split(kv_heads, shared, head_dim, quantized)
    width = shared * kv_heads * head_dim
    if max_kv_len <= keys.whole:
        parts = max(1, head_dim // PART)
        warps = keys.warps * keys.groups
        while parts > 1 and tokens * kv_heads * parts > CROWDED:
            fewer = join_bytes(shared, head_dim, warps, parts // 2, SEQUENCE_TOKENS, quantized)
            if fewer > STATIC_SHARED:
                break
            parts //= 2
        many = tokens * kv_heads * parts > MOST_WIDE
        if tokens_per_sequence == 1 and many and head_dim == 128:
            return AttentionLaunch(
                keys, 1, parts, early=width <= WIDTH, registers=JOINED_REGISTERS, warps=NARROW
            )
        near = max_kv_len <= KEYS_OF_ONE and head_dim // parts <= PART
        ahead = KEYS_OF_ONE // (keys.turn * keys.groups) if near else 0
        return AttentionLaunch(keys, 1, parts, ahead, early=width <= WIDTH)
    splits = min(-(-max_kv_len // keys.turn), keys.most)
    ringed = rings and quantized and head_dim == RING_ROW
    parts = max(1, head_dim // MOST_COLUMNS)
    crowded = tokens_per_sequence == 1 and tokens * kv_heads * parts > CROWDED
    spills = quantized and head_dim > 128  # eight blocks of a split, which one warp would take
    if crowded and not spills and max_kv_len <= keys.most * keys.turn:
        rounded = max(power_of_two(splits), LOADED)
        if (
            join_bytes(shared, head_dim, rounded, parts, tokens_per_sequence, quantized)
            <= STATIC_SHARED
        ):
            if ringed:
                return _ringed(keys, rounded, tokens * kv_heads)
            short = keys.turn <= SHORT_TURN and tokens * kv_heads * parts > MOST_WIDE
            warps = NARROW if rounded <= NARROW or short else None
            capped = head_dim == 128 and not quantized  # codes in registers would spill
            registers = JOINED_REGISTERS if capped else None
            return AttentionLaunch(
                keys, rounded, parts, registers=registers, joined=True, warps=warps
            )
    early = head_dim > 128 or width > WIDTH or max_kv_len <= SHORT
    if ringed and tokens > 1:
        return AttentionLaunch(keys, splits, early=early, registers=RING_REGISTERS, ring=SPLIT_RING)
    registers = REGISTERS if tokens == 1 and head_dim == 128 else None
    return AttentionLaunch(keys, splits, early=early, registers=registers)


def _ringed(keys: KeySplit, splits: int, programs: int) -> AttentionLaunch:
    """So many programs that join splits of codes, which come through rings."""
    many = programs >= MANY_PROGRAMS
    narrow = splits <= (MOST_NARROW_SPLITS if many else NARROW)
    return AttentionLaunch(
        keys,
        splits,
        registers=RING_REGISTERS if narrow and many else JOINED_REGISTERS,
        joined=True,
        warps=NARROW if narrow else 2 * NARROW,
        ring=3 if narrow and many else 2,
    )


def ring_of(launch: AttentionLaunch, head_dim: int, quantized: bool) -> Ring:
    """The shared memory of a warp's ring, of rows of whole heads."""
    rows = launch.keys.blocks * KEYS
    entry = rows * head_dim * (1 if quantized else 2)
    scales = 0
    if quantized:  # of all blocks of a split, or of those of two turns
        scales = 2 * 4 * (launch.keys.turn if launch.joined else 2 * rows)
    return Ring(entry, launch.ring * entry, launch.ring * entry + scales)


def join_bytes(
    shared: int,
    head_dim: int,
    warps: int,
    parts: int,
    tokens_per_sequence: int,
    quantized: bool = False,
) -> int:
    """Shared memory of an attention program: queries and new keys, then sums of each warp."""
    sums = 4 * -(-head_dim // (64 * parts)) * 128 * -(-shared // 2)
    return heads_bytes(shared, head_dim, tokens_per_sequence, quantized) + warps * (64 + sums)


def heads_bytes(shared: int, head_dim: int, tokens_per_sequence: int, quantized: bool) -> int:
    """Shared memory of queries and new keys; of codes also new values and all scales.

    Queries have two bytes an element then too, in rows of their own.
    """
    row = head_row_bytes(head_dim, quantized)
    if not quantized:
        return (shared + tokens_per_sequence) * row
    return (
        2 * (shared + tokens_per_sequence) * row + -(-(shared + 2 * tokens_per_sequence) // 4) * 16
    )


def head_row_bytes(head_dim: int, quantized: bool) -> int:
    """Bytes from one head in shared memory to the next, padded so that they share no bank."""
    return (1 if quantized else 2) * head_dim + 64


@dataclass(frozen=True, slots=True)
class PromptLaunch:
    """Share of a program of a prompt's attention."""

    tokens: int  # that it takes, of one query head
    keys: int  # that it takes at a time
    warps: int  # of a program
    stages: int  # of keys and values on their way


@dataclass(frozen=True, slots=True)
class BlockLaunch:
    """Programs of the attention of blocks of drafts, whose bits may depend on all of it."""

    rows: int  # queries of a program, of one kv head
    keys: int  # that it takes at a time
    splits: int  # of the keys before a block; a power of two
    warps: int  # of a program


BLOCK_ROWS = 16  # fewest queries of a program, which a tensor core's tile has
BLOCK_SUMS = 8192  # most of a program, of eight warps; half as many take four
BLOCK_KEYS = 256  # keys that are not split
MOST_BLOCK_SPLITS = 16


def block_launch(rows: int, kv_heads: int, head_dim: int, keys: int) -> BlockLaunch:
    """The launch for blocks of drafts, on tensor cores.

    Args:
        rows: queries of a block and kv head.
        kv_heads: those of all blocks.
        head_dim: elements of a head.
        keys: that there may be before a block.
    """
    taken = min(max(power_of_two(rows), BLOCK_ROWS), BLOCK_SUMS // head_dim)
    programs = kv_heads * -(-rows // taken)
    splits = min(power_of_two(-(-keys // BLOCK_KEYS)), MOST_BLOCK_SPLITS)
    while splits > 1 and programs * splits > 2 * CROWDED:
        splits //= 2
    warps = 8 if taken * head_dim == BLOCK_SUMS else 4
    return BlockLaunch(taken, 16 if head_dim > 128 else 32, splits, warps)


HOPPER_DIMS = (64, 128, 256)  # of heads that `attend_on_hopper` takes
ANY_TOKENS = 1 << 30  # more than a chunk has
Way = Literal["hopper", "blocks", "torch"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of a chunk of prompts that a kernel takes; a constant of it.

    A lone one is taken however many tokens it has.
    """

    sequences: int  # B, of all of the chunk
    fewest: int = 1  # tokens of a sequence that is taken
    most: int = ANY_TOKENS  # tokens of a sequence that is taken

    def blocks(self, tokens: int, each: int) -> int:
        """Most blocks of `each` tokens that a chunk of so many tokens may have."""
        return (tokens + (each - 1) * min(self.sequences, tokens // self.fewest)) // each


def prompt_way(tokens: int, head_dim: int, hopper: bool) -> Way:
    """Attention of so many tokens of a sequence: large programs, small ones, or PyTorch's."""
    if tokens <= PROMPT_TOKENS:
        return "blocks"
    if hopper:
        return "hopper" if head_dim in HOPPER_DIMS else "blocks"
    return "torch"


def prompt_ways(tokens: int, sequences: int, head_dim: int, hopper: bool) -> dict[Way, Packed]:
    """Ways of a chunk's attention, and the sequences that each takes: none is taken twice.

    A lone sequence goes by the chunk's tokens, with padding. Of several each goes by its own, so
    that it has the bits that it has alone.

    Raises:
        ValueError: several sequences, for which PyTorch's attention would be needed.
    """
    way = prompt_way(tokens, head_dim, hopper)
    if sequences == 1 or way == "blocks":
        return {way: Packed(sequences)}
    if way == "torch":
        raise ValueError(f"{sequences} sequences in {tokens} tokens: PyTorch attends to one")
    return {
        "blocks": Packed(sequences, most=PROMPT_TOKENS),
        way: Packed(sequences, fewest=PROMPT_TOKENS + 1),
    }


def prompt_launch(head_dim: int) -> PromptLaunch:
    """The launch for a prompt's short chunk: two programs in 99 KB of shared memory."""
    return PromptLaunch(16, 64 if head_dim <= 128 else 32, 4, 2)
