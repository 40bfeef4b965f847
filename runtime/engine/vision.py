"""A model's vision tower while it is used: read at the first image, with a cache of embeddings."""

import logging
from collections import OrderedDict
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime.engine.image_input import ImageInput
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.picture import KnownPictures, Picture
from lowbit.runtime.images.settings import ImageSettings, image_settings
from lowbit.runtime.models.vision import (
    OpenedTower,
    VisionTower,
    check_settings,
    load_tower,
    open_tower,
)

log = logging.getLogger("lowbit")
CACHE_BYTES = 256 << 20  # of embeddings: 100 screens of 2,040 tokens and 640 numbers each
CUT_BYTES = 256 << 20  # of pictures that have been cut before their turn
THREADS = 2  # decode pictures and cut them into patches
LEAST_PATCHES = 8192  # for which there must be room: a screen of 1920 x 1080


@dataclass(slots=True, eq=False)
class Vision:
    """The tower of a model; nothing of its weights is read before the first image.

    All methods belong to the engine's thread. Pictures are decoded and cut by threads of their own.

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
    _loading: Future[VisionTower] | None = field(default=None, repr=False)
    _kept: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict, repr=False)
    # Pictures that are being cut or have been; gone with the requests that show them
    _cut: WeakKeyDictionary[Picture, Future[ImagePatches]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="lowbit-pictures"),
        repr=False,
    )

    def prepare(self, picture: Picture) -> Future[ImagePatches] | None:
        """Let another thread decode and cut a picture.

        Returns:
            Its patches; None for a picture of the cache, or if others fill the memory for patches.
        """
        if picture.digest in self._kept:
            return None
        if (found := self._cut.get(picture)) is not None:
            return found
        taken = sum(self._bytes_of(each) for each in list(self._cut))
        if taken and taken + self._bytes_of(picture) > CUT_BYTES:
            return None
        try:
            return self._begin(picture)
        except RuntimeError:  # no thread can be started: it is tried again when its turn comes
            return None

    @torch.inference_mode()
    def pieces(self, picture: Picture) -> Iterator[Tensor | Future[Any] | None]:
        """Embeddings of a picture's tokens, from the cache or by the tower; see `EmbeddingSource`.

        Raises:
            RequestError, ResourceError: see `image_patches`.
            FormatError: a weight of the tower is NaN or Inf.
        """
        found = self._kept.get(picture.digest)
        if found is None:
            cut = self._cut.get(picture) or self._begin(picture)
            yield from _until_done(cut)
            self._cut.pop(picture, None)
            tower = yield from self._loaded(picture)
            threads = None if self.device == "cpu" else self._threads
            for piece in _run(tower, cut.result(), threads):
                if isinstance(piece, Tensor):
                    found = piece
                else:
                    yield piece
        if found is None:
            raise RuntimeError("the tower made no embeddings")
        self._keep(picture.digest, found)
        yield found

    def _loaded(self, picture: Picture) -> Generator[Future[VisionTower], None, VisionTower]:
        """The tower; on a CPU another thread loads it, since no device is to be waited for."""
        if self._tower is None and self.device != "cpu":
            self._tower = self._load(picture)
        if self._tower is None:
            loading = self._loading
            if loading is None:
                loading = self._threads.submit(load_tower, self.opened, self.device, self.dtype)
            self._loading = loading
            yield from _until_done(loading)
            self._loading = None
            self._tower = loading.result()
        return self._tower

    def _begin(self, picture: Picture) -> Future[ImagePatches]:
        content, settings, dtype = picture.content, picture.settings, self.dtype
        self._cut[picture] = found = self._threads.submit(_patches_of, content, settings, dtype)
        return found

    def _bytes_of(self, picture: Picture) -> int:
        """Memory of a picture's patches."""
        settings = picture.settings
        patches = picture.rows * picture.columns * settings.merge**2
        return patches * settings.patch_values * self.dtype.itemsize

    def _keep(self, digest: bytes, made: Tensor) -> None:
        self._kept[digest] = made
        self._kept.move_to_end(digest)
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


def _until_done(future: Future[Any]) -> Iterator[Future[Any]]:
    """The future, again and again, until it is done."""
    while not future.done():
        yield future


def _run(
    tower: VisionTower, image: ImagePatches, threads: ThreadPoolExecutor | None
) -> Iterator[Tensor | Future[Tensor] | None]:
    """Pieces of a tower's run; on a CPU beside a GPU it is one piece, which a thread does.

    Args:
        threads: of a model on a GPU.
    """
    if threads is None or tower.patches.weight.device.type != "cpu":
        yield from tower.pieces(image)
        return
    made = threads.submit(tower, image)
    yield from _until_done(made)
    yield made.result()


def _patches_of(content: bytes, settings: ImageSettings, dtype: torch.dtype) -> ImagePatches:
    """Patches in the tower's type, which are less to copy to its device."""
    found = image_patches(content, settings)
    return replace(found, values=found.values.to(dtype))


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
