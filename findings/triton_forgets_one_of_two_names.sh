#!/bin/sh
# Triton: of two names for one value a loop may carry only one; the other keeps its first value in every turn.
#
# Guess before running: a name that a loop sets is carried from turn to turn, as in Python, whatever it stood for
#   before. So Fibonacci numbers come out the same whether the two names begin as `a = 1; b = 1` or as `a = 1; b = a`.
# Seen: 3.4.0 carries each name that the body sets. Since 3.5.0 a name is carried if its value after one turn, tried
#   on the values before the loop, is another one than before. `a = b` gives `a` the value that it has already, so
#   that `a` is not carried, and stands for 1 in every turn and behind the loop. Nothing is said of it. It needs
#   neither tensors nor tuples nor nested loops: `for`, `while`, tuples, and nests lose it alike, a tuple as a whole.
#   It is the identity of values that counts, not what they are: `a + 0` is a value of its own, while `.to()` of a
#   type that is there already, or two names for one argument, are not. A loop that is unrolled is right. What is hit
#   is any delay by one turn, such as the slot before of a ring, or the older of two terms, if both begin as one name.
#
# Packages: Triton 3.4.0, 3.6.0 and 3.9.0 (3.5.0, 3.7.1 and 3.8.0 give what 3.6.0 gives), compiled for compute
#   capability 9.0 without a GPU. Turns are constant, so that the compiler works the answer out: it is the number that
#   the PTX stores. The first answer is that of the same function as plain Python.
# Output seen (Python, then 3.4.0, 3.6.0 and 3.9.0):
#   two values: 89 89 89 89
#   one value: 89 89 1 1
#   one value plus 0: 89 89 89 89
#   one value as its own type: 89 89 1 1
#   one argument: 890 890 10 10
#   one value, unrolled: 89 89 89 89
#   one value, while: 89 89 1 1
#   one value, nested: 89 89 1 1
#   one tuple: 89 89 1 1
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/names.py" <<'PYTHON'
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def two_values(n):
    a = 1
    b = 1
    for _ in range(n):
        a, b = b, a + b
    return a


@triton.jit
def one_value(n):
    a = 1
    b = a
    for _ in range(n):
        a, b = b, a + b
    return a


@triton.jit
def plus_nothing(n):
    a = 1
    b = a + 0
    for _ in range(n):
        a, b = b, a + b
    return a


@triton.jit
def own_type(n):
    a = n - n + 1
    b = a.to(tl.int32)
    for _ in range(n):
        a, b = b, a + b
    return a


@triton.jit
def argument(n):
    a = n
    b = n
    for _ in range(n):
        a, b = b, a + b
    return a


@triton.jit
def unrolled(n):
    a = 1
    b = a
    for _ in tl.static_range(10):
        a, b = b, a + b
    return a


@triton.jit
def by_while(n):
    a = 1
    b = a
    while n > 0:
        a, b = b, a + b
        n -= 1
    return a


@triton.jit
def nested(n):
    a = 1
    b = a
    for _ in range(2):
        for _ in range(n // 2):
            a, b = b, a + b
    return a


@triton.jit
def one_tuple(n):
    a = (1, 1)
    b = a
    for _ in range(n):
        a, b = b, (a[0] + b[0], a[1] + b[1])
    return a[0]


@triton.jit
def kernel(out, ANSWER: tl.constexpr):
    turns = tl.full((), 10, tl.int32)
    tl.store(out, ANSWER(turns))


class Plain(int):
    """What Python makes of the same functions."""

    def to(self, _):
        return self

    def __sub__(self, other):
        return Plain(int(self) - other)

    def __add__(self, other):
        return Plain(int(self) + other)


def compiled(answer):
    source = ASTSource(kernel, {"out": "*i32", "ANSWER": "constexpr"}, {"ANSWER": answer})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    (register,) = re.findall(r"st\.global\.b32\s*\[[^]]*\],\s*\{?\s*(%r\d+)", ptx)
    return int(re.search(rf"mov\.b32\s+{register}, (\d+);", ptx)[1])


for name, answer in {
    "two values": two_values,
    "one value": one_value,
    "one value plus 0": plus_nothing,
    "one value as its own type": own_type,
    "one argument": argument,
    "one value, unrolled": unrolled,
    "one value, while": by_while,
    "one value, nested": nested,
    "one tuple": one_tuple,
}.items():
    if sys.argv[1] == "Python":
        static, tl.static_range = tl.static_range, range
        print(f"{name}: {answer.fn(Plain(10))}")
        tl.static_range = static
    else:
        print("", compiled(answer))
PYTHON
for version in 3.4.0 3.6.0 3.9.0; do
    python3 -m venv "$here/$version"
    "$here/$version/bin/python" -m pip install --quiet "triton==$version" 2>/dev/null
    TRITON_CACHE_DIR="$here/cache" "$here/$version/bin/python" -W ignore "$here/names.py" Triton > "$here/$version.seen"
done
"$here/3.9.0/bin/python" -W ignore "$here/names.py" Python > "$here/python.seen"
paste -d '' "$here/python.seen" "$here/3.4.0.seen" "$here/3.6.0.seen" "$here/3.9.0.seen" > "$here/seen"
cat "$here/seen"
sed -n 's/^#   \([^:]*: [0-9 ]*\)$/\1/p' "$0" | diff - "$here/seen"
echo "as stated"
