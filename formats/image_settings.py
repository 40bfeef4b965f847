"""Settings by which a model's image processor resizes and cuts images, read from its folder.

All sizes come from the file. The defaults of transformers' class are those of another model:
patches of 14 pixels and CLIP's mean.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.fields import Field, read_field, shown
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import object_of

OWN_FILE, SHARED_FILE = "preprocessor_config.json", "processor_config.json"
NESTED = "image_processor"  # key of the shared file
MAX_BYTES = 1_000_000
MAX_PIXELS = 2**28  # bound of what a file may allow; published models go up to 2**24
BICUBIC = 3
CHANNELS = 3
PATCH = Field("patch_size", least=1, most=256)
MERGE = Field("merge_size", least=1, most=16)
TEMPORAL = Field("temporal_patch_size", least=1, most=16)
LEAST = Field("shortest_edge", least=1, most=MAX_PIXELS)  # areas, whatever their names say
MOST = Field("longest_edge", least=1, most=MAX_PIXELS)
OLDER = {LEAST.key: "min_pixels", MOST.key: "max_pixels"}  # names that win where they are given
STEPS = ("do_resize", "do_rescale", "do_normalize")
FACTOR = Field("rescale_factor", "number", least=0, most=1, default=1 / 255)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Sizes in pixels, and the values that normalize a channel of red, green, blue."""

    patch: int  # side of a patch
    merge: int  # patches along a side of the square that becomes one token
    temporal: int  # frames of a patch; a picture is repeated as often
    least_pixels: int  # smaller images are enlarged
    most_pixels: int  # larger ones are reduced
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Pixels along a side of a token: sides of a resized image are multiples."""
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.temporal * self.patch**2


def image_settings(folder: Path) -> ImageSettings:
    """Read the settings of a model folder.

    As in transformers, `image_processor` in `processor_config.json` wins over
    `preprocessor_config.json`.

    Raises:
        CheckpointError: neither is there, or one cannot be read.
        UnsupportedModelError: a key is missing, out of range, or asks for another processor.
    """
    shared = _read(folder / SHARED_FILE)
    nested = None if shared is None else shared.get(NESTED)
    if nested is not None:
        where = f"{SHARED_FILE}: `{NESTED}`"
        if not isinstance(nested, dict):
            raise UnsupportedModelError(f"{where} must be an object, got {shown(nested)}")
        return read_settings(nested, where)
    own = _read(folder / OWN_FILE)
    if own is None:
        raise CheckpointError(
            f"`{folder}` has no `{OWN_FILE}`, and no `{SHARED_FILE}` with `{NESTED}`: they say how "
            "images are resized",
            hint="copy it from the original model",
        )
    return read_settings(own, OWN_FILE)


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where there is none."""
    try:
        return object_of(read_bytes(path, MAX_BYTES), path)
    except FileNotFoundError:
        return None


def read_settings(content: Mapping[str, Any], where: str) -> ImageSettings:
    """Parse the settings of an image processor.

    Args:
        content: of the file.
        where: names it in messages.

    Raises:
        UnsupportedModelError: a key is missing, out of range, or asks for another processor.
    """
    for step in STEPS:
        if not read_field(content, Field(step, "flag", default=True), where):
            raise UnsupportedModelError(f"{where}: `{step}` false is not implemented")
    resample = content.get("resample", BICUBIC)
    if type(resample) is not int or resample != BICUBIC:
        raise UnsupportedModelError(
            f"{where}: `resample` must be {BICUBIC} (bicubic), got {shown(resample)}"
        )
    factor = read_field(content, FACTOR, where)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise UnsupportedModelError(f"{where}: `rescale_factor` must be 1/255, got {factor:g}")
    least, most = _pixels(content, where)
    return ImageSettings(
        patch=read_field(content, PATCH, where),
        merge=read_field(content, MERGE, where),
        temporal=read_field(content, TEMPORAL, where),
        least_pixels=least,
        most_pixels=most,
        mean=_channels(content, "image_mean", where),
        std=_channels(content, "image_std", where, above=0.0),
    )


def _pixels(content: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Least and most pixels of a resized image."""
    size = content.get("size") or {}
    if not isinstance(size, dict):
        raise UnsupportedModelError(f"{where}: `size` must be an object, got {shown(size)}")
    merged = dict(size)
    for key, older in OLDER.items():
        if content.get(older) is not None:
            merged[key] = content[older]
    inner = f"{where}: `size`"
    least, most = read_field(merged, LEAST, inner), read_field(merged, MOST, inner)
    if least > most:
        raise UnsupportedModelError(f"{inner}: at least {least} pixels, but at most {most}")
    return least, most


def _channels(
    content: Mapping[str, Any], key: str, where: str, above: float = -math.inf
) -> tuple[float, ...]:
    """Three numbers above a bound."""
    found = content.get(key)
    values = found if isinstance(found, list) else []
    number = Field(key, "number", least=above, most=1e6, exclusive=True)
    if len(values) != CHANNELS or not all(number.allows(value) for value in values):
        bound = "" if above == -math.inf else f" above {above:g}"
        got = "nothing" if key not in content else shown(found)
        raise UnsupportedModelError(
            f"{where}: `{key}` must be a list of {CHANNELS} numbers{bound}, got {got}"
        )
    return tuple(map(float, values))
