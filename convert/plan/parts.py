"""Parts of a source: its tensors by what becomes of them, checked against the architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.convert.plan.recipe import DROP, Recipe
from lowbit.formats.architectures import is_carried, is_tied, part_of, tensor_table, unused
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import CheckpointError, QuantizationError
from lowbit.formats.packed import FLOATS
from lowbit.formats.safetensors.checkpoint import TensorInfo
from lowbit.formats.safetensors.leftovers import leftovers

HEAD = "lm_head.weight"
EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class SourceParts:
    """Tensors of a source; those of the table are quantized or stay as stored."""

    table: tuple[TensorSpec, ...]
    carried: dict[str, TensorInfo]  # of the vision tower
    dropped_mtp: dict[str, TensorInfo]  # of a head for multi-token prediction that is left out
    unneeded: dict[str, str]  # why no reader needs them, by name
    written: frozenset[str]  # names of those that the result holds in some form


def parts_of(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], recipe: Recipe
) -> SourceParts:
    """Sort the tensors of a source, and check them.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        CheckpointError: see `check_tensors`.
        QuantizationError: the recipe drops or packs what the source does not have.
    """
    table, tied = tensor_table(config, tensors), is_tied(config)
    carried = {name: info for name, info in tensors.items() if is_carried(config, name)}
    dropped = dropped_mtp(config, tensors, recipe)
    unneeded = {**leftovers(tensors), **unused(config, tensors)}
    aside = {*carried, *dropped, *unneeded}
    table = [spec for spec in table if not dropped or part_of(config, spec.name) != "mtp"]
    expected = {name: info for name, info in tensors.items() if name not in aside}
    try:
        check_tensors(table, expected, tied)
    except CheckpointError as error:
        if not _fits_without_mtp(config, table, expected, tied):
            raise
        raise CheckpointError(
            str(error),
            hint="the draft head alone does not fit config.json: --mtp drop leaves it out",
        ) from None
    if recipe.drop_vision and not carried:
        raise QuantizationError(
            "the checkpoint has no vision tower to drop", hint="leave out --drop-vision"
        )
    left_out = {*dropped, *unneeded, *(carried if recipe.drop_vision else ())}
    left_out |= {HEAD} if tied else set()
    return SourceParts(tuple(table), carried, dropped, unneeded, frozenset(tensors) - left_out)


def dropped_mtp(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], recipe: Recipe
) -> dict[str, TensorInfo]:
    """Tensors of a head for multi-token prediction that the recipe drops.

    Raises:
        QuantizationError: the recipe packs or drops such a head, and there is none.
    """
    names = sorted(name for name in tensors if part_of(config, name) == "mtp")
    if recipe.mtp not in (None, "bf16") and not names:
        raise QuantizationError(
            "the checkpoint has no head for multi-token prediction", hint="leave out --mtp"
        )
    return {name: tensors[name] for name in names} if recipe.mtp == DROP else {}


def _fits_without_mtp(
    config: Mapping[str, Any],
    table: Sequence[TensorSpec],
    tensors: Mapping[str, TensorInfo],
    tied: bool,
) -> bool:
    """Tell if a checkpoint with a head for multi-token prediction would be right without it."""
    rest = {name: info for name, info in tensors.items() if part_of(config, name) != "mtp"}
    try:
        check_tensors([s for s in table if part_of(config, s.name) != "mtp"], rest, tied)
    except CheckpointError:
        return False
    return len(rest) < len(tensors)


def check_tensors(
    table: Sequence[TensorSpec], tensors: Mapping[str, TensorInfo], tied: bool
) -> None:
    """Compare a source's headers with its tensor table.

    Raises:
        CheckpointError: naming the first tensor that is missing, extra, misshapen or of an
            unexpected dtype, and how many more there are.
    """
    expected = {spec.name: spec for spec in table}
    missing = [name for name in expected if name not in tensors and not (tied and name == HEAD)]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks `{missing[0]}`{and_more(missing)}",
            hint=_unknown_experts(missing[0], [name for name in tensors if name not in expected])
            or "config.json and weights do not belong together, or the download is incomplete",
        )
    extra = [name for name in tensors if name not in expected]
    if extra:
        raise CheckpointError(
            f"the checkpoint holds `{extra[0]}`{and_more(extra)}, which its architecture does not "
            "have"
        )
    for name, info in tensors.items():
        if info.shape != expected[name].shape:
            raise CheckpointError(
                f"`{name}`: shape {list(info.shape)}, expected {list(expected[name].shape)}",
                hint="config.json and weights do not belong together",
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"`{name}`: dtype {info.dtype_name}, expected BF16, F16 or F32",
                hint="convert from the BF16 checkpoint" if "8" in info.dtype_name else None,
            )


def _unknown_experts(missing: str, extra: Sequence[str]) -> str | None:
    """Hint where a missing expert may be stored under a name that is not read; None elsewhere."""
    before, experts, _ = missing.partition(EXPERTS)
    beside = [name for name in extra if experts and name.startswith(before + experts)]
    if not beside:
        return None
    return (
        f"it holds `{beside[0]}`{and_more(beside)}; experts are read from `experts.gate_up_proj` "
        "and `experts.down_proj`, without `.weight`, or one by one"
    )


def and_more(names: Sequence[str]) -> str:
    """Words after the first of some names."""
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
