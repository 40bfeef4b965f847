"""A model's vision tower while it is used: read at the first image, with a cache of embeddings."""

import logging
from collections import OrderedDict
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.image_settings import CHANNELS, ImageSettings, image_settings
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.safetensors.checkpoint import Checkpoint
from lowbit.runtime.engine.image_input import ImageInput
from lowbit.runtime.engine.memory import gigabytes
from lowbit.runtime.engine.picture_threads import PictureThreads, PictureWork
from lowbit.runtime.engine.tower_graphs import TowerGraphs
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
from lowbit.runtime.images.file import GoesOn, PictureFile
from lowbit.runtime.images.known import KnownPictures
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.models.vision import (
    OpenedTower,
    VisionTower,
    check_settings,
    load_tower,
    open_tower,
)

log = logging.getLogger("lowbit")
# Pixels, or a CPU's embeddings, that are made before their turn; more if the machine has it
AHEAD_BYTES = 256 << 20
AHEAD_SHARE = 8  # part of the free memory that they may take as well
THREADS = 2  # decode pictures and resize them
LEAST_PATCHES = 8192  # for which a GPU must have room: a screen of 1920 x 1080


@dataclass(slots=True, eq=False)
class CutPicture:
    """A resized picture until the tower takes it, whoever else still waits for it."""

    patches: ImagePatches | None

    def take(self) -> ImagePatches | None:
        """The patches, which are here no more; None if the tower has had them."""
        found, self.patches = self.patches, None
        return found


@dataclass(slots=True, eq=False)
class Vision:
    """The tower of a model; nothing of its weights is read before the first image.

    All methods belong to the engine's thread. Threads decode and resize the pictures for a tower on
    a GPU. A tower on a CPU takes seconds for each: a thread runs it beside the engine's steps, one
    picture after another, before the prompts that show them get room.

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
    _tower: VisionTower | None = field(default=None, repr=False)  # on a CPU its thread's own
    _graphs: TowerGraphs | None = field(default=None, repr=False)  # of a whole tower on a GPU
    _kept: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict, repr=False)
    _kept_bytes: int = 0
    # By digest; gone with the last request that waits for them
    _cuts: WeakValueDictionary[bytes, PictureWork[CutPicture]] = field(
        default_factory=WeakValueDictionary, repr=False
    )
    _runs: WeakValueDictionary[bytes, PictureWork[Tensor]] = field(
        default_factory=WeakValueDictionary, repr=False
    )
    _cutters: PictureThreads = field(
        default_factory=lambda: PictureThreads(THREADS, "lowbit-pictures"), repr=False
    )
    _runner: PictureThreads = field(
        default_factory=lambda: PictureThreads(1, "lowbit-tower"), repr=False
    )

    def stop(self) -> None:
        """Let the threads end at their next piece, since the program waits for them at its end."""
        self._cutters.stop()
        self._runner.stop()

    def is_made(self, picture: Picture) -> bool:
        """True if the cache has the embeddings of a picture."""
        return picture.digest in self._kept

    def prepare(self, picture: Picture) -> PictureWork[CutPicture] | PictureWork[Tensor] | None:
        """Let another thread cut a picture, and run the tower on it where that is on a CPU.

        Returns:
            Its patches or embeddings; None for a picture of the cache, or if those of others fill
            the memory for them.
        """
        if picture.digest in self._kept:
            return None
        on_cpu = self.place.device == "cpu"
        begun: WeakValueDictionary[bytes, PictureWork[Any]] = self._runs if on_cpu else self._cuts
        if (found := begun.get(picture.digest)) is not None:
            return found
        own = self._embedding_bytes(picture) if on_cpu else _pixel_bytes(picture)
        # Other threads let go of requests meanwhile, so that the dictionary itself may change.
        others = [each() for each in begun.valuerefs()]
        taken = sum(each.size_bytes for each in others if each is not None)
        if taken and taken + own > AHEAD_BYTES:
            free = free_bytes("cpu")
            if free is None or taken + own > free // AHEAD_SHARE:
                return None
        try:
            return self._run_of(picture) if on_cpu else self._cut_of(picture)
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
            on_gpu = self._is_on_gpu(picture)
            made = self._on_gpu(picture) if on_gpu else self._on_cpu(picture)
            for piece in made:
                if isinstance(piece, Tensor):
                    found = piece
                else:
                    yield piece
        if found is None:
            raise RuntimeError("the tower made no embeddings")
        self._drop_patches(picture.digest)
        self._keep(picture.digest, found)
        yield found

    def _on_gpu(self, picture: Picture) -> Iterator[Tensor | Future[Any] | None]:
        """Pieces of the run of a tower on a GPU, which is loaded in the engine's thread."""
        image = yield from self._patches(picture)
        try:
            if self._tower is None:
                self._tower = self._load()
            if self._graphs is None and self._tower.device.type == "cuda":
                self._graphs = None if self.place.streamed else self._new_graphs(self._tower)
            yield from (self._graphs or self._tower).pieces(image)
        except torch.OutOfMemoryError:
            needed = self.opened.working_bytes(image.count, self.dtype)
            raise _image_too_large(image.count, needed, self.place.device) from None

    def _new_graphs(self, tower: VisionTower) -> TowerGraphs:
        """Graphs of a tower, which take as much memory as a run without them beside it."""
        device = tower.device.type

        def has_room_to_record(patches: int) -> bool:
            return has_room(device, 2 * self.opened.working_bytes(patches, self.dtype))

        return TowerGraphs(tower, has_room_to_record)

    def _patches(self, picture: Picture) -> Generator[Future[Any], None, ImagePatches]:
        """Patches of a picture, in the memory of nobody else who waits for them."""
        while True:
            work = self._cut_of(picture)
            yield from _until_done(work)
            if self._cuts.get(picture.digest) is work:  # and no newer one
                del self._cuts[picture.digest]
            if (found := work.result().take()) is not None:
                return found

    def _drop_patches(self, digest: bytes) -> None:
        """Forget the patches of a picture, whose embeddings are there."""
        work = self._cuts.get(digest)
        if work is not None and work.done():
            del self._cuts[digest]
            if work.exception() is None:
                work.result().take()

    def _cut_of(self, picture: Picture) -> PictureWork[CutPicture]:
        """Patches of a picture, which a thread begins to cut if nobody has asked for them."""
        work = self._cuts.get(picture.digest)
        if work is None:
            cut = _Cut(picture.file, picture.settings, picture.take_pixels())

            def run(goes_on: GoesOn) -> CutPicture:
                return CutPicture(cut.patches(goes_on))

            work = self._cutters.begin(run, _pixel_bytes(picture))
            self._cuts[picture.digest] = work
        return work

    def _on_cpu(self, picture: Picture) -> Iterator[Tensor | Future[Any]]:
        """Embeddings that a thread makes on a CPU."""
        work = self._run_of(picture)
        yield from _until_done(work)
        if work.exception() is not None:  # memory may have room later
            self._runs.pop(picture.digest, None)
        yield work.result()

    def _run_of(self, picture: Picture) -> PictureWork[Tensor]:
        """Embeddings of a picture, which a thread makes if nobody has asked for them."""
        work = self._runs.get(picture.digest)
        if work is None:
            cut = _Cut(picture.file, picture.settings, picture.take_pixels())
            patches, threads = _count(picture), torch.get_num_threads()

            def run(goes_on: GoesOn) -> Tensor:
                # A new thread may find another number that decode steps are being tried with.
                torch.get_num_threads()
                torch.set_num_threads(threads)
                return self._embed(cut, patches, goes_on)

            work = self._runner.begin(run, self._embedding_bytes(picture))
            self._runs[picture.digest] = work
        return work

    @torch.inference_mode()
    def _embed(self, cut: "_Cut", patches: int, goes_on: GoesOn) -> Tensor:
        """Embeddings of an image file by a tower on a CPU, in the tower's own thread.

        Raises:
            CancelledError: nobody waits for them any more.
        """
        image = cut.patches(goes_on)
        needed = self.opened.working_bytes(patches, self.dtype)
        if self._tower is None:
            self._check_host(self.opened.weight_bytes(self.dtype) + needed)
            self._tower = load_tower(self.opened, "cpu", self.dtype)
        # A system that lends memory would end the process that uses it.
        if not has_room("cpu", needed):
            raise _image_too_large(patches, needed, "cpu")
        for piece in self._tower.pieces(image):
            if piece is not None:
                return piece
            if not goes_on():
                break
        raise CancelledError

    def _embedding_bytes(self, picture: Picture) -> int:
        """Memory of the embeddings of a picture."""
        tokens = picture.rows * picture.columns
        return tokens * self.opened.config.out_hidden_size * self.dtype.itemsize

    def _check_host(self, needed: int) -> None:
        """Refuse a tower that the machine's memory has no room for."""
        if not has_room("cpu", needed):
            advice = "end other programs, or take a smaller context; text is answered meanwhile"
            raise too_large(needed, "cpu", advice)

    def _keep(self, digest: bytes, made: Tensor) -> None:
        if (before := self._kept.pop(digest, None)) is not None:
            self._kept_bytes -= before.nbytes
        self._kept[digest] = made
        self._kept_bytes += made.nbytes
        while self._kept_bytes > self.cache_bytes:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def _is_on_gpu(self, picture: Picture) -> bool:
        """True if the tower is on a GPU, or has room there; else its place becomes the CPU.

        A larger image than a GPU has room for fails by itself; those after it need no CPU.

        Raises:
            ResourceError: it has no room there and was asked for, or no room on the CPU either.
        """
        place = self.place
        if place.device == "cpu" or self._tower is not None:
            return place.device != "cpu"
        least = min(LEAST_PATCHES, self.input.settings.most_pixels // self.input.settings.patch**2)
        memory = tower_memory(self.opened, least, self.dtype)
        needed = memory.streamed if place.streamed else memory.whole
        if has_room(place.device, needed):
            return True
        if place.asked:
            raise too_large(needed, place.device, "--vision-device cpu runs it on the CPU")
        image = self.opened.working_bytes(_count(picture), self.dtype)
        self._check_host(self.opened.weight_bytes(self.dtype) + image)
        reason = (
            f"the GPU has not the {gigabytes(needed)} that it takes; a smaller context or "
            "cache leaves more"
        )
        log.warning("the vision tower runs on the CPU: %s", reason)
        self.place = VisionPlace("cpu", reason=reason)
        return False

    def _load(self) -> VisionTower:
        """The tower on a GPU that has room for it."""
        if self.place.streamed:
            # Its blocks are in memory twice while they are copied into memory that is locked.
            blocks = self.opened.streamed_bytes(self.dtype)
            self._check_host(self.opened.weight_bytes(self.dtype) + blocks)
        return load_tower(self.opened, self.place.device, self.dtype, self.place.streamed)


def _until_done(future: Future[Any]) -> Iterator[Future[Any]]:
    """The future, again and again, until it is done."""
    while not future.done():
        yield future


@dataclass(slots=True)
class _Cut:
    """A picture that a thread is to cut, apart from the request that shows it."""

    file: PictureFile
    settings: ImageSettings
    pixels: Pixels | None  # None where it has to be decoded again

    def patches(self, goes_on: GoesOn) -> ImagePatches:
        """The picture, resized; errors as in `PictureFile.content` and `image_patches`."""
        pixels, self.pixels = self.pixels, None
        return image_patches(pixels or self.file.content(goes_on), self.settings)


def _count(picture: Picture) -> int:
    """Patches of a picture."""
    return picture.rows * picture.columns * picture.settings.merge**2


def _pixel_bytes(picture: Picture) -> int:
    """Memory of a picture in the size that the tower reads."""
    return _count(picture) * picture.settings.patch**2 * CHANNELS


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

    def memories(self, dtype: torch.dtype, context: int) -> tuple[TowerMemory, ...]:
        """See `tower_memories`."""
        return tower_memories(self.opened, self.input.settings, dtype, context)


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
