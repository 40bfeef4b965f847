"""PTX run in Python: the warps of a program, each until it waits for a barrier.

Lanes of a warp are NumPy arrays. What is asynchronous ends as late as it may: copies of a lane when
their batch is waited for, products when their group is. So what a GPU would pass over is an error:
a register that a product has not left yet is read or changed, shared memory that holds nothing is
read, a warp waits in vain.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lowbit.formats.activations import fma

LANES = 32
Value = np.ndarray[Any, Any]  # a register: [lanes] int64 of its bits
PART = re.compile(r"\s*(?:(?P<label>\w+):(?!:)|(?P<brace>[{}])|(?P<code>(?:[^;{}]|\{[^{};]*\})+;))")
PATIENCE = 100  # turns in which every warp waits


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of bytes from global to shared memory."""

    to: int
    at: int
    size: int


@dataclass(slots=True)
class Program:
    """Memory and barriers that warps share."""

    shared: Value  # bytes
    memory: Value  # bytes of all tensors
    phases: dict[int, int] = field(default_factory=dict)  # parity of each barrier, by address
    known: Value = field(init=False)  # bytes of shared memory that hold something

    def __post_init__(self) -> None:
        """Shared memory begins without contents."""
        self.known = np.zeros(len(self.shared), bool)

    def copy(self, copy: Copy) -> None:
        """Copy bytes to shared memory."""
        assert 0 <= copy.to <= len(self.shared) - copy.size
        assert 0 <= copy.at <= len(self.memory) - copy.size
        self.shared[copy.to : copy.to + copy.size] = self.memory[copy.at : copy.at + copy.size]
        self.known[copy.to : copy.to + copy.size] = True


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of PTX, and the blocks that it lies in, from the outermost."""

    text: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """PTX: statements, and by block and name the number of the statement behind a label."""

    statements: tuple[Statement, ...]
    labels: Mapping[tuple[int, str], int]


def code_of(text: str) -> Code:
    """Read PTX."""
    found: list[Statement] = []
    labels: dict[tuple[int, str], int] = {}
    blocks, number = [0], 0
    for match in PART.finditer(text):
        if match["brace"] == "{":
            number += 1
            blocks.append(number)
        elif match["brace"] == "}":
            blocks.pop()
        elif match["label"]:
            labels[blocks[-1], match["label"]] = len(found)
        else:
            found.append(Statement(match["code"].rstrip(";").strip(), tuple(blocks)))
    return Code(tuple(found), labels)


@dataclass(frozen=True, slots=True)
class Product:
    """An integer product of a warp: 16 rows, 32 columns of K."""

    sums: list[str]  # registers
    operands: Mapping[str, Value]  # of A
    q: Value  # [columns, 32] addresses of B
    adds: bool  # to what the sums hold


@dataclass(slots=True)
class Warp:
    """Registers of a warp, and what it has under way."""

    program: Program
    registers: dict[str, Value] = field(default_factory=dict)
    batches: deque[list[Copy]] = field(default_factory=deque)
    products: list[Product] = field(default_factory=list)  # of the group that is begun
    groups: deque[list[Product]] = field(default_factory=deque)
    busy: set[str] = field(default_factory=set)  # sums of products that are under way

    def value(self, name: str) -> Value:
        """What a register or a literal holds."""
        if name in self.registers:
            assert name not in self.busy, f"{name} is read under a product"
            return self.registers[name]
        assert re.fullmatch(r"-?\d+|0[xf][0-9a-fA-F]+", name), f"{name} holds nothing"
        return np.full(LANES, int(name.replace("0f", "0x"), 0), np.int64)

    def values(self, names: str) -> list[Value]:
        """Those of some registers, with commas between them."""
        return [self.value(name.strip()) for name in names.split(",")]

    def address(self, text: str) -> Value:
        """Of `[register + offset]`."""
        return sum(self.values(text.strip("[]").replace("+", ",")), np.zeros(LANES, np.int64))

    def set(self, name: str, value: Value, bits: int = 32) -> None:
        """Change a register."""
        assert name not in self.busy, f"{name} is changed under a product"
        self.registers[name] = np.asarray(value, np.int64) & ((1 << min(bits, 63)) - 1)

    def begin(self, columns: int, given: list[str]) -> None:
        """Begin a product."""
        sums, names = ([each.strip() for each in part[1:-1].split(",")] for part in given[:2])
        under_way = {name for group in self.groups for product in group for name in product.sums}
        assert not under_way & set(sums), "products of two groups have the same sums"
        descriptor = self.value(given[2])
        assert (descriptor == descriptor[0]).all()
        assert int(descriptor[0]) >> 32 == 0x40000040
        at = ((int(descriptor[0]) & 0x3FFF) << 4) + 128 * np.arange(columns)[:, None]
        at = at + np.arange(32)
        operands = {name: self.value(name) for name in names}
        adds = bool(self.value(given[3])[0])
        self.products.append(Product(sums, operands, at ^ (at >> 7 & 7) << 4, adds))
        self.busy.update(sums)

    def end(self) -> None:
        """End the oldest group of products."""
        lane = np.arange(LANES)
        for product in self.groups.popleft():
            a = np.zeros((16, 32), np.int64)
            for i, (name, words) in enumerate(product.operands.items()):
                assert (self.registers[name] == words).all(), f"{name} is changed under a product"
                codes = words.astype(np.uint32).view(np.int8).reshape(LANES, 4)
                k = lane % 4 * 4 + 16 * (i // 2)
                a[(lane // 4 + 8 * (i % 2))[:, None], k[:, None] + np.arange(4)] = codes
            assert self.program.known[product.q].all(), "a product reads q that is not there"
            d = a @ self.program.shared[product.q].view(np.int8).astype(np.int64).T
            for i, name in enumerate(product.sums):
                row, column = lane // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + lane % 4 * 2 + i % 2
                before = self.registers[name] if product.adds else 0
                self.registers[name] = (before + d[row, column]) & 0xFFFFFFFF
                self.busy.discard(name)


def floats(value: Value) -> Value:
    """Numbers whose bits a register holds."""
    return value.astype(np.uint32).view(np.float32)


def bits_of(value: Value) -> Value:
    """A register of FP32 numbers."""
    return np.asarray(value, np.float32).view(np.uint32).astype(np.int64)


def signed(value: Value) -> Value:
    """Numbers that a register of 32 bits holds."""
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def permuted(values: list[Value]) -> Value:
    """Bytes of two words by a selector, each of them itself or eight times its upper bit."""
    both = values[0] | values[1] << 32
    found = np.zeros(LANES, np.int64)
    for i in range(4):
        place = values[2] >> 4 * i & 15
        byte = both >> 8 * (place & 7) & 0xFF
        found |= np.where(place & 8, (byte >> 7) * 0xFF, byte) << 8 * i
    return found


def arithmetic(warp: Warp, name: str, given: list[str]) -> Value | None:
    """What an operation on registers gives; None if it is another one."""
    if name in ("mov.b32", "mov.b64") and given[1].startswith("{"):
        low, high = warp.values(given[1][1:-1])
        return high << 32 | low
    values = [warp.value(each) for each in given[1:]] if not given[1].startswith("[") else []
    match name:
        case "mov.b32":
            return values[0]
        case "shl.b32":
            return values[0] << values[1]
        case "and.b32":
            return values[0] & values[1]
        case "shr.s32":
            return signed(values[0]) >> values[1]
        case "prmt.b32":
            return permuted(values)
        case "mad.lo.s32":
            return values[0] * signed(values[1]) + values[2]
        case "add.s32":
            return values[0] + values[1]
        case "setp.ne.b32":
            return np.not_equal(values[0], values[1])
        case "redux.sync.min.u32":
            assert (values[1] == 0xFFFFFFFF).all(), "not all lanes take part"
            return np.full(LANES, values[0].min())
        case "cvt.rn.f32.s32":
            return bits_of(signed(values[0]))
        case "cvt.f32.f16":
            return bits_of(values[0].astype(np.uint16).view(np.float16))
        case "mul.f32" | "mul.rn.f32":
            return bits_of(floats(values[0]) * floats(values[1]))
        case "fma.rn.f32":
            a, b, c = (torch.from_numpy(floats(each)) for each in values)
            return bits_of(fma(a, b, c).numpy())
    return None


def run_statement(warp: Warp, name: str, given: list[str]) -> None:
    """Run one that is no branch."""
    program, first = warp.program, given[0] if given else ""
    if name.startswith((".reg", "wgmma.fence")):
        return
    if name == "mov.b32" and first.startswith("{"):
        for shift, half in zip((0, 16), first[1:-1].split(","), strict=True):
            warp.set(half.strip(), warp.value(given[1]) >> shift & 0xFFFF)
    elif name.startswith("wgmma.mma_async"):
        found = re.search(r"n(\d+)k32", name)
        assert found is not None
        warp.begin(int(found[1]), given)
    elif name == "wgmma.commit_group.sync.aligned":
        warp.groups.append(warp.products)
        warp.products = []
    elif name == "wgmma.wait_group.sync.aligned":
        while len(warp.groups) > int(first):
            warp.end()
    elif name == "cp.async.wait_group":
        while len(warp.batches) > int(first):
            for copy in warp.batches.popleft():
                program.copy(copy)
    elif name.startswith("mbarrier.try_wait.parity"):
        at, parity = warp.address(given[1]), warp.value(given[2])
        warp.set(first, np.full(LANES, program.phases[int(at[0])] != int(parity[0])))
    elif name.startswith(("ld.shared", "st.shared")):
        registers, place = (first, given[1]) if name.startswith("ld") else (given[1], first)
        at = warp.address(place)[:, None] + np.arange(4)
        for i, each in enumerate(registers.strip("{}").split(",")):
            own = at + 4 * i
            if name.startswith("ld"):
                assert program.known[own].all(), "shared memory that holds nothing is read"
                word = np.ascontiguousarray(program.shared[own]).view(np.uint32)[:, 0]
                warp.set(each.strip(), word)
            else:
                word = warp.value(each.strip()).astype(np.uint32)
                program.shared[own], program.known[own] = word.view(np.uint8).reshape(-1, 4), True
    else:
        result = arithmetic(warp, name, given)
        assert result is not None, f"`{name}` is not known here"
        warp.set(first, result, 64 if name.endswith("64") else 32)


def run_warp(code: Code, warp: Warp) -> Iterator[None]:
    """Run PTX; stops at each branch back, by which it waits."""
    place = 0
    while place < len(code.statements):
        statement = code.statements[place]
        place += 1
        text = statement.text
        if match := re.match(r"@(!?)(\w+)\s+(.*)", text):
            taken = warp.value(match[2]).astype(bool) ^ (match[1] == "!")
            assert taken.all() or not taken.any(), "lanes of a warp branch apart"
            if not taken.all():
                continue
            text = match[3]
        name, _, rest = text.partition(" ")
        if name == "bra":
            place = next(
                code.labels[block, rest.strip()]
                for block in reversed(statement.blocks)
                if (block, rest.strip()) in code.labels
            )
            yield
            continue
        parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
        run_statement(warp, name, [part.strip() for part in parts])


def run_warps(code: Code, warps: list[Warp]) -> None:
    """Run warps in turn, until all are at the end."""
    running = [run_warp(code, warp) for warp in warps]
    for _ in range(PATIENCE):
        running = [each for each in running if next(each, "ended") != "ended"]
        if not running:
            return
    raise AssertionError("no warp goes on")
