"""Rope scalings in other containers: what they can state of YaRN, and the keys of mlx-lm."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from lowbit.convert.export.gguf_file import Value
from lowbit.formats.architectures import Config
from lowbit.formats.architectures.rope import (
    LLAMA3,
    ORIGINAL,
    YARN,
    RopeScaling,
    YarnRope,
    yarn_attention,
)
from lowbit.formats.errors import FormatError
from lowbit.formats.fields import shown

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # defaults of every engine


def check_yarn(config: Config, engine: str, stated: Collection[str] = ()) -> None:
    """Refuse values of YaRN that an engine would silently read as its own defaults.

    Args:
        stated: of BETAS, those that the container states.

    Raises:
        FormatError: naming the value.
    """
    scaling = config.rope_scaling
    if not isinstance(scaling, YarnRope):
        return
    defaults = BETAS | {"truncate": True, "attention_factor": yarn_attention(scaling.factor)}
    for key, default in defaults.items():
        value = getattr(scaling, key)
        if key not in stated and value != default:
            raise FormatError(
                f"config.json: rope scaling `{YARN}` with `{key}` {shown(value)}: {engine} takes "
                f"it as {shown(default)}",
                hint="export to gptq or awq, which keep config.json as it is",
            )


def gguf_keys(scaling: RopeScaling | None, arch: str) -> dict[str, Value]:
    """YaRN as llama.cpp looks it up, under a prefix; empty for other ropes."""
    if not isinstance(scaling, YarnRope):
        return {}
    return {
        f"{arch}.rope.scaling.type": YARN,
        f"{arch}.rope.scaling.factor": scaling.factor,
        f"{arch}.rope.scaling.original_context_length": scaling.original_max_position,
    }


def mlx_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """A scaling as mlx-lm reads it, whatever form it has in config.json; empty for plain ropes."""
    if scaling is None:
        return {}
    values = asdict(scaling)
    original = {ORIGINAL: values.pop("original_max_position")}
    kind = LLAMA3
    if isinstance(scaling, YarnRope):  # what check_yarn lets through is mlx-lm's own
        kind, values = YARN, {key: values[key] for key in ("factor", *BETAS)}
    return {"type": kind, "rope_type": kind, **values, **original}


def mlx_rope(config: Config, content: dict[str, Any]) -> dict[str, Any]:
    """config.json with the rope under the keys that mlx-lm's dense models read."""
    names = ("rope_parameters", "rope_scaling")
    rest = {key: value for key, value in content.items() if key not in names}
    scaling = mlx_scaling(config.rope_scaling)
    return {**rest, "rope_theta": config.rope_theta, "rope_scaling": scaling or None}
