"""The command that makes a packed folder again, from its lowbit.json."""

import shlex

from lowbit.convert.original.calibration_text import BUNDLED_NAME
from lowbit.formats.layout.manifest import Manifest

KNOWN = frozenset(
    (
        "recipe",
        "method",
        "scales",
        "group_size",
        "lm_head",
        "mtp",
        "overrides",
        "drop_vision",
        "draft_vocabulary",
    )
)


def command_of(manifest: Manifest, name: str) -> str | None:
    """A line for a shell; `SRC` stands for an original that came from a local folder.

    Args:
        manifest: of the packed folder.
        name: of the packed folder.

    Returns:
        None where the recipe was not written by this command's options.
    """
    recipe, source = manifest.recipe, manifest.source
    if recipe.keys() != KNOWN or not isinstance(recipe["overrides"], list):
        return None
    words = ["lowbit-convert", source.repo or "SRC", name]
    if source.commit is not None:
        words += ["--revision", source.commit]
    words += ["--recipe", recipe["recipe"]]
    if recipe["group_size"] != 128:
        words += ["--group-size", recipe["group_size"] or "row"]
    method = "absmax" if recipe["scales"] == "absmax" else recipe["method"]
    words += ["--method", method]
    if manifest.calibration is not None:
        made = manifest.calibration
        if made.text != BUNDLED_NAME:
            words += ["--calib", made.text]
        words += ["--calib-samples", str(made.samples), "--calib-length", str(made.length)]
        words += ["--calib-chat"] if made.chat else []
        words += ["--device", "cpu" if made.device == "cpu" else "cuda"]
    if recipe["lm_head"] is not None:
        words += ["--lm-head", recipe["lm_head"]]
    if recipe["mtp"] is not None:
        words += ["--mtp", recipe["mtp"]]
    for override in recipe["overrides"]:
        words += ["--bits", override]
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
