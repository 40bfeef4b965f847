"""Device functions for memory of other GPUs: words that are pushed there, and the wait for them.

A word travels with its number in one store of 8 bytes, so that who sees the number has the word.
Peers' memory is written, never read.
"""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import inline
from lowbit.runtime.weights.share import Share

PACKET_BYTES = 8  # of a word and its number
PACKET = gl.constexpr(PACKET_BYTES)
MOST_PUSHED = 1 << 14  # words of a token that a product pushes


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory by which the GPUs of a model exchange words; see `exchange`."""

    share: Share  # this rank
    own: Tensor  # int64 of `exchange.buffer_words`, this rank's buffer, zeros at first
    addresses: Tensor  # [ranks] int64 on the device, of all buffers as this GPU sees them
    counters: Tensor  # [PROGRAMS] int32 on the device, blocks of each program so far
    numbers: Tensor  # [PUSHED_PROGRAMS] int32 on the device, tokens that were pushed so far
    aborted: Tensor  # [1] int32, page-locked memory of the host: not 0 once nobody waits any more
    wide_start: int  # bytes of the buffer before what `exchange_wide` pushes
    wide_values: int  # that it takes at most
    wide_counters: Tensor  # [PROGRAMS] int32 on the device, its launches so far by program
    mapping: object = None  # keeps the other ranks' buffers mapped


@gluon.jit
def push_word(address, word, number, inside):
    """Store a word and its number at an address of another GPU, in lanes that are inside."""
    inline(
        "{.reg .pred p; .reg .b64 both; setp.ne.s32 p, $4, 0; mov.b64 both, {$2, $3}; "
        "@p st.relaxed.sys.global.b64 [$1], both; mov.b32 $0, 0;}",
        "=r,l,r,r,r", (address, word, number, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def await_word(address, number, aborted, inside):
    """The word that another GPU has pushed with a number to an address of this one.

    Lanes that are not inside get 0, without a wait; so do all once `aborted` holds anything but 0.

    aborted: address of a word in memory of the host, which is looked at now and then.
    """
    return inline(
        """{
        .reg .pred done, later;
        .reg .b32 seen, tries, other;
        .reg .b64 both;
        mov.b32 $0, 0;
        mov.b32 tries, 0;
        setp.eq.s32 done, $4, 0;
        @done bra DONE;
        AGAIN:
        ld.relaxed.sys.global.b64 both, [$1];
        mov.b64 {$0, seen}, both;
        setp.eq.s32 done, seen, $2;
        @done bra DONE;
        add.s32 tries, tries, 1;
        and.b32 other, tries, 4095;
        setp.ne.s32 later, other, 0;
        @later bra AGAIN;
        ld.relaxed.sys.global.b32 other, [$3];
        setp.eq.s32 later, other, 0;
        @later bra AGAIN;
        mov.b32 $0, 0;
        DONE:
        }""",
        "=&r,l,r,l,r", (address, number, aborted, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def push_number(address, number, inside):
    """Store a number at an address of another GPU, in lanes that are inside, for `await_number`.

    Who sees it sees what this program had stored there before its last barrier.
    """
    inline(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; @p fence.acq_rel.sys; "
        "@p st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0;}",
        "=r,l,r,r", (address, number, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def await_number(address, number, aborted):
    """Wait for a number at an address of this GPU, or until `aborted` holds anything but 0."""
    inline(
        """{
        .reg .pred done, later;
        .reg .b32 seen, tries, other;
        mov.b32 tries, 0;
        AGAIN:
        ld.acquire.sys.global.b32 seen, [$1];
        setp.eq.s32 done, seen, $2;
        @done bra DONE;
        add.s32 tries, tries, 1;
        and.b32 other, tries, 4095;
        setp.ne.s32 later, other, 0;
        @later bra AGAIN;
        ld.relaxed.sys.global.b32 other, [$3];
        setp.eq.s32 later, other, 0;
        @later bra AGAIN;
        DONE:
        mov.b32 $0, 0;
        }""",
        "=r,l,r,l", (address, number, aborted),
    )  # fmt: skip


@gluon.jit
def fetch16(address):
    """Four words that another GPU has pushed to an address of this one, past `await_number`."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l",
        [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch8(address):
    """`fetch16` of two words."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.sys.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l",
        [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
