"""Rotary position embeddings as config.json describes them, resolved as transformers does.

`rope_scaling` (the older key) wins over `rope_parameters` beside it. `rope_theta`,
`partial_rotary_factor` and `original_max_position_embeddings` may also stand at the top of the
config.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import MAX_SHOWN, REQUIRED, Field, read_field, read_fields, shown

MAX_POSITIONS = 2**24  # positions are FP32 numbers, which are exact up to here
THETA, SHARE, ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
MAX_THETA = 1e15  # published models go up to 1e11
PLAIN = "default"
LLAMA3 = "llama3"
LLAMA3_FIELDS = (
    Field("factor", "number", least=1, most=1e6),
    Field("low_freq_factor", "number", least=0, most=1e6, exclusive=True),
    Field("high_freq_factor", "number", least=0, most=1e6, exclusive=True),
)
SECTIONS = "mrope_section"


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Rope scaling of type `llama3`, which slows down slow rotations.

    Attributes:
        factor: divides the frequency of rotations with long wavelengths.
        low_freq_factor: wavelengths above `original_max_position / low_freq_factor` are long.
        high_freq_factor: wavelengths below `original_max_position / high_freq_factor` stay.
        original_max_position: positions of the model before it was extended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model.

    Attributes:
        theta: base of the frequencies.
        share: part of a head's dimensions that is rotated, above 0 and at most 1.
        scaling: None for plain rotations.
    """

    theta: float
    share: float
    scaling: Llama3Rope | None


def read_rope(
    config: Mapping[str, Any],
    positions: int,
    kinds: Collection[str] = (PLAIN,),
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
    if kind not in kinds:
        raise UnsupportedModelError(
            f"config.json: rope scaling `{kind[:MAX_SHOWN]}` is not implemented",
            hint="`rope_scaling` wins over the `rope_parameters` beside it, as in transformers"
            if key == "rope_scaling" and config.get("rope_parameters")
            else None,
        )
    merged = {name: config[name] for name in (THETA, SHARE) if name in config} | rope
    return RopeConfig(
        theta=read_field(merged, Field(THETA, "number", least=1, most=MAX_THETA, default=theta)),
        share=read_field(
            merged, Field(SHARE, "number", least=0, most=1, exclusive=True, default=share)
        ),
        scaling=_llama3(config, rope, positions) if kind == LLAMA3 else None,
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


def check_sections(config: Mapping[str, Any]) -> None:
    """Refuse a malformed `mrope_section`; for text, whose positions are equal, it has no effect.

    Raises:
        UnsupportedModelError: not three counts.
    """
    sections = _parameters(config)[1].get(SECTIONS, [0, 0, 0])
    counts = sections if isinstance(sections, list) else []
    if len(counts) != 3 or not all(type(n) is int and 0 <= n <= 2**16 for n in counts):
        raise UnsupportedModelError(
            f"config.json: `{SECTIONS}` must be a list of 3 counts, got {shown(sections)}"
        )
