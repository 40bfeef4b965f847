"""Names of the linears that are quantized and of those that are not, as GPTQ and AWQ state them.

Engines hold the experts of a layer as one module, `mlp.experts`: where experts are not quantized,
it is named and not its linears.
"""

from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures import part_of
from lowbit.formats.architectures.names import MTP_PREFIX, any_expert, split_layer


def layer_of(module: str) -> tuple[int, str] | None:
    """A module's decoder layer and name inside it; None outside of the decoder's layers."""
    prefix, layer, rest = split_layer(module)
    return None if layer is None or prefix == MTP_PREFIX else (layer, rest)


def _layers_by_kind(source: PackedSource) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Layers in which each kind of linear (`mlp.up_proj`) is packed, and in which it is not."""
    packed: dict[str, list[int]] = {}
    unquantized: dict[str, list[int]] = {}
    linears = {linear.module for linear in source.linears}
    for spec in source.packed.specs:
        found = layer_of(spec.module)
        if found is not None and len(spec.shape) == 2:
            layer, kind = found
            where = packed if spec.module in linears else unquantized
            where.setdefault(kind, []).append(layer)
    return packed, unquantized


def _names(these: dict[str, list[int]], others: dict[str, list[int]]) -> list[str]:
    """Name endings of `these` modules; with layer numbers where `others` have the same kind."""
    names = []
    for kind, layers in these.items():
        if kind in others:
            names += [f"layers.{number}.{kind}" for number in layers]
        else:
            names.append(kind)
    return names


def quantized_kinds(source: PackedSource) -> list[str]:
    """Name endings of the quantized linears inside the decoder's layers."""
    packed, unquantized = _layers_by_kind(source)
    return _names(packed, unquantized)


def unquantized_kinds(source: PackedSource) -> list[str]:
    """Name parts of the linears that are not quantized, `visual` and `mtp` as a whole."""
    packed, unquantized = _layers_by_kind(source)
    names = list(
        dict.fromkeys(any_expert(name).partition(".*.")[0] for name in _names(unquantized, packed))
    )
    linears = {linear.module for linear in source.linears}
    if "lm_head" not in linears:
        names.append("lm_head")
    for part, prefix in (("vision", "visual"), ("mtp", "mtp")):
        inside = [i for i in source.dense if part_of(source.plain_config, i.name) == part]
        quantized = any(part_of(source.plain_config, name) == part for name in linears)
        if inside and not quantized:
            names.append(prefix)
    return names


def unquantized_patterns(source: PackedSource) -> list[str]:
    """Regular expressions, for `re.match` on module names, of linears that are not quantized.

    The head is left out: where it is not quantized, configurations say so by another key.
    """
    patterns = []
    for name in unquantized_kinds(source):
        quoted = name.replace(".", "[.]")
        if name in ("visual", "mtp"):
            patterns.append(rf".*\b{quoted}[.].*")
        elif name != "lm_head":
            patterns.append(rf".*[.]{quoted}$")
    return patterns
