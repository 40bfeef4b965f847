"""A model's vision tower while it is used: read at the first image, with a cache of embeddings."""

import logging
from collections import OrderedDict
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.image_settings import ImageSettings, image_settings
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
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.picture import KnownPictures, Picture
from lowbit.runtime.models.vision import (
    OpenedTower,
    VisionTower,
    check_settings,
    load_tower,
    open_tower,
)

log = logging.getLogger("lowbit")
CUT_BYTES = 256 << 20  # of pictures that have been cut before their turn
THREADS = 2  # decode pictures and cut them into patches
LEAST_PATCHES = 8192  # for which a GPU must have room: a screen of 1920 x 1080


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CutPicture:
    """Patches on their way, for all requests that show the picture; gone with the last of them."""

    patches: Future[ImagePatches]


@dataclass(slots=True, eq=False)
class Vision:
    """The tower of a model; nothing of its weights is read before the first image.

    All methods belong to the engine's thread. Pictures are decoded and cut by threads of their own.

    Attributes:
        input: what the rest of the program knows of images.
        place: where the tower runs; on the CPU where a GPU has become full, unless it was asked
            for.
        beside_gpu: the model is on a GPU, which has work while a CPU runs the tower.
        known: images that have been decoded.
    """

    opened: OpenedTower = field(repr=False)
    input: ImageInput
    place: VisionPlace
    dtype: torch.dtype
    beside_gpu: bool = False
    cache_bytes: int = CACHE_BYTES
    known: KnownPictures = field(default_factory=KnownPictures, repr=False)
    _tower: VisionTower | None = field(default=None, repr=False)
    _loading: Future[VisionTower] | None = field(default=None, repr=False)
    _kept: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict, repr=False)
    # Pictures that are being cut or have been; gone with the requests that show them
    _cut: WeakKeyDictionary[Picture, CutPicture] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="lowbit-pictures"),
        repr=False,
    )
    _stopped: Event = field(default_factory=Event, repr=False)

    def stop(self) -> None:
        """Let the threads end at their next piece, since the program waits for them at its end."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prepare(self, picture: Picture) -> Future[ImagePatches] | None:
        """Let another thread decode and cut a picture.

        Returns:
            Its patches; None for a picture of the cache, or if others fill the memory for patches.
        """
        if picture.digest in self._kept:
            return None
        begun = {each.digest: each for each in self._cuts()}
        if picture.digest not in begun:
            taken = sum(map(self._bytes_of, begun.values()))
            if taken and taken + self._bytes_of(picture) > CUT_BYTES:
                return None
        try:
            return self._cut_of(picture)
        except RuntimeError:  # no thread can be started: it is tried again when its turn comes
            return None

    @torch.inference_mode()
    def pieces(self, picture: Picture) -> Iterator[Tensor | Future[Any] | None]:
        """Embeddings of a picture's tokens, from the cache or by the tower; see `EmbeddingSource`.

        Raises:
            RequestError, ResourceError: see `image_patches`.
            ResourceError: memory has no room for the tower or the image.
            FormatError: a weight of the tower is NaN or Inf.
        """
        found = self._kept.get(picture.digest)
        if found is None:
            cut = self._cut_of(picture)
            yield from _until_done(cut)
            self._drop_cut(picture.digest)
            tower = yield from self._loaded(picture)
            for piece in self._run(tower, cut.result()):
                if isinstance(piece, Tensor):
                    found = piece
                else:
                    yield piece
        if found is None:
            raise RuntimeError("the tower made no embeddings")
        self._drop_cut(picture.digest)
        self._keep(picture.digest, found)
        yield found

    def _loaded(self, picture: Picture) -> Generator[Future[VisionTower], None, VisionTower]:
        """The tower; for a CPU another thread loads it, since no device is to be waited for."""
        if self._tower is None and self.place.device != "cpu":
            self._tower = self._load(picture)
        while self._tower is None:
            loading = self._loading
            own = loading is None
            if loading is None:
                loading = self._threads.submit(self._load, picture)
            self._loading = loading
            yield from _until_done(loading)
            if self._loading is loading:
                self._loading = None
            try:
                self._tower = loading.result()
            except LowbitError:  # there may be room for this image where there was none for another
                if own:
                    raise
        return self._tower

    def _cuts(self) -> list[Picture]:
        """Pictures that are being cut or have been."""
        # Other threads let go of requests meanwhile, so that the dictionary itself may change.
        cuts = [each() for each in self._cut.keyrefs()]
        return [each for each in cuts if each is not None]

    def _drop_cut(self, digest: bytes) -> None:
        """Forget the patches of a picture, in all requests that show it."""
        for each in self._cuts():
            if each.digest == digest:
                self._cut.pop(each, None)

    def _cut_of(self, picture: Picture) -> Future[ImagePatches]:
        """Patches of a picture, which a thread begins to cut if nobody has asked for them."""
        same = (self._cut.get(each) for each in self._cuts() if each.digest == picture.digest)
        cut = self._cut.get(picture) or next(same, None)
        if cut is None:
            content, settings, dtype = picture.content, picture.settings, self.dtype
            cut = CutPicture(self._threads.submit(_patches_of, content, settings, dtype))
            # Weakly: patches are not kept as long as a picture of theirs.
            finalize(cut, _cancel, ref(cut.patches)).atexit = False
        self._cut[picture] = cut
        return cut.patches

    def _bytes_of(self, picture: Picture) -> int:
        """Memory of a picture's patches."""
        return _count(picture) * picture.settings.patch_values * self.dtype.itemsize

    def _run(
        self, tower: VisionTower, image: ImagePatches
    ) -> Iterator[Tensor | Future[Tensor] | None]:
        """Pieces of a tower's run; on a CPU beside a GPU it is one piece, which a thread does."""
        patches, on_cpu = len(image.values), tower.device.type == "cpu"
        needed = self.opened.working_bytes(patches, self.dtype)
        # A system that lends memory would end the process that uses it.
        if on_cpu and not has_room("cpu", needed):
            raise _image_too_large(patches, needed, "cpu")
        try:
            if on_cpu and self.beside_gpu:
                yield from self._in_thread(tower, image)
            else:
                yield from tower.pieces(image)
        except torch.OutOfMemoryError:
            raise _image_too_large(patches, needed, tower.device.type) from None

    def _check_host(self) -> None:
        """Refuse a streamed tower whose weights the machine's memory has no room for.

        Its blocks are there twice while they are copied into memory that is locked.
        """
        needed = self.opened.weight_bytes(self.dtype) + self.opened.streamed_bytes(self.dtype)
        if not has_room("cpu", needed):
            raise too_large(needed, "cpu", "end other programs; text is answered meanwhile")

    def _in_thread(self, tower: VisionTower, image: ImagePatches) -> Iterator[Tensor | Future[Any]]:
        """A tower's run by a thread, which ends at its next piece once nobody waits for it."""
        left = Event()
        made = self._threads.submit(_embeddings, tower, image, (left, self._stopped))
        try:
            yield from _until_done(made)
            yield made.result()
        finally:
            left.set()
            made.cancel()

    def _keep(self, digest: bytes, made: Tensor) -> None:
        self._kept[digest] = made
        self._kept.move_to_end(digest)
        while sum(each.nbytes for each in self._kept.values()) > self.cache_bytes:
            self._kept.popitem(last=False)

    def _load(self, picture: Picture) -> VisionTower:
        """The tower, if there is room for it and an image.

        A larger one than a GPU has room for fails by itself; those after it need no CPU.
        """
        patches, place = _count(picture), self.place
        if place.device != "cpu":
            least = min(
                LEAST_PATCHES, self.input.settings.most_pixels // self.input.settings.patch**2
            )
            memory = tower_memory(self.opened, least, self.dtype)
            needed = memory.streamed if place.streamed else memory.whole
            if not has_room(place.device, needed):
                if place.asked:
                    raise too_large(needed, place.device, "--vision-device cpu runs it on the CPU")
                reason = (
                    f"the GPU has not the {gigabytes(needed)} that it takes; a smaller context or "
                    "cache leaves more"
                )
                log.warning("the vision tower runs on the CPU: %s", reason)
                place = VisionPlace("cpu", reason=reason)
        if place.device == "cpu":
            needed = self.opened.weight_bytes(self.dtype)
            needed += self.opened.working_bytes(patches, self.dtype)
            if not has_room("cpu", needed):
                raise too_large(needed, "cpu", "a smaller context or cache leaves more")
        elif place.streamed:
            self._check_host()
        tower = load_tower(self.opened, place.device, self.dtype, place.streamed)
        self.place = place
        return tower


def _until_done(future: Future[Any]) -> Iterator[Future[Any]]:
    """The future, again and again, until it is done."""
    while not future.done():
        yield future


def _cancel(future: ReferenceType[Future[Any]]) -> None:
    """Take work back that no thread has begun."""
    if (found := future()) is not None:
        found.cancel()


def _embeddings(tower: VisionTower, image: ImagePatches, ends: tuple[Event, ...]) -> Tensor:
    """The result of a tower, unless one of the events comes first."""
    for piece in tower.pieces(image):
        if piece is not None:
            return piece
        if any(each.is_set() for each in ends):
            break
    raise CancelledError


def _patches_of(content: bytes, settings: ImageSettings, dtype: torch.dtype) -> ImagePatches:
    """Patches in the tower's type, which are less to copy to its device."""
    found = image_patches(content, settings)
    return replace(found, values=found.values.to(dtype))


def _count(picture: Picture) -> int:
    """Patches of a picture."""
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
