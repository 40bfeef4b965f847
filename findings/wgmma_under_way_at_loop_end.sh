#!/bin/sh
# ptxas: a wgmma that is under way at the end of a loop's body makes every wgmma of the kernel wait,
# where another one of the loop is waited for and read meanwhile.
#
# Guess before running: PTX says when sums may be read: once `wgmma.wait_group` leaves no more groups
#   open than were committed behind theirs. So a loop may be turned by one product, whose successor is
#   begun before its sums are read, and the loop's end is no border.
# Seen: ptxas follows the groups through straight code and within a body, and keeps the two waits
#   apart (`DEPBAR ... 0x1` leaves one group open). Turned, the same statements in the same order
#   compile as well, with C7514 under -v: each product is awaited before the next begins. A body has to
#   end with nothing under way, and be written out several times instead.
#
# Packages: triton 3.6.0 (its ptxas is of CUDA 12.8, its ptxas-blackwell of CUDA 12.9).
# Output seen, of either:
#   straight: no C7514, 6 waits leave a group open, 1 leaves none
#   ended:    no C7514, 2 waits leave a group open, 1 leaves none
#   carried:  C7514, 0 waits leave a group open, 17 leave none
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/site" triton==3.6.0
cat > "$here/try.py" <<'PYTHON'
import subprocess
import sys
from pathlib import Path

here = Path(sys.argv[1])
tools = here / "site/triton/backends/nvidia/bin"
BEGIN = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 turns, .param .u32 q) .reqntid 128 {
.reg .pred p, adds; .reg .b64 to, at; .reg .b32 i, n, d, t, a<4>, c<4>, e<4>, s<4>;
ld.param.u64 to, [out]; ld.param.u32 n, [turns]; ld.param.u32 d, [q];
mov.b64 at, {d, 0x40000040}; mov.u32 t, %tid.x; mov.u32 i, 0; setp.ne.b32 adds, 0, 0;
"""
BEGIN += "".join(f"mov.u32 a{k}, t; mov.u32 s{k}, 0;\n" for k in range(4))
END = "cvta.to.global.u64 to, to; st.global.v4.b32 [to], {s0, s1, s2, s3}; ret; }\n"
LOOP, AGAIN = "LOOP:\n", "add.u32 i, i, 1; setp.lt.u32 p, i, n; @p bra LOOP;\n"


def product(r):
    return (
        "wgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {{{r}0, {r}1, {r}2, {r}3}}, {{a0, a1, a2, a3}}, at, adds;\n"
        "wgmma.commit_group.sync.aligned;\n"
    )


def read(r, still_open):
    adds = "".join(f"add.s32 s{k}, s{k}, {r}{k};\n" for k in range(4))
    return f"wgmma.wait_group.sync.aligned {still_open};\n" + adds


pair = product("e") + read("c", 1) + product("c") + read("e", 1)
kernels = {
    "straight": BEGIN + product("c") + pair * 3 + read("c", 0) + END,
    "ended": BEGIN + LOOP + product("c") + pair + read("c", 0) + AGAIN + END,
    "carried": BEGIN + product("c") + LOOP + pair + AGAIN + read("c", 0) + END,
}
expected = {"straight": (False, 6, 1), "ended": (False, 2, 1), "carried": (True, 0, 17)}
for compiler in ("ptxas", "ptxas-blackwell"):
    for name, text in kernels.items():
        ptx, cubin = here / f"{name}.ptx", here / f"{name}.cubin"
        ptx.write_text(text)
        command = [tools / compiler, "-v", "-arch=sm_90a", ptx, "-o", cubin]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        code = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
        found = "C7514" in said, code.count("DEPBAR.LE gsb0, 0x1"), code.count("DEPBAR.LE gsb0, 0x0")
        print(f"{compiler}, {name}: {'C7514' if found[0] else 'no C7514'}, {found[1]} waits leave a group open, {found[2]} leave none")
        assert found == expected[name], (compiler, name, found)
PYTHON
"$here/venv/bin/python" "$here/try.py" "$here"
echo "as stated"
