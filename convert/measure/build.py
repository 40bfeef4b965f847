"""Putting a quality report together: figures, sizes, hash and command of what was measured."""

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from lowbit.convert.measure.coverage import Coverage
from lowbit.convert.measure.record import LogitQuality, QualityReport, Sizes, UsedRecipe
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.texts.calibration import BUNDLED_NAME
from lowbit.formats.architectures import is_carried, is_tied, kind_of, part_of, tensor_table
from lowbit.formats.errors import QuantizationError
from lowbit.formats.folder_size import folder_bytes
from lowbit.formats.layout.manifest import MANIFEST_FILE, Manifest
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.printable import printable
from lowbit.formats.row_folders import ROW_FILES
from lowbit.formats.safetensors.checkpoint import DTYPES, Checkpoint
from lowbit.formats.weight_bits import weight_bits

# Keys of a recipe that the options of a command give; the others are there where they are used.
RECIPE_KEYS = {
    *("recipe", "method", "scales", "group_size", "lm_head", "mtp", "overrides", "drop_vision"),
    "draft_vocabulary",
}
SELDOM_KEYS = {"embedding", "frequent_rows"}


def build_report(
    packed: PackedCheckpoint,
    weights: Sequence[WeightQuality],
    logits: LogitQuality | None,
    source: Checkpoint | None = None,
    original: str | None = None,
    held_out_excess: float | None = None,
    coverage: tuple[Coverage, ...] = (),
) -> QualityReport:
    """The report of a finished packed folder.

    Args:
        weights: one row a packed linear.
        logits: None where they were not measured.
        source: the original, where it is at hand; its size is else taken from the manifest.
        original: Hub id of the original; the manifest's where it is None.
        held_out_excess: of the calibration, where it is known.
        coverage: of experts in the calibration, where it is known.

    Raises:
        CheckpointError: a folder that cannot be read.
        UnsupportedModelError: an architecture that is not implemented.
    """
    manifest = packed.manifest
    name = printable(packed.checkpoint.folder.resolve().name)
    # A packed head is no longer tied, so that the packed folder's own would count it twice.
    config = (source or packed.checkpoint).config
    return QualityReport(
        lowbit_version=version("lowbit"),
        manifest_sha256=packed.manifest_sha256,
        sizes=measure_sizes(packed, source),
        weights=tuple(weights),
        logits=logits,
        command=None if manifest is None else command_of(manifest, name),
        recipe=None if manifest is None else used_recipe(manifest),
        measured_on=datetime.now(UTC).date().isoformat(),
        original=original or (None if manifest is None else manifest.source.repo),
        model_type=kind_of(config),
        parameters=parameters(config),
        held_out_excess=held_out_excess,
        coverage=coverage,
    )


def parameters(config: Mapping[str, Any]) -> int:
    """Number of weights of the decoder, embedding and head included, a tied head counted once.

    Raises:
        UnsupportedModelError: an architecture that is not implemented.
    """
    tied = is_tied(config)
    return sum(
        math.prod(spec.shape)
        for spec in tensor_table(config)
        if part_of(config, spec.name) != "mtp" and not (tied and spec.role == "head")
    )


def measure_sizes(packed: PackedCheckpoint, source: Checkpoint | None = None) -> Sizes:
    """Bytes of a packed folder, of the same folder before packing, and bits per weight.

    Raises:
        CheckpointError: a folder that cannot be read.
        UnsupportedModelError: an architecture that is not implemented.
    """
    folder = packed.checkpoint.folder
    bits = weight_bits(packed.checkpoint, packed.manifest)
    total = folder_bytes(folder)
    tower = packed.carried_bytes, packed.carried_dtypes, _dropped_tower(packed)
    if source is not None:
        original = _bytes_of(source)
    elif packed.manifest is not None:
        original = sum(
            math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
            for tensor in packed.manifest.source_tensors
        )
    else:
        return Sizes(total, None, bits, *tower)
    ours = sum(
        (folder / name).stat().st_size
        for name in (MANIFEST_FILE, *ROW_FILES)
        if (folder / name).exists()
    )
    before = total - ours - _bytes_of(packed.checkpoint) + original
    return Sizes(total, before, bits, *tower)


def _dropped_tower(packed: PackedCheckpoint) -> int:
    """Bytes of the source's vision tower that the recipe has left out."""
    rows = () if packed.manifest is None else packed.manifest.source_tensors
    return sum(
        math.prod(row.shape) * DTYPES[row.dtype].itemsize
        for row in rows
        if row.fate == "dropped" and is_carried(packed.checkpoint.config, row.name)
    )


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.values())


def used_recipe(manifest: Manifest) -> UsedRecipe | None:
    """The parts of a folder's recipe that advice depends on; None for one of another release."""
    try:
        recipe = Recipe.from_json(manifest.recipe)
    except QuantizationError:
        return None
    method, overrides = method_name(manifest.recipe), len(recipe.overrides)
    return UsedRecipe(recipe.base, method, recipe.group_size, overrides)


def method_name(recipe: Mapping[str, Any]) -> str:
    """The method of a recipe in lowbit.json as --method names it."""
    return "absmax" if recipe.get("scales") == "absmax" else str(recipe.get("method", "rtn"))


def command_of(manifest: Manifest, name: str) -> str | None:
    """A line for a shell; `SRC` stands for an original that came from a local folder.

    Returns:
        None where the recipe was not written by this command's options.
    """
    recipe, source = manifest.recipe, manifest.source
    if recipe.keys() - SELDOM_KEYS != RECIPE_KEYS or not isinstance(recipe["overrides"], list):
        return None
    words = ["lowbit-convert", source.repo or "SRC", name]
    if source.commit is not None:
        words += ["--revision", source.commit]
    words += ["--recipe", recipe["recipe"]]
    if recipe["group_size"] != 128:
        words += ["--group-size", recipe["group_size"] or "row"]
    words += ["--method", method_name(recipe)]
    if manifest.calibration is not None:
        used = manifest.calibration
        if used.text != BUNDLED_NAME:
            words += ["--calib", used.text]
        words += ["--calib-samples", str(used.samples), "--calib-length", str(used.length)]
        words += ["--calib-chat"] if used.chat else []
        words += ["--device", "cpu" if used.device == "cpu" else "cuda"]
    for key in ("lm_head", "embedding", "mtp"):
        words += [] if recipe.get(key) is None else [f"--{key.replace('_', '-')}", recipe[key]]
    for override in recipe["overrides"]:
        words += ["--bits", override]
    words += ["--frequent-rows", recipe["frequent_rows"]] if "frequent_rows" in recipe else []
    words += ["--positive-scales"] if recipe["scales"] == "positive" else []
    words += ["--drop-vision"] if recipe["drop_vision"] else []
    if recipe["draft_vocabulary"] is not None:
        words += ["--draft-vocabulary", recipe["draft_vocabulary"]]
    if manifest.draft_head is not None and manifest.draft_head.text not in (None, BUNDLED_NAME):
        words += ["--draft-text", manifest.draft_head.text]
    command = shlex.join(map(str, words))
    if manifest.mtp_training is None:
        return command
    more = ["lowbit-convert", "finetune-mtp", name, "--steps", str(manifest.mtp_training.steps)]
    if manifest.mtp_training.text != BUNDLED_NAME:
        more += ["--text", manifest.mtp_training.text]
    return f"{command} && {shlex.join(more)}"
