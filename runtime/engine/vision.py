"""A model's vision tower while it is used: read at the first image, with a cache of embeddings."""

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime.engine.image_input import ImageInput
from lowbit.runtime.images.patches import image_patches
from lowbit.runtime.images.picture import KnownPictures, Picture
from lowbit.runtime.images.settings import image_settings
from lowbit.runtime.models.vision import (
    OpenedTower,
    VisionTower,
    check_settings,
    load_tower,
    open_tower,
)

log = logging.getLogger("lowbit")
CACHE_BYTES = 256 << 20  # of embeddings: 100 screens of 2,040 tokens and 640 numbers each
LEAST_PATCHES = 8192  # for which there must be room: a screen of 1920 x 1080


@dataclass(slots=True, eq=False)
class Vision:
    """The tower of a model; nothing of its weights is read before the first image.

    Attributes:
        input: what the rest of the program knows of images.
        device: of the model; the tower is on the CPU where its memory is full.
        known: images that have been decoded.
    """

    opened: OpenedTower = field(repr=False)
    input: ImageInput
    device: str
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
            FormatError: a weight of the tower is NaN or Inf.
        """
        with self._lock:
            found = self._kept.get(picture.digest)
            if found is not None:
                self._kept.move_to_end(picture.digest)
                return found
            if self._tower is None:
                self._tower = self._load(picture)
            found = self._tower(image_patches(picture.content, picture.settings))
            self._keep(picture.digest, found)
            return found

    def _keep(self, digest: bytes, made: Tensor) -> None:
        self._kept[digest] = made
        while sum(each.nbytes for each in self._kept.values()) > self.cache_bytes:
            self._kept.popitem(last=False)

    def _load(self, picture: Picture) -> VisionTower:
        """The tower on the model's device, if there is room for it and for a large image."""
        device = self.device
        if device != "cpu":
            patches = picture.rows * picture.columns * picture.settings.merge**2
            needed = self.opened.weight_bytes(self.dtype)
            needed += 2 * self.opened.working_bytes(max(LEAST_PATCHES, patches), self.dtype)
            left = free_bytes(device)
            if left is not None and left < needed:
                log.warning(
                    "the vision tower runs on the CPU: the GPU has not the %d MiB that it takes; "
                    "a smaller context or cache leaves more",
                    needed >> 20,
                )
                device = "cpu"
        return load_tower(self.opened, device, self.dtype)


def open_vision(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype
) -> "tuple[Vision | None, str]":
    """The tower of a model whose headers fit, without its weights; or None, and why there is none.

    A model whose tower cannot be used still answers text.
    """
    try:
        opened = open_tower(checkpoint)
        settings = image_settings(checkpoint.folder)
        check_settings(settings, opened.config)
    except LowbitError as error:
        return None, str(error)
    found = ImageInput(settings, opened.config.image_token_id)
    return Vision(opened, found, device, dtype), ""
