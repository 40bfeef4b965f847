"""Rotary position embeddings as config.json describes them, resolved as transformers does.

`rope_scaling` (the older key) wins over `rope_parameters` beside it. `rope_theta`,
`partial_rotary_factor` and `original_max_position_embeddings` may also stand at the top of the
config. The runtime computes what they mean.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import MAX_SHOWN, REQUIRED, Field, read_field, read_fields, shown

MAX_POSITIONS = 2**24  # positions are FP32 numbers, which are exact up to here
THETA, SHARE, ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
MAX_THETA = 1e15  # published models go up to 1e11
PLAIN, LLAMA3, YARN = "default", "llama3", "yarn"
POSITIONS, SECTIONS, INTERLEAVED = "max_position_embeddings", "mrope_section", "mrope_interleaved"
LLAMA3_FIELDS = (
    Field("factor", "number", least=1, most=1e6),
    Field("low_freq_factor", "number", least=0, most=1e6, exclusive=True),
    Field("high_freq_factor", "number", least=0, most=1e6, exclusive=True),
)
YARN_FIELDS = (
    Field("factor", "number", least=1, most=1e6),
    Field("beta_fast", "number", least=0, most=1e6, exclusive=True, default=32.0, nullable=True),
    Field("beta_slow", "number", least=0, most=1e6, exclusive=True, default=1.0, nullable=True),
    Field("truncate", "flag", default=True),
)
ATTENTION = "attention_factor"
MSCALES = ("mscale", "mscale_all_dim")
YARN_KEYS = (
    *("rope_type", "type", THETA, SHARE, ORIGINAL, SECTIONS, INTERLEAVED, ATTENTION, *MSCALES),
    *(field.key for field in YARN_FIELDS),
)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Rope scaling of type `llama3`, which slows down slow rotations."""

    factor: float  # divides the frequency of rotations with long wavelengths
    low_freq_factor: float  # wavelengths above `original_max_position / low_freq_factor` are long
    high_freq_factor: float  # wavelengths below `original_max_position / high_freq_factor` stay
    original_max_position: int  # positions of the model before it was extended


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Rope scaling of type `yarn`, static: the same at every length."""

    factor: float  # divides the frequency of slow rotations
    original_max_position: int  # positions of the model before it was extended
    beta_fast: float  # rotations of more turns than that over the original positions stay
    beta_slow: float  # rotations of fewer turns than that are slow
    truncate: bool  # the ramp between the two begins and ends at whole dimensions
    attention_factor: float  # cosines and sines are multiplied by it, scores by its square


RopeScaling = Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model."""

    theta: float  # base of the frequencies
    share: float  # part of a head's dimensions that is rotated, above 0 and at most 1
    scaling: RopeScaling | None  # None for plain rotations
    # most positions of the model. Of YaRN they are the original ones times the factor, since
    # configs leave max_position_embeddings as it was before.
    positions: int


def read_rope(
    config: Mapping[str, Any],
    positions: int,
    kinds: Collection[str] = (PLAIN, YARN),
    theta: object = REQUIRED,
    share: float = 1.0,
) -> RopeConfig:
    """Read the rotary embedding that a decoder's config asks for.

    Args:
        config: config.json or its text_config.
        positions: max_position_embeddings.
        kinds: rope types that the family has.
        theta: base where the config names none.
        share: rotated part where the config names none.

    Raises:
        UnsupportedModelError: a scaling that is not implemented, keys that disagree, or a value
            out of range.
    """
    key, rope = _parameters(config)
    kind = _kind(key, rope)
    hidden = None
    if key == "rope_scaling" and config.get("rope_parameters"):
        hidden = "`rope_scaling` wins over the `rope_parameters` beside it, as in transformers"
    if kind not in kinds:
        raise UnsupportedModelError(
            f"config.json: rope scaling `{kind[:MAX_SHOWN]}` is not implemented",
            hint=hidden or f"implemented: {', '.join(kinds)}",
        )
    merged = {name: config[name] for name in (THETA, SHARE) if name in config} | rope
    if theta is REQUIRED and merged.get(THETA) is None:
        raise UnsupportedModelError(f"config.json lacks `{THETA}`", hint=hidden)
    base: float = read_field(merged, Field(THETA, "number", least=1, most=MAX_THETA, default=theta))
    scaling: RopeScaling | None = None
    if kind == LLAMA3:
        scaling = _llama3(config, rope, positions)
    elif kind == YARN:
        scaling = _yarn(config, key, rope, base)
        positions = _extended(scaling, positions)
    return RopeConfig(
        theta=base,
        share=read_field(
            merged, Field(SHARE, "number", least=0, most=1, exclusive=True, default=share)
        ),
        scaling=scaling,
        positions=positions,
    )


def _parameters(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The object in effect with its key: `rope_scaling` unless it is null or empty."""
    found = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, rope in found.items():
        if rope is not None and not isinstance(rope, dict):
            raise UnsupportedModelError(
                f"config.json: `{key}` must be an object or null, got {shown(rope)}"
            )
    key = "rope_scaling" if found["rope_scaling"] else "rope_parameters"
    return key, found[key] or {}


def _kind(key: str, rope: Mapping[str, Any]) -> str:
    """The rope type; `type` is the key's older name."""
    for name, value in rope.items():
        if isinstance(value, dict):
            raise UnsupportedModelError(
                f"config.json: `{key}.{name[:MAX_SHOWN]}` is an object, rope parameters per kind "
                "of layer are not implemented"
            )
    kind: str = read_field(rope, Field("rope_type", "text", default=PLAIN))
    older: str = read_field(rope, Field("type", "text", default=kind))
    if "rope_type" not in rope:
        return older
    # Qwen-VL wrote `mrope`, later renamed; for text it is plain.
    if older != kind and (older, kind) != ("mrope", PLAIN):
        raise UnsupportedModelError(
            f"config.json: `{key}` says `rope_type: {shown(kind)}` and `type: {shown(older)}`",
            hint="remove the one that is wrong",
        )
    return kind


def _llama3(config: Mapping[str, Any], rope: Mapping[str, Any], positions: int) -> Llama3Rope:
    factors = read_fields(rope, LLAMA3_FIELDS)
    original = Field(ORIGINAL, least=1, most=MAX_POSITIONS, default=positions)
    # transformers prefers the key at the top of the config (first used by Phi-3).
    scaling = Llama3Rope(
        **factors,
        original_max_position=read_field(config if ORIGINAL in config else rope, original),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UnsupportedModelError(
            f"config.json: `low_freq_factor` {scaling.low_freq_factor:g} must be below "
            f"`high_freq_factor` {scaling.high_freq_factor:g}"
        )
    return scaling


def _yarn(config: Mapping[str, Any], key: str, rope: Mapping[str, Any], theta: float) -> YarnRope:
    """YaRN's values; unlike transformers, nothing is ignored and no length is guessed."""
    unknown = [name for name in rope if name not in YARN_KEYS]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: `{key}.{unknown[0][:MAX_SHOWN]}` is not a known key of rope scaling "
            f"`{YARN}`",
            hint=f"known: {', '.join(YARN_KEYS)}",
        )
    values = read_fields(rope, YARN_FIELDS)
    if values["beta_fast"] < values["beta_slow"]:
        raise UnsupportedModelError(
            f"config.json: `beta_fast` {values['beta_fast']:g} must be at least `beta_slow` "
            f"{values['beta_slow']:g}"
        )
    if theta == 1:
        raise UnsupportedModelError(
            f"config.json: `{THETA}` must be above 1 for rope scaling `{YARN}`, got 1"
        )
    return YarnRope(
        **values,
        original_max_position=_original(config, key, rope),
        attention_factor=_attention_factor(key, rope, values["factor"]),
    )


def _original(config: Mapping[str, Any], key: str, rope: Mapping[str, Any]) -> int:
    """Positions before YaRN, from `key` or the top of the config."""
    holder = config if ORIGINAL in config else rope  # transformers prefers the top
    if holder.get(ORIGINAL) is None:
        raise UnsupportedModelError(
            f"config.json: `{key}` lacks `{ORIGINAL}`",
            hint="positions that the model was trained for, 32768 for Qwen3",
        )
    original: int = read_field(holder, Field(ORIGINAL, least=1, most=MAX_POSITIONS))
    inner = rope.get(ORIGINAL, original)
    if inner != original:
        raise UnsupportedModelError(
            f"config.json: `{ORIGINAL}` is {original}, `{key}.{ORIGINAL}` is {shown(inner)}",
            hint="remove the one that is wrong",
        )
    return original


def _attention_factor(key: str, rope: Mapping[str, Any], factor: float) -> float:
    """Factor of cosines and sines: as given, by the two mscales, or YaRN's own."""
    number = Field("", "number", least=0, most=1e6, exclusive=True, default=None, nullable=True)
    given, mscale, all_dims = (
        read_field(rope, replace(number, key=name)) for name in (ATTENTION, *MSCALES)
    )
    if (mscale is None) != (all_dims is None):
        alone, other = MSCALES if all_dims is None else MSCALES[::-1]
        raise UnsupportedModelError(
            f"config.json: `{key}.{alone}` without `{other}`, which engines read differently",
            hint=f"remove it, or state `{ATTENTION}`",
        )
    if given is not None and mscale is not None:
        raise UnsupportedModelError(
            f"config.json: `{key}.{ATTENTION}` beside `{MSCALES[0]}`, which it would be made of",
            hint="remove the one that is wrong",
        )
    if given is not None:
        return float(given)
    if mscale is not None:
        return yarn_attention(factor, mscale) / yarn_attention(factor, all_dims)
    return yarn_attention(factor)


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """The attention factor that YaRN recommends for a scaling factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _extended(scaling: YarnRope, positions: int) -> int:
    """Positions of a model with YaRN; `positions` are those that its config states."""
    extended = int(scaling.original_max_position * scaling.factor)
    product = f"`{ORIGINAL}` {scaling.original_max_position} times `factor` {scaling.factor:g}"
    if extended > MAX_POSITIONS:
        raise UnsupportedModelError(
            f"config.json: {product} is {extended}, expected at most {MAX_POSITIONS}"
        )
    if extended < positions:
        raise UnsupportedModelError(
            f"config.json: {product} is {extended}, below `{POSITIONS}` {positions}",
            hint=f"`{ORIGINAL}` are the positions without YaRN",
        )
    return extended


def read_sections(config: Mapping[str, Any]) -> list[int] | None:
    """Read `mrope_section`; for text, whose positions are equal, it has no effect.

    `mrope_interleaved` is not read: as in transformers, Qwen3.5's sections always interleave.

    Raises:
        UnsupportedModelError: not three counts.
    """
    rope = _parameters(config)[1]
    if SECTIONS not in rope:
        return None
    sections = rope[SECTIONS]
    counts = sections if isinstance(sections, list) else []
    if len(counts) != 3 or not all(type(n) is int and 0 <= n <= 2**16 for n in counts):
        raise UnsupportedModelError(
            f"config.json: `{SECTIONS}` must be a list of 3 counts, got {shown(sections)}"
        )
    return counts
