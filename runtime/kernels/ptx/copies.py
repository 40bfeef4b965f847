"""Device functions that copy from global to shared memory while the program goes on.

Values are those of `mma`: each lane copies for itself, from its address to its other one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def copy16(target, source, OFFSET: gl.constexpr = 0, AT: gl.constexpr = 0):
    """Begin to copy 16 bytes of each lane from global to shared memory; see `wait_copies`.

    OFFSET, AT: bytes beyond source and target, which cost no instruction.
    """
    gl.inline_asm_elementwise(
        f"cp.async.cg.shared.global [$1 + {AT}], [$2 + {OFFSET}], 16; mov.b32 $0, 0;",
        "=r,r,l",
        [target, source],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy16_or_zeros(target, source, inside, AT: gl.constexpr = 0):
    """`copy16` of lanes that are inside; the others store zeros."""
    gl.inline_asm_elementwise(
        f"cp.async.cg.shared.global [$1 + {AT}], [$2], 16, $3; mov.b32 $0, 0;",
        "=r,r,l,r",
        [target, source, gl.where(inside, 16, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy4(target, source, OFFSET: gl.constexpr = 0, AT: gl.constexpr = 0):
    """`copy16` of 4 bytes."""
    gl.inline_asm_elementwise(
        f"cp.async.ca.shared.global [$1 + {AT}], [$2 + {OFFSET}], 4; mov.b32 $0, 0;",
        "=r,r,l",
        [target, source],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def commit_copies():
    """End a batch of copies."""
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_copies(OPEN: gl.constexpr):
    """Wait for this thread's copies, but for those of its last OPEN batches."""
    gl.inline_asm_elementwise(
        f"cp.async.wait_group {OPEN}; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
