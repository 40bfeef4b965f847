"""Schemes of fused sets, written as the overrides of an ordinary recipe."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from lowbit.convert.plan.joined import joined, without_experts
from lowbit.convert.plan.recipe import AS_STORED, Override
from lowbit.convert.plan.sets import FusedSet
from lowbit.formats.architectures.names import split_layer
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
            patterns = without_experts(fused.modules)
            pattern = joined(patterns)
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
    first = without_experts(members[0].modules)
    return joined(first if len(members) == 1 else [f"*.{split_layer(name).rest}" for name in first])


def _matched(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]
