"""Device function that adds the groups of a result, one after the other in the order of k.

Terms of groups and scales of tokens lie in shared memory. Loads run some groups ahead of the sums,
since one addition has to wait for the one before it: four clocks each. Lanes that have no result
skip all of it, which other code of a warp cannot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import float_types

AHEAD = 8  # groups whose loads are on their way
UNROLLED = 64  # groups without a loop


@gluon.constexpr_function
def chain_code(groups, tokens):
    """PTX of `chain`. Inputs after the sums: addresses of terms and of scales, and `inside`.

    A ring of registers holds the next groups' terms and scales.
    """
    columns = min(tokens, 2)  # tokens of a lane
    sums = 2 * columns
    ring = min(AHEAD, groups)
    lines = ["{", ".reg .pred skip, more;", ".reg .b32 terms, scales, left;"]
    lines += [f".reg .f32 t<{sums * ring}>, s<{columns * ring}>;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(sums)]
    lines += [f"setp.eq.s32 skip, ${sums + 2}, 0;", "@skip bra DONE;"]
    lines += [f"mov.b32 terms, ${sums};", f"mov.b32 scales, ${sums + 1};"]
    for i in range(ring):
        lines += _loads(i, i, tokens)
    done = 0
    if groups > UNROLLED:
        turns = (groups - ring) // ring
        done = turns * ring
        lines += [f"mov.b32 left, {turns};", "MORE:"]
        for i in range(ring):
            lines += _sums(i, columns) + _loads(i, i + ring, tokens)
        lines += [f"add.s32 terms, terms, {ring * term_bytes(tokens)};"]
        lines += [f"add.s32 scales, scales, {ring * 4 * tokens};", "sub.s32 left, left, 1;"]
        lines += ["setp.ne.s32 more, left, 0;", "@more bra MORE;"]
    for n in range(groups - done):
        lines += _sums(n % ring, columns)
        if n + ring < groups - done:
            lines += _loads(n % ring, n + ring, tokens)
    return "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def term_bytes(tokens):
    """Bytes of the terms that a group of a tile of 16 rows has."""
    return 64 * tokens


@gluon.constexpr_function
def _loads(slot, group, tokens):
    """PTX that loads a group's terms and scales into a slot of the ring."""
    columns = min(tokens, 2)
    term = ", ".join(f"t{2 * columns * slot + i}" for i in range(2 * columns))
    lines = [f"ld.shared.v{2 * columns}.f32 {{{term}}}, [terms + {group * term_bytes(tokens)}];"]
    if columns == 1:
        return [*lines, f"ld.shared.f32 s{slot}, [scales + {group * 4}];"]
    pair = f"{{s{2 * slot}, s{2 * slot + 1}}}"
    return [*lines, f"ld.shared.v2.f32 {pair}, [scales + {group * 4 * tokens}];"]


@gluon.constexpr_function
def _sums(slot, columns):
    """PTX that adds a group: rows g of all tokens of the lane, then rows g + 8."""
    return [
        f"fma.rn.f32 ${i}, t{2 * columns * slot + i}, s{columns * slot + i % columns}, ${i};"
        for i in range(2 * columns)
    ]


@gluon.constexpr_function
def _constraints(count):
    """Constraints of `chain_code`: sums must not lie where addresses are still read."""
    return ",".join(["=&f"] * count + ["r"] * 3)


@gluon.jit
def chain(terms, scales, inside, GROUPS: gl.constexpr, TOKENS: gl.constexpr):
    """Add all groups of a lane's results: rows g of its one or two tokens, then rows g + 8.

    Each is `fma(term, scale, sum)` from 0 on; zeros in lanes that are not inside.

    terms: address of the lane's terms of the first group: 8 bytes for one token, 16 of two tokens.
    scales: address of the first scale of the lane's tokens.
    TOKENS: whose scales of a group lie side by side.
    """
    COUNT: gl.constexpr = 2 * min(TOKENS, 2)
    return gl.inline_asm_elementwise(
        chain_code(GROUPS, TOKENS), _constraints(COUNT), [terms, scales, inside.to(gl.int32)],
        dtype=float_types(COUNT), is_pure=False, pack=1,
    )  # fmt: skip
