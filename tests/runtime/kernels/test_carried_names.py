"""No loop of a kernel moves a value to a name that stood for the same value before the loop.

Triton from 3.5.0 on carries a name from turn to turn if one turn, tried on the values before the
loop, leaves another value under it. `left = before` leaves the same one where both names began as
one; so `left` keeps its first value in every turn, and nothing is said of it. The interpreter, on
which the other tests of kernels run, does as Python does. See
`findings/triton_forgets_one_of_two_names.sh`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[3]
FOLDERS = ("runtime/kernels", "convert")


class Names:
    """Which names of a kernel stand for one value, as far as its text says."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.values: dict[str, Any] = {}
        self.found: list[str] = []
        self.read(function.body)

    def value(self, node: ast.expr) -> Any:
        """Equal for two expressions if they are one value: names, their tuples, casts of them."""
        match node:
            case ast.Name(id):
                return self.values.get(id, id)
            case ast.Tuple(elements):
                return tuple(map(self.value, elements))
            case ast.Call(ast.Attribute(inner, "to")):
                return self.value(inner)
            case _:
                return node

    def read(self, body: list[ast.stmt]) -> None:
        """Follow statements in their order; branches as if all were taken."""
        for node in body:
            match node:
                case ast.For(_, ast.Call(called), inner):
                    self.turn(node, inner, unrolled="static_range" in ast.unparse(called))
                case ast.While(_, inner):
                    self.turn(node, inner, unrolled=False)
                case ast.If(_, inner, others):
                    self.read(inner + others)
                case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                    new = [(name, self.value(given)) for name, given in moves(node)]
                    self.values |= {name: (node, name) for name in stored(node)} | dict(new)

    def turn(self, loop: ast.stmt, body: list[ast.stmt], unrolled: bool) -> None:
        """Try one turn as Triton does; note moves of what is carried to what seems unchanged."""
        before = dict(self.values)
        self.read(body)
        if unrolled:
            return
        within = {name for each in body for name in stored(each)}
        same = {x for x in within if self.values.get(x, x) == before.get(x, x)}
        for node in (each for part in body for each in ast.walk(part)):
            self.found += [
                f"{given.lineno} {name} = {ast.unparse(given)}"
                for name, given in moves(node)
                if name in same and handed_on(given) & within - same
            ]
        self.values = before | {name: (loop, name) for name in within - same}


def stored(node: ast.AST) -> set[str]:
    """Names that a statement sets."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}


def handed_on(node: ast.expr) -> set[str]:
    """Names whose values an expression is, or is made of."""
    match node:
        case ast.Name(id):
            return {id}
        case ast.Tuple(elements):
            return set().union(*map(handed_on, elements))
        case ast.Call(ast.Attribute(inner, "to")):
            return handed_on(inner)
        case _:
            return set()


def moves(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that an assignment sets, each with the expression it gets."""
    match node:
        case ast.Assign([ast.Name(name)], given) | ast.AnnAssign(
            ast.Name(name), _, ast.expr() as given
        ):
            yield name, given
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(given)):
            for target, each in zip(targets, given, strict=True):
                if isinstance(target, ast.Name):
                    yield target.id, each


def lost(text: str) -> list[str]:
    """Moves of a file's kernels that Triton drops: function, line, and what is assigned."""
    functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]
    kernels = [f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)]
    return [f"{f.name} {each}" for f in kernels for each in Names(f).found]


def test_kernels_move_no_value_to_a_name_of_the_same_value() -> None:
    files = [file for folder in FOLDERS for file in (SOURCE / folder).rglob("*.py")]
    read = {str(file.relative_to(SOURCE)): file.read_text(encoding="utf-8") for file in files}
    kernels = {name: text for name, text in read.items() if ".jit\n" in text}
    assert len(kernels) > 50  # they are where they are looked for
    assert not [f"{name}: {each}" for name, text in kernels.items() for each in lost(text)]


@pytest.mark.parametrize(
    ("before", "turn", "drops"),
    [
        ("old = new", "old = new; new = x + i", True),
        ("old = new", "old, new = new, x + i", True),
        ("new = x; old = x", "old = new; new = i", True),
        ("new = (x, n); old = (x, n)", "old = new; new = (i, i)", True),
        ("slot = x; old = (slot, slot); new = old", "old = new; new = (slot, i)", True),
        ("old = new.to(int)", "old = new; new = i", True),
        ("old = new", "if i:\n   old = new\n  new = i", True),
        ("old = new", "for j in range(n):\n   old = new; new = i", True),
        ("old = new", "old = new", False),  # nothing else sets it
        ("old = new", "old = old.to(new.dtype); new = i", False),
        ("old = new + 0", "old = new; new = i", False),
        ("old = new; new = x + 1", "old = new; new = i", False),
        ("old = x * 0; new = x * 0", "old = new; new = i", False),
        ("old = new", "old = new + 1; new = i", False),
        ("old = new; old += 1", "old = new; new = i", False),
        ("old = new", "new = x + i; old = new", False),
        ("old, new = pair(x)", "old = new; new = i", False),
    ],
)
@pytest.mark.parametrize("loop", ["for i in range(n)", "while n"])
def test_a_move_is_told_from_what_is_carried(
    before: str, turn: str, drops: bool, loop: str
) -> None:
    text = f"@triton.jit\ndef kernel(x, n, new, i):\n {before}\n {loop}:\n  {turn}\n"
    assert bool(lost(text)) == drops


def test_an_unrolled_loop_drops_nothing() -> None:
    turns = "for i in gl.static_range(4):\n  old = new; new = x + i\n"
    assert not lost(f"@gluon.jit\ndef kernel(x, new):\n old = new\n {turns}")
