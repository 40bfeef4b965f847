"""Device functions for memory that lanes address themselves: loads, stores, a barrier, a counter.

Values are those of `mma`: what each lane holds, tensors of one element a thread. Order is as
written, since none of them is pure.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import as_float, as_word


@gluon.jit
def load16(address, OFFSET: gl.constexpr = 0):
    """16 bytes at an address of each lane, as four words.

    A weak load: what a kernel writes may be read after it; the compiler keeps it on its side of a
    programmatic wait.

    OFFSET: bytes beyond the address, which costs no instruction.
    """
    return gl.inline_asm_elementwise(
        f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def reload16(address, OFFSET: gl.constexpr = 0):
    """`load16` of what a loop reads in every turn: the compiler keeps no copy in registers."""
    return gl.inline_asm_elementwise(
        f"ld.relaxed.cta.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stream16(address, OFFSET: gl.constexpr = 0):
    """`load16` of what is read once: it takes no room in L1."""
    return gl.inline_asm_elementwise(
        f"ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stream16_if(address, wanted):
    """`stream16` of the lanes that want it, zeros in others.

    A load that nobody needs still costs its latency: registers are awaited in the order of loads.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=&r,=&r,=&r,=&r,l,r",
        [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load4(address, OFFSET: gl.constexpr = 0):
    """4 bytes at an address of each lane; see `load16`."""
    return gl.inline_asm_elementwise(
        f"ld.global.b32 $0, [$1 + {OFFSET}];",
        "=r,l",
        [address],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load4_l2(address):
    """`load4` from L2, where what a kernel left that has ended is seen without a wait for it."""
    return gl.inline_asm_elementwise(
        "ld.global.cg.b32 $0, [$1];",
        "=r,l",
        [address],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load8(address, OFFSET: gl.constexpr = 0):
    """8 bytes at an address of each lane, as two words; see `load16`."""
    return gl.inline_asm_elementwise(
        f"ld.global.v2.b32 {{$0, $1}}, [$2 + {OFFSET}];",
        "=r,=r,l",
        [address],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def shared_buffer(DECLARATION: gl.constexpr):
    """The address of shared memory that lanes address themselves; see `declaration`."""
    return gl.inline_asm_elementwise(DECLARATION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def declaration(size_bytes: int) -> str:
    """What `shared_buffer` takes for so many bytes, at most 48 KB; once a kernel."""
    return f".shared .align 16 .b8 staged[{size_bytes}]; mov.b32 $0, staged;"


@gluon.jit
def large_shared_buffer(never, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """The address of SIZE bytes of shared memory, which may be more than a kernel can declare.

    Triton asks the driver for what it has allocated itself, from the symbol `global_smem` on. A
    store that never happens keeps it from dropping the allocation.

    never: false, which the compiler must not know.

    SIZE: a multiple of 1 KB; see `large_size`.
    """
    L: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pieces = ()
    for bit in gl.static_range(10, 18):
        if SIZE & (1 << bit) != 0:
            pieces = pieces + (gl.allocate_shared_memory(gl.int32, [1 << (bit - 2)], FLAT),)
    if never:
        for i in gl.static_range(len(pieces)):
            pieces[i].slice(0, 32).store(gl.full([32], 0, gl.int32, layout=L))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


def large_size(size_bytes: int) -> int:
    """So many bytes, rounded up for `large_shared_buffer`."""
    return -(-size_bytes // 1024) * 1024


@gluon.jit
def store_shared16(address, words, inside):
    """Four words of each lane that is inside, to shared memory."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $6, 0; "
        "@p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;}",
        "=r,r,r,r,r,r,r",
        [address, words[0], words[1], words[2], words[3], inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_shared4(address, x, inside):
    """An FP32 of each lane that is inside, to shared memory."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, 0;}",
        "=r,r,f,r",
        [address, x, inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared4(address, OFFSET: gl.constexpr = 0):
    """An FP32 of shared memory for each lane; see `load16` for OFFSET."""
    return gl.inline_asm_elementwise(
        f"ld.shared.f32 $0, [$1 + {OFFSET}];",
        "=f,r",
        [address],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared8(address, OFFSET: gl.constexpr = 0):
    """Two words of shared memory for each lane; see `load16` for OFFSET."""
    return gl.inline_asm_elementwise(
        f"ld.shared.v2.b32 {{$0, $1}}, [$2 + {OFFSET}];",
        "=r,=r,r",
        [address],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_shared8(address, words, inside):
    """Two words of each lane that is inside, to shared memory."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0;}",
        "=r,r,r,r,r",
        [address, words[0], words[1], inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_shared16(address, OFFSET: gl.constexpr = 0):
    """16 bytes of shared memory for each lane, as four words; see `load16` for OFFSET."""
    return gl.inline_asm_elementwise(
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];",
        "=r,=r,=r,=r,r",
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def floats(at, COUNT: gl.constexpr):
    """COUNT FP32 side by side in shared memory, a multiple of 4."""
    loaded = ()
    for i in gl.static_range(COUNT // 4):
        w = load_shared16(at + i * 16)
        loaded = loaded + (as_float(w[0]), as_float(w[1]), as_float(w[2]), as_float(w[3]))
    return loaded


@gluon.jit
def barrier():
    """Every thread of the program waits for the others."""
    gl.inline_asm_elementwise(
        "bar.sync 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def warp_barrier():
    """Every lane of the warp waits for the others, and sees what they have put in shared memory."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store16(address, words, inside):
    """Four words of each lane that is inside, to global memory."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $6, 0; "
        "@p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;}",
        "=r,l,r,r,r,r,r",
        [address, words[0], words[1], words[2], words[3], inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store8(address, words, inside):
    """Two words of each lane that is inside, to global memory."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0;}",
        "=r,l,r,r,r",
        [address, words[0], words[1], inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_floats(pointer, values, inside):
    """FP32 side by side of each lane that is inside, to global memory; aligned like all of them."""
    if len(values) % 4 == 0:
        address = pointer.to(gl.int64, bitcast=True)
        for i in gl.static_range(0, len(values), 4):
            words = ()
            for j in gl.static_range(4):
                words = words + (as_word(values[i + j]),)
            store16(address + i * 4, words, inside)
    else:
        for i in gl.static_range(len(values)):
            gl.store(pointer + i, values[i], mask=inside)


@gluon.jit
def count_round(address, LAST: gl.constexpr, inside):
    """Count at an address for each lane that is inside, from 0 to LAST and then 0 again.

    Returns what the counter was before. Relaxed: a lane's loads have returned before it counts if
    their values have been used, but what it has stored may be seen later. Unlike `add`, which the
    compiler gathers over the warp, this does not wait for the counter before its value is used.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;}",
        "=&r,l,r,r",
        [address, LAST, inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def worth(condition):
    """The condition of a branch that only skips work; the emulator takes it in any case."""
    return condition


@gluon.jit
def recomputed(x):
    """X behind a move that the compiler does not see through.

    So addresses that follow from it are computed where they are needed, instead of being kept in
    registers through a loop.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
