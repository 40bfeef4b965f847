#!/bin/sh
# Triton: a chain of integer products becomes a tree behind its last term; one of floats stays a chain.
#
# Guess before running: `acc = acc + one * scale`, unrolled 64 times, becomes one multiply-add for each term where it
#   stands, whether the numbers are integers or floats; integers are at most cheaper, since they may be added anyhow.
# Seen: floats are one chain of 64. Of integers nothing is added before the last term is there: the passes on LLVM's
#   code know that the order of integer sums does not matter and make a tree of them, 96 instructions in place of 64.
#   So all terms, or all of their factors, wait at once. Where terms come from tensor cores one after the other,
#   registers are too few for that: a kernel with 256 such terms a lane spilled, and took a fifth longer on an H200
#   than with floats, a conversion and an FMA each. The same multiply-add as a line of assembly keeps its place. (From
#   3.9.0 on the chain of floats stands behind the last term, too, where ptxas may still move each of its links.)
#
# Packages: Triton 3.4.0, 3.6.0 and 3.9.0, compiled for compute capability 9.0 without a GPU. Terms come from an
#   opaque line of assembly each, as a tensor core's would. Counted in the PTX: multiply-adds that stand before the
#   last term is made, and instructions for all 64 terms.
# Output seen:
#   3.4.0: floats: 62 before, 64 in all; integers: 0 before, 96 in all; integers by assembly: 63 before, 64 in all
#   3.6.0: floats: 62 before, 64 in all; integers: 0 before, 96 in all; integers by assembly: 63 before, 64 in all
#   3.9.0: floats: 0 before, 64 in all; integers: 0 before, 96 in all; integers by assembly: 63 before, 64 in all
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/chain.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def opaque(x):
    return tl.inline_asm_elementwise(
        "xor.b32 $0, $1, 5;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def floats(acc, one, scale):
    return acc + one.to(tl.float32) * scale


@triton.jit
def integers(acc, one, scale):
    return acc + one * scale


@triton.jit
def by_assembly(acc, one, scale):
    return tl.inline_asm_elementwise(
        "mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", [one, scale, acc],
        dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def chain(terms, scales, out, ADDED: tl.constexpr):
    lane = tl.arange(0, 32)
    acc = tl.load(out + lane)
    for step in tl.static_range(64):
        one = opaque(tl.load(terms + step * 32 + lane))
        acc = ADDED(acc, one, tl.load(scales + step))
    tl.store(out + lane, acc)


KINDS = {
    "floats": (floats, "*fp32"),
    "integers": (integers, "*i32"),
    "integers by assembly": (by_assembly, "*i32"),
}
seen = []
for name, (added, kind) in KINDS.items():
    types = {"terms": "*i32", "scales": kind, "out": kind, "ADDED": "constexpr"}
    made = triton.compile(
        ASTSource(chain, types, {"ADDED": added}),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": 1},
    )
    code = r"^\s*(mad\.lo\.s32|mul\.lo\.s32|add\.s32|fma\.rn\.f32|xor\.b32)\s"
    found = re.findall(code, made.asm["ptx"], re.MULTILINE)
    last = len(found) - 1 - found[::-1].index("xor.b32")
    before = sum(each.startswith(("mad", "fma")) for each in found[:last])
    seen.append(f"{name}: {before} before, {len(found) - found.count('xor.b32')} in all")
print(f"{triton.__version__}: {'; '.join(seen)}")
PYTHON
for version in 3.4.0 3.6.0 3.9.0; do
    python3 -m venv "$here/$version"
    "$here/$version/bin/python" -m pip install --quiet "triton==$version" 2>/dev/null
    TRITON_CACHE_DIR="$here/cache" "$here/$version/bin/python" -W ignore "$here/chain.py"
done > "$here/seen"
cat "$here/seen"
sed -n 's/^#   \(3\.[0-9.]*: floats.*\)$/\1/p' "$0" | diff - "$here/seen"
echo "as stated"
