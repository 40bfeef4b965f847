"""Schemes of fused sets, written as the overrides of an ordinary recipe."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

from lowbit.convert.plan.recipe import AS_STORED, Override
from lowbit.convert.plan.sets import FusedSet
from lowbit.formats.architectures.names import any_expert, split_layer
from lowbit.formats.layout.scheme import Scheme


def overrides_for(sets: Sequence[FusedSet], wanted: Mapping[str, Scheme | None]) -> list[Override]:
    """Overrides that give every set its scheme, independent of the recipe they are added to.

    A pattern for every kind of set with its most common scheme, then one for every exception.

    Args:
        sets: all sets of a model.
        wanted: scheme of every set by name, with a group size; None for as stored.
    """
    linears = [module for fused in sets for module in fused.modules]
    kinds: dict[str, list[FusedSet]] = {}
    for fused in sets:
        kinds.setdefault(fused.kind, []).append(fused)
    common: dict[str, Scheme | None] = {}
    overrides = []
    for kind, members in kinds.items():
        modules = [module for fused in members for module in fused.modules]
        pattern = _kind_pattern(members)
        if _matched(pattern, linears) == modules:
            common[kind] = Counter(wanted[fused.name] for fused in members).most_common(1)[0][0]
            overrides.append(_override(pattern, common[kind]))
    for fused in sets:
        scheme = wanted[fused.name]
        if fused.kind not in common or common[fused.kind] != scheme:
            patterns = _without_experts(fused.modules)
            pattern = _join(patterns)
            exact = _matched(pattern, linears) == list(fused.modules)
            names = [pattern] if exact else patterns
            overrides += [_override(name, scheme) for name in names]
    return overrides


def _override(pattern: str, scheme: Scheme | None) -> Override:
    if scheme is None:
        return Override(pattern, AS_STORED)
    return Override(pattern, scheme.bits, scheme.group_size)


def _kind_pattern(members: Sequence[FusedSet]) -> str:
    """Pattern of the linears of sets that differ by layer alone: `*.self_attn.[qkv]_proj`."""
    first = _without_experts(members[0].modules)
    return _join(first if len(members) == 1 else [f"*.{split_layer(name).rest}" for name in first])


def _without_experts(modules: Sequence[str]) -> list[str]:
    """Patterns of a set's linears: one for the same linear of all experts, whose sets are whole."""
    return list(dict.fromkeys(map(any_expert, modules)))


def _join(names: Sequence[str]) -> str:
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


def _matched(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]
