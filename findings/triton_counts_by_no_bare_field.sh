#!/bin/sh
# Triton: a loop that is unrolled counts by a field of a constant plus one, but not by the field.
#
# Guess before running: `tl.static_range(PLAN.count)` compiles where PLAN is a dataclass given as
#   `tl.constexpr`, as `tl.static_range(4)` does, and as the field does in `if` and in `tl.arange`.
# Seen: the field of a constant is a plain number, which `static_range` refuses as no constant;
#   `PLAN.count + 1` is a constant again, and so is the field under a name of its own. Conditions and
#   shapes take the plain number. So the shortest of the forms is the only one that fails.
#
# Packages: Triton 3.6.0 and 3.9.0, compiled for compute capability 9.0 without a GPU.
# Output seen:
#   3.6.0 field 4 used as tl.static_range start value is not a constexpr
#   3.6.0 field_and_number compiles
#   3.6.0 named compiles
#   3.6.0 a_condition compiles
#   3.6.0 a_shape compiles
#   3.9.0 field 4 used as tl.static_range start value is not a constexpr
#   3.9.0 field_and_number compiles
#   3.9.0 named compiles
#   3.9.0 a_condition compiles
#   3.9.0 a_shape compiles
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/fields.py" <<'PYTHON'
import re
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Plan:
    count: int


@triton.jit
def field(out, PLAN: tl.constexpr):
    for i in tl.static_range(PLAN.count):
        tl.store(out + i, i)


@triton.jit
def field_and_number(out, PLAN: tl.constexpr):
    for i in tl.static_range(PLAN.count + 1):
        tl.store(out + i, i)


@triton.jit
def named(out, PLAN: tl.constexpr):
    COUNT: tl.constexpr = PLAN.count
    for i in tl.static_range(COUNT):
        tl.store(out + i, i)


@triton.jit
def a_condition(out, PLAN: tl.constexpr):
    if PLAN.count > 3:
        tl.store(out, 1)


@triton.jit
def a_shape(out, PLAN: tl.constexpr):
    at = tl.arange(0, PLAN.count)
    tl.store(out + at, at)


for kernel in (field, field_and_number, named, a_condition, a_shape):
    source = ASTSource(kernel, {"out": "*i32", "PLAN": "constexpr"}, {"PLAN": Plan(4)})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        said = "compiles"
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        said = re.search(r"4 used as [^'\"]*", str(error))[0]
    print(triton.__version__, kernel.__name__, said, flush=True)
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$here/$version"
    "$here/$version/bin/python" -m pip install --quiet "triton==$version" 2>/dev/null
    TRITON_CACHE_DIR="$here/cache" "$here/$version/bin/python" -W ignore "$here/fields.py"
done > "$here/seen"
cat "$here/seen"
sed -n 's/^#   \([0-9.]* .*\)$/\1/p' "$0" | grep -E '^3\.' | diff - "$here/seen"
