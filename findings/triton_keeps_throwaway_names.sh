#!/bin/sh
# Triton: a name that is thrown away (`_`) is a value with a type, which a branch may not change.
#
# Guess before running: `more, _ = pair(n)` inside an `if` compiles like `more, other = pair(n)`,
#   as nothing reads `_` afterwards and Python gives the name no meaning.
# Seen: a branch on a value of the device carries every name that it sets and that was set before.
#   If `_` held a number of another type before the branch, the kernel does not compile; with names
#   that differ it does, and so does `for _ in range(3)` after the same assignment. The message
#   names `_`, not what was meant by it.
#
# Packages: Triton 3.6.0 and 3.9.0, compiled for compute capability 9.0 without a GPU.
# Output seen:
#   3.6.0 one name twice: initial value for `_` is of type int32[], but the then block redefines it as fp32
#   3.6.0 two names: compiles
#   3.6.0 a loop counts by it: compiles
#   3.9.0 one name twice: initial value for `_` is of type int32[], but the then block redefines it as fp32
#   3.9.0 two names: compiles
#   3.9.0 a loop counts by it: compiles
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/names.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def pair(x):
    return x, x.to(tl.float32)


@triton.jit
def one_name(out, limit):
    n = tl.load(out)
    _, half = pair(n)
    if n < limit:
        more, _ = pair(n)
        half += more
    tl.store(out, half.to(tl.int32))


@triton.jit
def two_names(out, limit):
    n = tl.load(out)
    _before, half = pair(n)
    if n < limit:
        more, _after = pair(n)
        half += more
    tl.store(out, half.to(tl.int32))


@triton.jit
def counted(out, limit):
    n = tl.load(out)
    _, half = pair(n)
    for _ in range(3):
        half += limit
    tl.store(out, half.to(tl.int32))


def outcome(kernel):
    source = ASTSource(kernel, {"out": "*i32", "limit": "i32"}, {})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        while error is not None:
            if found := re.search(r"initial value for `_` .* redefines it as \w+", str(error)):
                return found[0]
            error = error.__cause__
        raise
    return "compiles"


for name, kernel in (
    ("one name twice", one_name),
    ("two names", two_names),
    ("a loop counts by it", counted),
):
    print(f"{triton.__version__} {name}: {outcome(kernel)}")
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$here/$version"
    "$here/$version/bin/python" -m pip install --quiet "triton==$version" 2>/dev/null
    TRITON_CACHE_DIR="$here/cache" "$here/$version/bin/python" -W ignore "$here/names.py"
done > "$here/seen"
cat "$here/seen"
refused="initial value for \`_\` is of type int32[], but the then block redefines it as fp32"
for version in 3.6.0 3.9.0; do
    printf '%s\n' "$version one name twice: $refused" "$version two names: compiles" \
        "$version a loop counts by it: compiles"
done | cmp - "$here/seen"
