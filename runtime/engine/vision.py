"""A model's vision tower while it is used: read at the first image, with a cache of embeddings."""

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.image_settings import image_settings
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime.engine.image_input import ImageInput
from lowbit.runtime.engine.memory import gigabytes
from lowbit.runtime.engine.vision_place import (
    CACHE_BYTES,
    TowerMemory,
    VisionPlace,
    free_on,
    has_room,
    too_large,
    tower_memories,
    tower_memory,
)
from lowbit.runtime.images.patches import image_patches
from lowbit.runtime.images.picture import KnownPictures, Picture
from lowbit.runtime.models.vision import (
    OpenedTower,
    VisionTower,
    check_settings,
    load_tower,
    open_tower,
)

log = logging.getLogger("lowbit")
LEAST_PATCHES = 8192  # for which a GPU must have room: a screen of 1920 x 1080


@dataclass(slots=True, eq=False)
class Vision:
    """The tower of a model; nothing of its weights is read before the first image.

    Attributes:
        input: what the rest of the program knows of images.
        place: where the tower runs; on the CPU where a GPU has become full, unless it was asked
            for.
        known: images that have been decoded.
    """

    opened: OpenedTower = field(repr=False)
    input: ImageInput
    place: VisionPlace
    dtype: torch.dtype
    cache_bytes: int = CACHE_BYTES
    known: KnownPictures = field(default_factory=KnownPictures, repr=False)
    _tower: VisionTower | None = field(default=None, repr=False)
    _kept: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @torch.inference_mode()
    def embed(self, picture: Picture) -> Tensor:
        """Embeddings of a picture's tokens, from the cache or by the tower.

        Raises:
            RequestError, ResourceError: see `image_patches`.
            ResourceError: memory has no room for the tower or the image.
            FormatError: a weight of the tower is NaN or Inf.
        """
        with self._lock:
            found = self._kept.get(picture.digest)
            if found is not None:
                self._kept.move_to_end(picture.digest)
                return found
            if self._tower is None:
                self._tower = self._load(picture)
            found = self._run(self._tower, picture)
            self._keep(picture.digest, found)
            return found

    def _run(self, tower: VisionTower, picture: Picture) -> Tensor:
        patches = _patches_of(picture)
        needed = self.opened.working_bytes(patches, self.dtype)
        # A system that lends memory would end the process that uses it.
        if tower.device.type == "cpu" and not has_room("cpu", needed):
            raise _image_too_large(patches, needed, "cpu")
        try:
            return tower(image_patches(picture.content, picture.settings))
        except torch.OutOfMemoryError:
            raise _image_too_large(patches, needed, tower.device.type) from None

    def _keep(self, digest: bytes, made: Tensor) -> None:
        self._kept[digest] = made
        while sum(each.nbytes for each in self._kept.values()) > self.cache_bytes:
            self._kept.popitem(last=False)

    def _load(self, picture: Picture) -> VisionTower:
        """The tower, if there is room for it and an image.

        A larger one than a GPU has room for fails by itself; those after it need no CPU.
        """
        patches, place = _patches_of(picture), self.place
        if place.device != "cpu":
            least = min(
                LEAST_PATCHES, self.input.settings.most_pixels // self.input.settings.patch**2
            )
            memory = tower_memory(self.opened, least, self.dtype)
            needed = memory.streamed if place.streamed else memory.whole
            if not has_room(place.device, needed):
                if place.asked:
                    raise too_large(needed, place.device, "--vision-device cpu runs it on the CPU")
                log.warning(
                    "the vision tower runs on the CPU: the GPU has not the %s that it takes; a "
                    "smaller context or cache leaves more",
                    gigabytes(needed),
                )
                place = VisionPlace("cpu")
        if place.device == "cpu":
            needed = self.opened.weight_bytes(self.dtype)
            needed += self.opened.working_bytes(patches, self.dtype)
            if not has_room("cpu", needed):
                raise too_large(needed, "cpu", "a smaller context or cache leaves more")
        return load_tower(self.opened, place.device, self.dtype, place.streamed)


def _patches_of(picture: Picture) -> int:
    return picture.rows * picture.columns * picture.settings.merge**2


def _image_too_large(patches: int, needed: int, device: str) -> ResourceError:
    """The error of an image for which memory has no room beside the tower."""
    return ResourceError(
        f"an image of {patches} patches needs {gigabytes(needed)} in the vision tower"
        f"{free_on(device)}",
        hint="send a smaller one, or ask for less `detail`",
    )


@dataclass(frozen=True, slots=True)
class OpenedVision:
    """A tower that can be used, with the settings of its images; no weight has been read."""

    opened: OpenedTower
    input: ImageInput

    def memories(self, dtype: torch.dtype) -> tuple[TowerMemory, ...]:
        """See `tower_memories`."""
        return tower_memories(self.opened, self.input.settings, dtype)


def open_vision(checkpoint: Checkpoint) -> tuple[OpenedVision | None, str]:
    """The tower of a model whose headers fit; or None, and why there is none.

    A model whose tower cannot be used still answers text.
    """
    try:
        opened = open_tower(checkpoint)
        settings = image_settings(checkpoint.folder)
        check_settings(settings, opened.config)
    except LowbitError as error:
        return None, str(error)
    return OpenedVision(opened, ImageInput(settings, opened.config.image_token_id)), ""
