"""No loop of a kernel moves a value to a name that stood for the same value before the loop.

Triton from 3.5.0 on carries a name from turn to turn if one turn, tried on the values before the
loop, leaves another value under it. `left = before` leaves the same one where both names began as
one; so `left` keeps its first value in every turn, and nothing is said of it. The interpreter, on
which the other tests of kernels run, does as Python does. See
`findings/triton_forgets_one_of_two_names.sh`.
"""

import ast
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[3]
FOLDERS = ("runtime/kernels", "convert")


Values = frozenset[Any]  # what a name may stand for: equal ones are one value


class Names:
    """Names of a kernel that may stand for one value, as far as its text says."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.values: dict[str, Values] = {}
        self.moved: list[tuple[str, ast.expr, Values]] = []  # name, what it got, what that was then
        self.found: list[str] = []
        self.read(function.body)

    def value(self, node: ast.expr) -> Values:
        """Values of names, of their tuples, and of their casts, which may change nothing."""
        match node:
            case ast.Name(id):
                return values_of(self.values, id)
            case ast.Tuple(elements):
                return frozenset(itertools.product(*map(self.value, elements)))
            case ast.Call(ast.Attribute(inner, "to")):
                return self.value(inner)
            case _:
                return frozenset({node})

    def read(self, body: list[ast.stmt]) -> None:
        """Follow statements in their order; of branches, as if a constant chose one of them."""
        for node in body:
            match node:
                case ast.For(_, ast.Call(called), inner):
                    self.turn(node, inner, unrolled="static_range" in ast.unparse(called))
                case ast.While(_, inner):
                    self.turn(node, inner, unrolled=False)
                case ast.If(_, inner, others):
                    before = self.values
                    self.values = dict(before)
                    self.read(inner)
                    one, self.values = self.values, dict(before)
                    self.read(others)
                    self.values = self.joined(one)
                case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                    new = [(name, given, self.value(given)) for name, given in moves(node)]
                    self.values |= {name: frozenset({(node, name)}) for name in stored(node)}
                    self.values |= {name: values for name, _, values in new}
                    self.moved += new

    def joined(self, others: Mapping[str, Values]) -> dict[str, Values]:
        """The values of each name here or there."""
        names = {*self.values, *others}
        return {x: values_of(self.values, x) | values_of(others, x) for x in names}

    def turn(self, loop: ast.stmt, body: list[ast.stmt], unrolled: bool) -> None:
        """Try one turn as Triton does; note moves of what is carried to what seems unchanged."""
        before, begin = dict(self.values), len(self.moved)
        self.read(body)
        if unrolled:
            return
        within = {name for each in body for name in stored(each)}
        carried = {x for x in within if values_of(self.values, x) != values_of(before, x)}
        self.found += [
            f"{given.lineno} {name} = {ast.unparse(given)}"
            for name, given, values in self.moved[begin:]
            if values & values_of(before, name) and handed_on(given) & carried - {name}
        ]
        self.values = before | {name: frozenset({(loop, name)}) for name in carried}


def values_of(values: Mapping[str, Values], name: str) -> Values:
    """Values of a name; its own, if nothing has set it."""
    return values.get(name, frozenset({name}))


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
        ("old = new", "if n > 1:\n   old = new\n  else:\n   old = x + i\n  new = x + i", True),
        ("old = new", "for j in range(n):\n   old = new; new = i", True),
        ("old = new", "old = new", False),  # nothing else sets it
        ("old = new", "old = old.to(new.dtype); new = i", False),
        ("old = new + 0", "old = new; new = i", False),
        ("old = new; new = x + 1", "old = new; new = i", False),
        ("old = x * 0; new = x * 0", "old = new; new = i", False),
        ("old = new", "old = new + 1; new = i", False),
        ("old = new; old += 1", "old = new; new = i", False),
        ("old = new", "new = x + i; old = new", False),
        ("old = new", "if n > 1:\n   new = x + i\n   old = new", False),
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
