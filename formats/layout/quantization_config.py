"""Reader and writer of config.json's `quantization_config` as compressed-tensors has it."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lowbit.formats.architectures.names import MTP_PREFIX, any_expert, expert_of, split_layer
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.scheme import SERVED_BITS, Scheme

KEY = "quantization_config"
METHOD = "compressed-tensors"
TRANSLATED = ("gptq", "awq", "auto-round")  # methods whose tensors get native names and layout
FORMAT = "pack-quantized"
VERSION = "0.20.0"  # of the compressed-tensors whose reader the output was tested with


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Schemes of the quantized modules."""

    # (targets, scheme) in file order; a target is a module name, a class name (`Linear`) or `re:`
    # and a pattern for `re.match` on the module name
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]  # targets left as they are; they win over groups
    _ignored: "_Targets[None]" = field(init=False, repr=False, compare=False)
    _targets: "_Targets[Scheme]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the targets, which every module of a model is held against."""
        ignored = ((target, None) for target in self.ignore)
        targets = ((target, scheme) for own, scheme in self.groups for target in own)
        object.__setattr__(self, "_ignored", _sorted_targets(ignored))
        object.__setattr__(self, "_targets", _sorted_targets(targets))

    def scheme_for(self, module: str) -> Scheme | None:
        """The scheme of a linear module, or None where it is not quantized.

        As in compressed-tensors, an exact name wins over a pattern and a pattern over the class. Of
        several patterns the one that sorts first wins, of equal ones the last.
        """
        if self._ignored.of(module):
            return None
        found = self._targets.of(module)
        return found[0] if found else None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Targets(Generic[T]):
    """Values of targets."""

    names: Mapping[str, T]  # by exact name
    patterns: Sequence[tuple[re.Pattern[str], T]]  # in the order of the patterns
    linear: tuple[T] | None  # of the class, where there is one

    def of(self, module: str) -> tuple[T] | None:
        """The value of a module's target; None where none matches."""
        if module in self.names:
            return (self.names[module],)
        for pattern, value in self.patterns:
            if pattern.match(module):
                return (value,)
        return self.linear


def _sorted_targets(targets: Iterable[tuple[str, T]]) -> _Targets[T]:
    """Values by kind of target; of equal targets the last one counts."""
    last = dict(targets)
    patterns = sorted(target for target in last if target.startswith("re:"))
    return _Targets(
        names=last,
        patterns=[(re.compile(target[3:]), last[target]) for target in patterns],
        linear=(last["Linear"],) if "Linear" in last else None,
    )


def method_of(config: Mapping[str, Any]) -> str | None:
    """Quantization method that a config.json names; None where nothing is quantized."""
    section = config.get(KEY) or config.get("compression_config")
    if not section:
        return None
    return str(section.get("quant_method") if isinstance(section, dict) else section)


def runs_as_stored(config: Mapping[str, Any]) -> bool:
    """Tell if lowbit-run reads the quantization of a config.json, whatever its tensors are."""
    if method_of(config) in TRANSLATED:
        return True
    try:
        read = read_quantization_config(config)
    except FormatError:
        return False
    return read is None or not any(unserved(scheme, SERVED_BITS) for _, scheme in read.groups)


def read_quantization_config(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Parse the `quantization_config` of a config.json, from any tool.

    Returns:
        None where the checkpoint is not quantized.

    Raises:
        FormatError: another method or layout, activation quantization, or a scheme that
            `pack-quantized` does not have.
    """
    section = config.get(KEY)
    if section is None:
        section = config.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise FormatError(f"config.json: `{KEY}` is not an object")
    method = section.get("quant_method")
    if method != METHOD:
        raise FormatError(
            f"config.json: quantization method `{method}` is not supported",
            hint=f"read: {METHOD} ({FORMAT}), {', '.join(TRANSLATED)}; for others convert from the "
            "BF16 checkpoint with lowbit-convert",
        )
    sparsity = section.get("sparsity_config") or {}
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise FormatError("config.json: sparse checkpoints (`sparsity_config`) are not supported")
    if section.get("transform_config"):
        raise FormatError("config.json: rotated weights (`transform_config`) are not supported")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError("config.json: `config_groups` is missing or empty")
    ignore = _strings(section.get("ignore") or [], "ignore")
    default = section.get("format")
    parsed = tuple(_read_group(name, group, default) for name, group in groups.items())
    return QuantizationConfig(groups=parsed, ignore=ignore)


def _read_group(name: str, group: Any, default: Any) -> tuple[tuple[str, ...], Scheme]:
    where = f"config.json: quantization group `{name}`"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise FormatError(f"{where} has no `weights`")
    layout = group.get("format") or default
    if layout != FORMAT:
        raise FormatError(f"{where}: format `{layout}`, expected `{FORMAT}`")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise FormatError(f"{where}: `{key}` is set, only weights may be quantized")
    weights = group["weights"]
    if weights.get("type", "int") != "int":
        raise FormatError(f"{where}: type `{weights['type']}`, expected `int`")
    if weights.get("dynamic"):
        raise FormatError(f"{where}: dynamic weight quantization is not supported")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise FormatError(f"{where}: actorder `{weights['actorder']}` needs g_idx, not supported")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" or (strategy == "group" and size == -1):
        size = None
    elif strategy != "group" or type(size) is not int:
        raise FormatError(f"{where}: strategy `{strategy}` with group_size {size} is not supported")
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    if type(bits) is not int or not isinstance(symmetric, bool):
        raise FormatError(f"{where}: num_bits is {bits!r}, symmetric is {symmetric!r}")
    targets = _strings(group.get("targets") or [], f"{name}.targets")
    return targets, Scheme(bits, size, symmetric)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FormatError(f"config.json: `{where}` is not a list of strings")
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise FormatError(
                    f"config.json: `{where}`: bad pattern `{item}`: {error}"
                ) from None
    return tuple(value)


def write_quantization_config(
    schemes: Mapping[str, Scheme | None], never: Sequence[str] = ()
) -> dict[str, Any]:
    """Make the `quantization_config` of a set of linears, and check that it reads back.

    Args:
        schemes: scheme of every linear that a recipe may quantize, None where it is not quantized.
        never: patterns of linears that no recipe quantizes.

    Returns:
        The object for config.json. Its targets are suffix patterns, because engines nest the same
        modules under different prefixes.

    Raises:
        FormatError: modules of different schemes that suffix patterns cannot tell apart.
    """
    experts = {s for module, s in schemes.items() if _is_decoders_expert(module)}
    # transformers takes the scheme of all experts from the first group that names some.
    used = sorted({s for s in schemes.values() if s}, key=lambda s: (s not in experts, str(s)))
    targets = {scheme: _patterns(schemes, scheme) for scheme in used}
    ignore = [*never, *_patterns(schemes, None)]
    written = QuantizationConfig(
        groups=tuple((tuple(patterns), scheme) for scheme, patterns in targets.items()),
        ignore=tuple(ignore),
    )
    for module, wanted in schemes.items():
        if written.scheme_for(module) != wanted:
            raise FormatError(
                f"`{module}`: no suffix pattern tells it from a module of another scheme"
            )
    return section_of(targets, ignore)


def _is_decoders_expert(module: str) -> bool:
    """Tell if a module is part of an expert, and not one of multi-token prediction."""
    return expert_of(module) is not None and not module.startswith(MTP_PREFIX)


def section_of(
    targets: Mapping[Scheme, Sequence[str]], ignore: Sequence[str] = ()
) -> dict[str, Any]:
    """Make a `quantization_config` of targets by scheme, in this order."""
    groups = {
        f"group_{number}": {
            "targets": list(names),
            "format": FORMAT,
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": scheme.bits,
                "type": "int",
                "symmetric": scheme.symmetric,
                "strategy": "channel" if scheme.group_size is None else "group",
                "group_size": scheme.group_size,
                "dynamic": False,
                "actorder": None,
            },
        }
        for number, (scheme, names) in enumerate(targets.items())
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "version": VERSION,
        "ignore": list(ignore),
        "config_groups": groups,
    }


def _patterns(schemes: Mapping[str, Scheme | None], wanted: Scheme | None) -> list[str]:
    """Patterns for the modules of one scheme: decoder and head, then multi-token prediction."""
    decoder = {module: s for module, s in schemes.items() if not module.startswith(MTP_PREFIX)}
    mtp = {module: s for module, s in schemes.items() if module.startswith(MTP_PREFIX)}
    if not mtp:
        return _suffixes(decoder, wanted, ".*")
    patterns = _suffixes(decoder, wanted, "(?!.*mtp[.]).*")
    if any(mtp.values()):
        return patterns + _suffixes(mtp, wanted, ".*mtp[.]")
    return patterns + (["re:^mtp.*"] if wanted is None else [])


def _suffixes(schemes: Mapping[str, Scheme | None], wanted: Scheme | None, start: str) -> list[str]:
    """Patterns for the modules of one scheme, one for each kind of linear, after `start`."""
    # Kind of linear, the same for all experts of a layer -> layers with the wanted scheme.
    layers: dict[str, dict[int, None]] = {}
    others: set[str] = set()  # kinds that have another scheme somewhere
    plain = []
    for module, scheme in schemes.items():
        _, layer, kind = split_layer(any_expert(module))
        if layer is None:
            plain += [module] if scheme == wanted else []
        elif scheme == wanted:
            layers.setdefault(kind, {})[layer] = None
        else:
            others.add(kind)
    patterns = []
    for kind, numbers in layers.items():
        which = f"({'|'.join(map(str, numbers))})" if kind in others else r"\d+"
        patterns.append(rf"re:{start}layers[.]{which}[.]{_quote(kind)}$")
    return patterns + [f"re:.*{_quote(module)}$" for module in plain]


def _quote(name: str) -> str:
    """A pattern for a name, in which `*` stands for the number of an expert."""
    return name.replace(".", "[.]").replace("*", r"\d+")


def unserved(scheme: Scheme, served_bits: Collection[int]) -> str | None:
    """Reason why the runtime cannot serve a scheme, or None."""
    if scheme.bits not in served_bits:
        return f"{scheme.bits}-bit weights (served: {', '.join(map(str, served_bits))})"
    if not scheme.symmetric and scheme.bits >= max(served_bits):  # q - z takes one bit more
        return f"asymmetric {scheme.bits}-bit weights (zero points)"
    return None
