#!/bin/sh
# Hopper: while one warpgroup multiplies in FP32, another's wgmma stands nearly still; integers yield.
#
# Guess before running: wgmma is asynchronous, its matrices come from shared memory or registers, and
#   the FP32 units are others. So a warpgroup that multiplies floats costs the tensor core next to
#   nothing, at most as much as one that does integer operations at the same rate.
# Seen: 256 FP32 multiplications a warp beside four wgmma of 64 x 128 x 32 take both times in turn, as
#   if there were one unit: FP32 goes on nearly as fast as alone, and the tensor core gets a quarter
#   of its rate until it ends. Exclusive ors do the reverse: the tensor core keeps its rate, and they
#   lose about half of theirs. It is so for INT8, FP8 and BF16. Hence what scales sums of groups on
#   Hopper (two FP32 operations for each sum of 128 products) adds to the products' time however it
#   is scheduled; conversions and integer operations hide.
#
# Packages: torch 2.11.0, triton 3.6.0. It needs a card of compute capability 9.0, elsewhere it shows
#   nothing and says so.
# Output seen (H100 SXM, clocks of a round, means of 132 programs; times of wgmma alone, FP32 alone,
#   wgmma beside FP32, exclusive or alone, wgmma beside that):
#   s8 324, 272, 554, 297, 342
#   e4m3 326, 272, 575, 297, 344
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/show.py" <<'PYTHON'
import sys

import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    print("shows nothing: no card of compute capability 9.0")
    sys.exit(0)

import triton
import triton.language as tl

ROUNDS, N = 500, 128
KINDS = {"s8": ("k32.s32.s8.s8", ""), "e4m3": ("k32.f32.e4m3.e4m3", ", 1, 1")}


def code(kind, tensor, other):
    """The first four warps multiply matrices, the others do 256 operations a round."""
    shape, more = KINDS[kind]
    sums = ", ".join(f"d{i}" for i in range(N // 2))
    lines = [
        "{ .shared .align 1024 .b8 zeros[16384]; .reg .pred last, second, whole, never;",
        ".reg .b32 i, at, group, a<16>, w<64>; .reg .f32 s, v<64>, sum; .reg .b64 began, ended, of;",
        f".reg .{'b32' if kind == 's8' else 'f32'} d<{N // 2}>;",
        "mov.u32 at, zeros; shr.u32 at, at, 4; cvt.u64.u32 of, at; or.b64 of, of, 0x4000004000010000;",
        "mov.u32 group, %tid.x; shr.u32 group, group, 7; setp.ne.b32 whole, 1, 0;",
        "cvt.rn.f32.s32 s, $1; mov.u32 i, 0;",
    ]
    lines += [f"add.s32 a{i}, $1, {i};" for i in range(16)]
    lines += [f"mov.b32 d{i}, {'0' if kind == 's8' else '0f00000000'};" for i in range(N // 2)]
    lines += [f"add.s32 w{i}, $1, {977 * i}; cvt.rn.f32.s32 v{i}, w{i};" for i in range(64)]
    lines += ["bar.sync 0; mov.u64 began, %clock64; setp.ge.u32 second, group, 1; @second bra OTHER;"]
    if tensor:
        lines.append("FIRST: wgmma.fence.sync.aligned;")
        for k in range(0, 16, 4):
            a = ", ".join(f"a{k + i}" for i in range(4))
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{N}{shape} {{{sums}}}, {{{a}}}, of, whole{more};"
            )
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        lines.append(f"add.u32 i, i, 1; setp.lt.u32 last, i, {ROUNDS}; @last bra FIRST;")
    lines.append("bra DONE; OTHER:")
    if other:
        lines.append("SECOND:")
        each = "mul.rn.f32 v{0}, v{0}, s;" if other == "fp32" else "xor.b32 w{0}, w{0}, w{1};"
        lines += [each.format(i % 64, (i + 7) % 64) for i in range(256)]
        lines.append(f"add.u32 i, i, 1; setp.lt.u32 last, i, {ROUNDS}; @last bra SECOND;")
    lines += ["DONE: mov.u64 ended, %clock64; sub.s64 ended, ended, began; cvt.u32.u64 $0, ended;"]
    lines.append("setp.eq.s32 never, $1, 12345; mov.f32 sum, s;")  # so that nothing is dropped
    for i in range(64):
        lines.append(f"add.f32 sum, sum, v{i}; cvt.rn.f32.s32 v{i}, w{i}; add.f32 sum, sum, v{i};")
        lines.append(f"{{.reg .f32 e; mov.b32 e, d{i}; add.f32 sum, sum, e;}}")
    return "\n".join([*lines, "@never cvt.rzi.u32.f32 $0, sum; }"])


@triton.jit
def kernel(out_ptr, given, CODE: tl.constexpr):
    thread = tl.arange(0, 256)
    clocks = tl.inline_asm_elementwise(
        CODE, "=r,r", [thread * 0 + given], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out_ptr + tl.program_id(0) * 256 + thread, clocks)


def clocks(kind, tensor, other):
    """Clocks of a round of both warpgroups."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(count, 2, 128, dtype=torch.int32, device="cuda")
    for _ in range(2):
        kernel[(count,)](out, 7, code(kind, tensor, other), num_warps=8, maxnreg=255)
    return (out.float().mean((0, 2)) / ROUNDS).tolist()


print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
for kind in KINDS:
    alone, fp32 = clocks(kind, True, None)[0], clocks(kind, False, "fp32")[1]
    beside, xor = clocks(kind, True, "fp32")[0], clocks(kind, False, "xor")[1]
    hidden = clocks(kind, True, "xor")[0]
    print(f"{kind} {alone:.0f}, {fp32:.0f}, {beside:.0f}, {xor:.0f}, {hidden:.0f}")
    assert beside > alone + 0.6 * fp32, "FP32 multiplications no longer hold wgmma up"
    assert hidden < alone + 0.3 * xor, "integer operations hold wgmma up, too"
PYTHON
if python3 -c 'import torch, triton; assert torch.__version__.startswith("2.11.0") and triton.__version__ == "3.6.0"' 2>/dev/null; then
    python3 "$here/show.py"
else
    python3 -m venv "$here/venv"
    "$here/venv/bin/python" -m pip install --quiet torch==2.11.0 triton==3.6.0 numpy==2.4.6
    "$here/venv/bin/python" "$here/show.py"
fi
