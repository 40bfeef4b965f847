"""One shell pattern for the linears of a fused set."""

from collections.abc import Sequence
from itertools import takewhile

from lowbit.formats.architectures.names import any_expert


def without_experts(modules: Sequence[str]) -> list[str]:
    """Patterns of a set's linears: one for the same linear of all experts, whose sets are whole."""
    return list(dict.fromkeys(map(any_expert, modules)))


def joined(names: Sequence[str]) -> str:
    """One pattern for names that differ in one place; it may match others too.

    `mlp.gate_proj` and `mlp.up_proj` give `mlp.[gu]*_proj`.
    """
    start = _shared(names)
    end = _shared([name[start:][::-1] for name in names])
    middles = [name[start : len(name) - end] for name in names]
    if len(names) == 1 or not all(middles):
        return names[0]
    letters = "".join(dict.fromkeys(middle[0] for middle in middles))
    rest = "" if all(len(middle) == 1 for middle in middles) else "*"
    return f"{names[0][:start]}[{letters}]{rest}{names[0][len(names[0]) - end :]}"


def _shared(names: Sequence[str]) -> int:
    """Number of characters that all names begin with."""
    columns = zip(*names, strict=False)  # as long as the shortest
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
