"""Device functions for memory that lanes address themselves: loads, stores, copies, barriers.

Values are those of `mma`: what each lane holds, tensors of one element a thread. All run in the
order in which they are written, since none of them is pure.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.launch.device import STATIC_SHARED as STATIC
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, inline

STATIC_SHARED = gl.constexpr(STATIC)


@gluon.jit
def load16(address, OFFSET: gl.constexpr = 0):
    """16 bytes at an address of each lane, as four words.

    A weak load: it may read what this kernel has written, and the compiler does not move it across
    a programmatic wait.

    OFFSET: bytes beyond the address, which costs no instruction.
    """
    return _load(address, OFFSET, "ld.global", "l", 4)


@gluon.jit
def reload16(address, OFFSET: gl.constexpr = 0):
    """`load16` for a loop that reads the same in every turn: no copy is kept in registers."""
    return _load(address, OFFSET, "ld.relaxed.cta.global", "l", 4)


@gluon.jit
def stream16(address, OFFSET: gl.constexpr = 0):
    """`load16` for values that are read once: they take no room in L1."""
    return _load(address, OFFSET, "ld.global.L1::no_allocate", "l", 4)


@gluon.jit
def load_shared16(address, OFFSET: gl.constexpr = 0):
    """`load16` from shared memory."""
    return _load(address, OFFSET, "ld.shared", "r", 4)


@gluon.jit
def load_shared16_if(address, wanted, OFFSET: gl.constexpr = 0):
    """`load_shared16` in lanes where `wanted` holds, anything in the others."""
    return gl.inline_asm_elementwise(
        f"""{{
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        @p ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];
        }}""",
        "=r,=r,=r,=r,r,r", [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_matrices(address, OFFSET: gl.constexpr = 0):
    """Four 8 x 8 matrices of 16 bits from shared memory, a word of each to every lane.

    Lanes 8 * j to 8 * j + 7 have the addresses of the rows of matrix j, 16 bytes each; lane
    4 * g + t gets the t-th word of row g.
    """
    return gl.inline_asm_elementwise(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];",
        "=r,=r,=r,=r,r", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load8(address, OFFSET: gl.constexpr = 0):
    """8 bytes at an address of each lane, as two words; see `load16`."""
    return _load(address, OFFSET, "ld.global", "l", 2)


@gluon.jit
def load_shared8(address, OFFSET: gl.constexpr = 0):
    """`load8` from shared memory."""
    return _load(address, OFFSET, "ld.shared", "r", 2)


@gluon.jit
def load4(address, OFFSET: gl.constexpr = 0):
    """4 bytes at an address of each lane; see `load16`."""
    return _load(address, OFFSET, "ld.global", "l", 1)


@gluon.jit
def load4_l2(address):
    """`load4` from L2: sees what a kernel that has ended wrote, without a wait for it."""
    return _load(address, 0, "ld.global.cg", "l", 1)


@gluon.jit
def load_shared4(address, OFFSET: gl.constexpr = 0):
    """An FP32 of shared memory for each lane; see `load16` for OFFSET."""
    return gl.inline_asm_elementwise(
        f"ld.shared.f32 $0, [$1 + {OFFSET}];", "=f,r", [address],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load(
    address, OFFSET: gl.constexpr, LOAD: gl.constexpr, POINTER: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """COUNT words of each lane: a tuple, but for one."""
    if COUNT == 4:
        words = gl.inline_asm_elementwise(
            f"{LOAD}.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];", f"=r,=r,=r,=r,{POINTER}",
            [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    elif COUNT == 2:
        words = gl.inline_asm_elementwise(
            f"{LOAD}.v2.b32 {{$0, $1}}, [$2 + {OFFSET}];", f"=r,=r,{POINTER}",
            [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = gl.inline_asm_elementwise(
            f"{LOAD}.b32 $0, [$1 + {OFFSET}];", f"=r,{POINTER}",
            [address], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return words


@gluon.jit
def stream8(address, OFFSET: gl.constexpr = 0):
    """`stream16` of 8 bytes, as two words."""
    return _load(address, OFFSET, "ld.global.L1::no_allocate", "l", 2)


@gluon.jit
def stream8_if(address, wanted):
    """`stream16_if` of 8 bytes, as two words."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $3, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        @p ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];
        }""",
        "=&r,=&r,l,r",
        [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stream16_if(address, wanted):
    """`stream16` in lanes where `wanted` holds, zeros in the others.

    A load that nobody needs would cost its latency: registers are awaited in the order of loads.
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
def stream8_or_any(address, wanted):
    """`stream8` in lanes where `wanted` holds, anything in the others."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $3, 0;
        @p ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];
        }""",
        "=r,=r,l,r",
        [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stream16_or_any(address, wanted):
    """`stream16` in lanes where `wanted` holds, anything in the others."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=r,=r,=r,=r,l,r",
        [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def shared_buffer(DECLARATION: gl.constexpr):
    """The address of the shared memory that DECLARATION declares; see `declaration`."""
    return inline(DECLARATION, "=r", ())


@gluon.constexpr_function
def declaration(size_bytes):
    """PTX that declares shared memory, at most 48 KB, once per kernel; for `shared_buffer`."""
    return f".shared .align 16 .b8 staged[{size_bytes}]; mov.b32 $0, staged;"


@gluon.jit
def shared_memory(SIZE: gl.constexpr, WARPS: gl.constexpr, never):
    """The address of SIZE bytes of shared memory; see `large_shared_buffer` for `never`."""
    if SIZE > STATIC_SHARED:
        at = large_shared_buffer(never, (SIZE + 1023) // 1024 * 1024, WARPS)
    else:
        at = shared_buffer(declaration(SIZE))
    return at


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
    return inline("mov.b32 $0, global_smem;", "=r", ())


def large_size(size_bytes: int) -> int:
    """Round a size up for `large_shared_buffer`."""
    return -(-size_bytes // 1024) * 1024


@gluon.jit
def store16(address, words, inside):
    """Store four words of each lane that is inside to global memory."""
    _store(address, words, inside, "st.global", "l")


@gluon.jit
def store_shared16(address, words, inside):
    """Store four words of each lane that is inside to shared memory."""
    _store(address, words, inside, "st.shared", "r")


@gluon.jit
def store8(address, words, inside):
    """Store two words of each lane that is inside to global memory."""
    _store(address, words, inside, "st.global", "l")


@gluon.jit
def store_shared8(address, words, inside):
    """Store two words of each lane that is inside to shared memory."""
    _store(address, words, inside, "st.shared", "r")


@gluon.jit
def store_shared4(address, x, inside):
    """Store an FP32 of each lane that is inside to shared memory."""
    inline(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, 0;}",
        "=r,r,f,r", (address, x, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def store_shared2(address, word, inside):
    """Store the lower 16 bits of a word of each lane that is inside to shared memory."""
    inline(
        "{.reg .pred p; .reg .b16 low; setp.ne.s32 p, $3, 0; cvt.u16.u32 low, $2; "
        "@p st.shared.b16 [$1], low; mov.b32 $0, 0;}",
        "=r,r,r,r", (address, word, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def _store(address, words, inside, STORE: gl.constexpr, POINTER: gl.constexpr):
    CODE: gl.constexpr = _store_code(STORE, len(words))
    KINDS: gl.constexpr = f"=r,{POINTER}" + ",r" * (len(words) + 1)
    inline(CODE, KINDS, (address,) + words + (inside.to(gl.int32),))


@gluon.constexpr_function
def _store_code(store, count):
    values = ", ".join(f"${2 + i}" for i in range(count))
    return (
        f"{{.reg .pred p; setp.ne.s32 p, ${2 + count}, 0; "
        f"@p {store}.v{count}.b32 [$1], {{{values}}}; mov.b32 $0, 0;}}"
    )


@gluon.jit
def copy16(target, source, OFFSET: gl.constexpr = 0, AT: gl.constexpr = 0):
    """Begin to copy 16 bytes of each lane from global to shared memory; see `wait_copies`.

    OFFSET, AT: bytes beyond source and target, which cost no instruction.
    """
    CODE: gl.constexpr = (
        f"cp.async.cg.shared.global [$1 + {AT}], [$2 + {OFFSET}], 16; mov.b32 $0, 0;"
    )
    inline(CODE, "=r,r,l", (target, source))


@gluon.jit
def copy16_or_zeros(
    target, source, inside, AT: gl.constexpr = 0, OFFSET: gl.constexpr = 0
):  # fmt: skip
    """`copy16` in lanes that are inside; the others store zeros."""
    CODE: gl.constexpr = (
        f"cp.async.cg.shared.global [$1 + {AT}], [$2 + {OFFSET}], 16, $3; mov.b32 $0, 0;"
    )
    inline(CODE, "=r,r,l,r", (target, source, gl.where(inside, 16, 0)))


@gluon.jit
def copy4(target, source, OFFSET: gl.constexpr = 0, AT: gl.constexpr = 0):
    """`copy16` of 4 bytes."""
    CODE: gl.constexpr = (
        f"cp.async.ca.shared.global [$1 + {AT}], [$2 + {OFFSET}], 4; mov.b32 $0, 0;"
    )
    inline(CODE, "=r,r,l", (target, source))


@gluon.jit
def commit_copies():
    """End a batch of copies."""
    inline("cp.async.commit_group; mov.b32 $0, 0;", "=r", ())


@gluon.jit
def wait_copies(OPEN: gl.constexpr):
    """Wait for this thread's copies, but for those of its last OPEN batches."""
    CODE: gl.constexpr = f"cp.async.wait_group {OPEN}; mov.b32 $0, 0;"
    inline(CODE, "=r", ())


@gluon.jit
def floats(at, COUNT: gl.constexpr):
    """COUNT consecutive FP32 of shared memory; COUNT: a multiple of 4."""
    loaded = ()
    for i in gl.static_range(COUNT // 4):
        w = load_shared16(at + i * 16)
        loaded = loaded + (as_float(w[0]), as_float(w[1]), as_float(w[2]), as_float(w[3]))
    return loaded


@gluon.jit
def barrier():
    """Wait for every thread of the program."""
    inline("bar.sync 0; mov.b32 $0, 0;", "=r", ())


@gluon.jit
def warp_barrier():
    """Wait for every lane of the warp, and for what it has stored in shared memory."""
    inline("bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", ())


@gluon.jit
def store_floats(pointer, values, inside):
    """Store consecutive FP32 of each lane inside to global memory, aligned to their size."""
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
    """Add one to a counter for each lane that is inside; after LAST it is 0 again.

    Returns the counter before. Relaxed: loads whose values the lane has used are done before it
    counts, but others may see its stores later. Unlike `add`, which the compiler gathers over the
    warp, this does not wait for the counter before its value is used.
    """
    return inline(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;}",
        "=&r,l,r,r", (address, LAST, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def count_warp(address, LAST: gl.constexpr, inside):
    """Add one to a counter for the warp, once its lanes have stored; after LAST it is 0 again.

    Returns the counter before, in every lane: where that is LAST, the lanes can load what the warps
    that counted before have stored.
    """
    warp_barrier()
    return inline(
        "{.reg .pred p, q; setp.ne.s32 p, $3, 0; fence.acq_rel.gpu; mov.b32 $0, 0; "
        "mov.b32 $0, %laneid; setp.eq.and.s32 q, $0, 0, p; mov.b32 $0, 0; "
        "@q atom.relaxed.gpu.global.inc.u32 $0, [$1], $2; "
        "shfl.sync.idx.b32 $0, $0, 0, 31, -1; fence.acq_rel.gpu;}",
        "=&r,l,r,r", (address, LAST, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def publish(address, lane):
    """Add one to a counter for the warp, once its lanes have stored what they have."""
    warp_barrier()
    inline(
        "{.reg .pred p; setp.eq.s32 p, $2, 0; fence.acq_rel.gpu; "
        "@p red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0;}",
        "=r,l,r", (address, lane),
    )  # fmt: skip


@gluon.jit
def await_published(address, COUNT: gl.constexpr):
    """Wait until so many warps have published; then what they stored can be loaded."""
    inline(
        """{
        .reg .pred less;
        .reg .b32 seen;
        AGAIN:
        ld.relaxed.gpu.global.u32 seen, [$1];
        setp.lt.u32 less, seen, $2;
        @less bra AGAIN;
        fence.acq_rel.gpu;
        mov.b32 $0, 0;
        }""",
        "=r,l,n", (address, COUNT),
    )  # fmt: skip
    warp_barrier()


@gluon.jit
def count_shared(address, LAST: gl.constexpr, inside):
    """`count_round` of a counter in shared memory, which orders what is read before and behind."""
    return inline(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; "
        "@p atom.acq_rel.cta.shared::cta.inc.u32 $0, [$1], $2;}",
        "=&r,r,r,r", (address, LAST, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def recomputed(x):
    """The same x, of which the compiler knows nothing.

    So addresses that follow from it are computed where they are needed, instead of being kept in
    registers through a loop.
    """
    return inline("mov.b32 $0, $1;", "=r,r", (x,))
