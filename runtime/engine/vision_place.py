"""The place of a model's vision tower: its GPU, as a whole or streamed, or the CPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.image_settings import ImageSettings
from lowbit.formats.machine.memory import free_bytes
from lowbit.runtime.engine.load_options import FEW_SEQUENCES, VisionDevice
from lowbit.runtime.engine.memory import Decided, gigabytes
from lowbit.runtime.engine.tower_graphs import MOST_RECORDED
from lowbit.runtime.images.picture import limited
from lowbit.runtime.models.vision import OpenedTower

CACHE_BYTES = 256 << 20  # of embeddings: 100 screens of 2,040 tokens and 640 numbers each
# On an image's activations: libraries take up to 0.3 of them on an H200, and the allocator keeps
# memory of images of other sizes.
SLACK = 1.6
# Of sequences and their cache, where nobody has asked for a number of them: enough beside a whole
# tower, or one for larger images. Both are comfort: a streamed one copies its weights, up to .9 GB,
# for each picture.
COMFORT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Memory of a tower and one image at a time, and of the embeddings that are kept."""

    pixels: int  # of the image, resized
    whole: int  # of a GPU that holds all weights, with recorded runs
    streamed: int  # of a GPU that holds the weights of two blocks
    host: int  # of the machine, for a tower that runs on the CPU


def tower_memory(opened: OpenedTower, patches: int, dtype: torch.dtype) -> TowerMemory:
    """Memory for images of up to so many patches."""
    weights, beside = opened.weight_bytes(dtype), opened.streamed_bytes(dtype)
    image = int(SLACK * opened.working_bytes(patches, dtype)) + CACHE_BYTES
    recorded = opened.working_bytes(min(patches, MOST_RECORDED), dtype)
    numbers = patches * torch.Size(opened.config.patch_shape).numel() * torch.float32.itemsize
    return TowerMemory(
        pixels=patches * opened.config.patch_size**2,
        whole=weights + image + recorded,
        streamed=weights - beside + image,
        host=weights + image + numbers,
    )


def tower_memories(
    opened: OpenedTower, settings: ImageSettings, dtype: torch.dtype, context: int
) -> tuple[TowerMemory, ...]:
    """Memory for the largest image that a model allows, then for the largest without a `detail`.

    A larger one than a context has tokens for is refused before the tower sees it.
    """
    fits = max(settings.least_pixels, context * settings.factor**2)
    largest = (settings, limited(settings, "auto"))
    patches = dict.fromkeys(
        min(fits, max(each.most_pixels, each.least_pixels)) // settings.patch**2 for each in largest
    )
    return tuple(tower_memory(opened, each, dtype) for each in patches)


@dataclass(frozen=True, slots=True)
class VisionPlace:
    """The place of a tower, chosen before its weights are read."""

    device: str  # `cpu` or `cuda`
    streamed: bool = False  # its blocks stay in the host's memory and are copied one by one
    asked: bool = False  # the options name the device: no other is taken when memory is short
    reason: str = ""  # why it was chosen; empty where there was no choice


def place_tower(
    memories: Callable[[int], Sequence[TowerMemory]],
    asked: VisionDevice,
    device: str,
    decide: Callable[[int], Decided],
) -> tuple[Decided, VisionPlace]:
    """Choose a place, and the sizes of the cache beside it.

    `auto` takes the first place that leaves the cache as large as without images: all of the tower
    on the GPU, streamed, either for smaller images, on the CPU. Of sequences whose number memory
    has chosen a part is enough, see `_on_gpu`.

    Args:
        memories: for images of several sizes, the largest first, in a context of so many tokens.
        asked: by the options.
        device: of the model, `cpu` or `cuda`.
        decide: sizes that fit beside so many bytes on the model's device; raises a ResourceError
            where nothing does.

    Raises:
        RequestError: a GPU for the tower of a model on the CPU.
        ResourceError: there is no room on the device that was asked for.
    """
    if device == "cpu" and asked == "cuda":
        raise RequestError(
            "the vision tower runs on a GPU only where the model does", hint="use --device cuda"
        )
    plain, named = decide(0), asked == "cuda"
    sizes = memories(plain.cache.context)
    if device == "cpu":
        return _beside_a_cpu(plain, sizes, asked == "cpu", decide)
    least = sizes[-1]
    if asked == "cpu":
        if not has_room("cpu", least.host):
            raise too_large(least.host, "cpu", "--vision-device cuda takes the GPU's memory")
        return plain, VisionPlace("cpu", asked=True)
    for each, streamed, share in _on_gpu(plain, sizes):
        needed = each.streamed if streamed else each.whole
        if (found := _as_large(plain, needed, decide, share)) is not None:
            words = _kept_free(each, needed, streamed)
            return found, VisionPlace("cuda", streamed, named, words)
    if named:
        reason = f"{_kept_free(least, least.streamed, True)}, taken from the cache"
        return decide(least.streamed), VisionPlace("cuda", True, True, reason)
    room = (
        f"the GPU has no room beside the cache for the {gigabytes(least.streamed)} that the tower "
        f"and an image of {least.pixels:,} pixels take; --vision-device cuda takes them from the "
        "cache"
    )
    if not has_room("cpu", least.host):
        room += f"; the machine has not the {gigabytes(least.host)} either, so images may fail"
    return plain, VisionPlace("cpu", reason=room)


def _kept_free(memory: TowerMemory, needed: int, streamed: bool) -> str:
    image = f"an image of {memory.pixels:,} pixels"
    words = f"{gigabytes(needed)} are kept free for the tower and {image}"
    return f"streamed, {words}" if streamed else words


def _on_gpu(
    plain: Decided, sizes: Sequence[TowerMemory]
) -> Iterator[tuple[TowerMemory, bool, float]]:
    """Places on a GPU, the best first: images, streamed or not, and the share that is enough.

    The last takes the memory of six sequences of a 4B or 9B. On a small card that is more than a
    quarter, and yet better than seconds for each picture: FEW_SEQUENCES are enough there, which
    are as many as clients share.
    """
    count, reason = plain.sequences.count, plain.sequences.reason
    for each in sizes:
        for streamed in (False, True):
            share = COMFORT_SHARE
            if each is sizes[-1] and streamed:
                share = min(share, FEW_SEQUENCES / count)
            yield each, streamed, 1.0 if reason is None else share


def _beside_a_cpu(
    plain: Decided, sizes: Sequence[TowerMemory], asked: bool, decide: Callable[[int], Decided]
) -> tuple[Decided, VisionPlace]:
    """The place of the tower of a model on the CPU, which may have been asked for."""
    least = sizes[-1]
    for each in sizes:
        if (found := _as_large(plain, each.host, decide)) is not None:
            return found, VisionPlace("cpu", asked=asked)
    if asked:
        return decide(least.host), VisionPlace("cpu", asked=True)
    reason = (
        f"memory has no room beside the cache for the {gigabytes(least.host)} that the tower and "
        f"an image of {least.pixels:,} pixels take, so images may fail; a smaller --context leaves "
        "more"
    )
    return plain, VisionPlace("cpu", reason=reason)


def _as_large(
    plain: Decided, needed: int, decide: Callable[[int], Decided], share: float = 1.0
) -> Decided | None:
    """Sizes beside so many bytes; None where they are less than a share of those without them."""
    try:
        found = decide(needed)
    except ResourceError:
        return None
    return found if found.keeps(plain, share) else None


def has_room(device: str, needed: int) -> bool:
    """Tell if so many bytes are free; True where the system does not tell."""
    left = free_bytes(device)
    return left is None or left >= needed


def free_on(device: str) -> str:
    """`, free on cuda: 1.20 GB`; empty where the system does not tell."""
    left = free_bytes(device)
    return "" if left is None else f", free on {device}: {gigabytes(left)}"


def too_large(needed: int, device: str, other: str) -> ResourceError:
    """The error of a tower that does not fit; `other` is advice."""
    return ResourceError(
        f"needs {gigabytes(needed)} for the vision tower and an image{free_on(device)}", hint=other
    )
