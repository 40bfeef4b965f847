"""Where a model's vision tower runs: on its GPU, streamed onto it, or on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.image_settings import ImageSettings
from lowbit.formats.machine.memory import free_bytes
from lowbit.runtime.engine.load_options import VisionDevice
from lowbit.runtime.engine.memory import Decided, gigabytes
from lowbit.runtime.models.vision import OpenedTower

CACHE_BYTES = 256 << 20  # of embeddings: 100 screens of 2,040 tokens and 640 numbers each
SLACK = 1.25  # on an image's activations: what the allocator keeps of images of other sizes


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Memory of a tower and one image at a time, and of the embeddings that are kept."""

    whole: int  # of a GPU that holds all weights
    streamed: int  # of a GPU that holds the weights of two blocks
    host: int  # of the machine, for a tower that runs on the CPU


def tower_memory(opened: OpenedTower, patches: int, dtype: torch.dtype) -> TowerMemory:
    """Memory for images of up to so many patches."""
    weights, beside = opened.weight_bytes(dtype), opened.streamed_bytes(dtype)
    image = int(SLACK * opened.working_bytes(patches, dtype)) + CACHE_BYTES
    pixels = patches * torch.Size(opened.config.patch_shape).numel() * torch.float32.itemsize
    return TowerMemory(weights + image, weights - beside + image, weights + image + pixels)


def most_patches(settings: ImageSettings) -> int:
    """Patches of the largest image that a model's settings allow."""
    return max(settings.most_pixels, settings.least_pixels) // settings.patch**2


@dataclass(frozen=True, slots=True)
class VisionPlace:
    """The place of a tower, chosen before its weights are read."""

    device: str  # `cpu` or `cuda`
    streamed: bool = False  # its blocks stay in the host's memory and are copied one by one
    asked: bool = False  # the options name the device: no other is taken when memory is short
    reason: str = ""  # why it was chosen; empty where there was no choice


def place_tower(
    memory: TowerMemory,
    asked: VisionDevice,
    device: str,
    decide: Callable[[int], Decided],
) -> tuple[Decided, VisionPlace]:
    """Choose a place, and the sizes of the cache beside it.

    `auto` takes the first place that leaves the cache as large as without images: all of the tower
    on the GPU, streamed, on the CPU.

    Args:
        asked: by the options.
        device: of the model, `cpu` or `cuda`.
        decide: sizes that fit beside so many bytes on the model's device; raises a ResourceError
            where nothing does.

    Raises:
        RequestError: a GPU for the tower of a model on the CPU.
        ResourceError: there is no room on the device that was asked for.
    """
    if device == "cpu":
        return _beside_a_cpu(memory, asked, decide)
    if asked == "cpu":
        if not has_room("cpu", memory.host):
            raise too_large(memory.host, "cpu", "--vision-device cuda takes the GPU's memory")
        return decide(0), VisionPlace("cpu", asked=True)
    plain = decide(0)
    for streamed, needed in ((False, memory.whole), (True, memory.streamed)):
        found = _as_large(plain, needed, decide)
        if found is not None:
            reason = f"{gigabytes(needed)} are kept free for it and its largest image"
            if streamed:
                reason += f" (streamed: all of it would take {gigabytes(memory.whole)})"
            return found, VisionPlace("cuda", streamed, asked == "cuda", reason)
    if asked == "cuda":
        reason = f"streamed, with {gigabytes(memory.streamed)} less for the cache"
        return decide(memory.streamed), VisionPlace("cuda", True, True, reason)
    room = (
        f"the GPU has no room beside the cache for the {gigabytes(memory.streamed)} that it and "
        "its largest image take at the least; --vision-device cuda takes them from the cache"
    )
    if not has_room("cpu", memory.host):
        room += f"; the machine has not the {gigabytes(memory.host)} either, so images may fail"
    return plain, VisionPlace("cpu", reason=room)


def _beside_a_cpu(
    memory: TowerMemory, asked: VisionDevice, decide: Callable[[int], Decided]
) -> tuple[Decided, VisionPlace]:
    """The place of the tower of a model on the CPU."""
    if asked == "cuda":
        raise RequestError(
            "the vision tower runs on a GPU only where the model does", hint="use --device cuda"
        )
    if asked == "cpu":
        return decide(memory.host), VisionPlace("cpu", asked=True)
    plain = decide(0)
    found = _as_large(plain, memory.host, decide)
    if found is not None:
        return found, VisionPlace("cpu")
    reason = (
        f"memory has no room beside the cache for the {gigabytes(memory.host)} that it and its "
        "largest image take, so images may fail; a smaller --context leaves more"
    )
    return plain, VisionPlace("cpu", reason=reason)


def _as_large(plain: Decided, needed: int, decide: Callable[[int], Decided]) -> Decided | None:
    """Sizes beside so many bytes; None where they are not those without them."""
    try:
        found = decide(needed)
    except ResourceError:
        return None
    return found if found.is_as_large(plain) else None


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
