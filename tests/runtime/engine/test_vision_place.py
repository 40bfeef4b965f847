"""The place of the vision tower, and the memory that is kept for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.image_settings import read_settings
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.runtime.engine import memory, vision_place
from lowbit.runtime.engine.load import _with_vision, decide
from lowbit.runtime.engine.load_options import FEW_SEQUENCES, VisionDevice
from lowbit.runtime.engine.memory import Account, Decided
from lowbit.runtime.engine.tower_graphs import MOST_RECORDED
from lowbit.runtime.engine.vision import OpenedVision, open_vision
from lowbit.runtime.engine.vision_place import (
    CACHE_BYTES,
    SLACK,
    TowerMemory,
    VisionPlace,
    place_tower,
    tower_memories,
    tower_memory,
)
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.models.shards import shard_of
from lowbit.runtime.weights.share import Share
from tests.seeing_models import PROCESSOR

BF16 = torch.bfloat16
OPTIONS = lowbit.LoadOptions(context=1024, max_sequences=2)
Free = Callable[[float, float], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """`free(gpu, host)` leaves so many bytes."""

    def leave(gpu: float, host: float) -> None:
        for module in (memory, vision_place):
            monkeypatch.setattr(
                module, "free_bytes", lambda device: int(host if device == "cpu" else gpu)
            )

    return leave


@pytest.fixture(scope="module")
def vision(seeing_folder: Path) -> OpenedVision:
    found, missing = open_vision(open_model(seeing_folder).checkpoint)
    assert found is not None, missing
    return found


def tower(whole: int = 30 << 20, streamed: int = 20 << 20) -> TowerMemory:
    return TowerMemory(1_000_000, whole, streamed, 40 << 20)


def account(folder: Path, device: str) -> Account:
    return Account(open_model(folder), device, BF16, BF16_CACHE, 300)


def placed(
    folder: Path, asked: VisionDevice, device: str, need: TowerMemory
) -> tuple[Decided, VisionPlace]:
    own = account(folder, device)
    return place_tower(
        lambda _: [need],
        asked,
        device,
        lambda needed: decide(replace(own, vision_bytes=needed), OPTIONS),
    )


def needed(folder: Path, device: str, vision_bytes: int) -> float:
    """Memory that a model with the cache of OPTIONS takes beside so many bytes."""
    own = replace(account(folder, device), vision_bytes=vision_bytes)
    size = decide(own, OPTIONS).cache
    return own.needed(size, size.all_pages) * memory.HEADROOM + 2


def test_memory_of_a_tower(vision: OpenedVision) -> None:
    [found] = vision.memories(
        BF16, 1 << 20
    )  # what is largest by default is all that the settings allow
    opened, patches = vision.opened, 200_000 // 256  # `longest_edge` of the settings
    weights = opened.weight_bytes(BF16)
    image = int(SLACK * opened.working_bytes(patches, BF16)) + CACHE_BYTES
    assert found.pixels == patches * 256
    recorded = opened.working_bytes(patches, BF16)
    assert found.whole == weights + image + recorded
    assert found.streamed == weights + image - opened.streamed_bytes(BF16)
    assert found.host == weights + image + patches * 1536 * 4
    assert opened.streamed_bytes(BF16) == 0  # it has two blocks
    settings = read_settings(PROCESSOR, "here")
    large = replace(settings, most_pixels=1 << 24)
    real = tower_memories(opened, large, BF16, 1 << 20)
    assert [each.pixels for each in real] == [1 << 24, 1 << 21]
    assert real[0] == tower_memory(opened, 65_536, BF16)
    beside = int(SLACK * opened.working_bytes(65_536, BF16)) + weights + CACHE_BYTES
    assert real[0].whole - beside == opened.working_bytes(MOST_RECORDED, BF16)
    short = tower_memories(opened, large, BF16, 8192)
    assert [each.pixels for each in short] == [1 << 23, 1 << 21]  # no more fits a prompt
    [shorter] = tower_memories(opened, large, BF16, 100)
    assert shorter.pixels == 100 * 1024
    [small] = tower_memories(opened, replace(settings, most_pixels=1), BF16, 1 << 20)
    assert small.pixels == 4096  # what small images become


def test_a_deep_tower_is_streamed_in_two_blocks(vision: OpenedVision) -> None:
    deep = replace(vision.opened, config=replace(vision.opened.config, depth=27))
    h, inner = 48, 80
    block = 4 * h * h + 2 * h * inner + 3 * h + h + 4 * h + inner + h
    assert deep.streamed_bytes(BF16) == 25 * block * 2
    assert deep.weight_bytes(BF16) - vision.opened.weight_bytes(BF16) == 25 * block * 2


@pytest.mark.parametrize(
    ("asked", "gpu", "place", "reserved"),
    [
        ("auto", "whole", ("cuda", False), "whole"),
        ("auto", "streamed", ("cuda", True), "streamed"),
        ("auto", "none", ("cpu", False), "none"),
        ("cuda", "whole", ("cuda", False), "whole"),
        ("cuda", "streamed", ("cuda", True), "streamed"),
        ("cpu", "whole", ("cpu", False), "none"),
        ("cpu", "none", ("cpu", False), "none"),
    ],
)
def test_the_first_place_that_leaves_the_cache_is_taken(
    seeing_folder: Path,
    free: Free,
    asked: VisionDevice,
    gpu: str,
    place: tuple[str, bool],
    reserved: str,
) -> None:
    need = {"whole": 30 << 20, "streamed": 20 << 20, "none": 0}
    free(1e12, 1e12)
    left = needed(seeing_folder, "cuda", need[gpu])
    free(left, 1e12)
    memory_of = tower(need["whole"], need["streamed"])
    decided, found = placed(seeing_folder, asked, "cuda", memory_of)
    assert (found.device, found.streamed) == place
    assert found.asked == (asked != "auto")
    assert decided.account.vision_bytes == need[reserved]
    assert (decided.cache.context, decided.sequences.count) == (1024, 2)
    assert bool(found.reason) == (asked != "cpu")
    if place == ("cpu", False) and asked == "auto":
        assert "the GPU has no room beside the cache for the 21.0 MB" in found.reason
        assert "an image of 1,000,000 pixels" in found.reason
        assert "--vision-device cuda takes them from the cache" in found.reason
        assert "may fail" not in found.reason
    if place == ("cuda", True):
        wanted = "streamed, 21.0 MB are kept free for the tower and an image of 1,000,000 pixels"
        assert found.reason.startswith(wanted)


def test_a_gpu_that_is_asked_for_takes_from_the_cache_or_says_what_is_lacking(
    seeing_folder: Path, free: Free
) -> None:
    free(1e12, 1e12)
    own = account(seeing_folder, "cuda")
    options = replace(OPTIONS, context=None)

    def sized(needed: int) -> Decided:
        return decide(replace(own, vision_bytes=needed), options)

    plain = sized(0)
    size = plain.cache
    free(own.needed(size, size.all_pages) * memory.HEADROOM + 2 + (20 << 20), 1e12)
    decided, found = place_tower(lambda _: [tower()], "cuda", "cuda", sized)
    assert (found.device, found.streamed, found.asked) == ("cuda", True, True)
    assert found.reason.endswith("pixels, taken from the cache")
    assert 0 < decided.cache.pages < plain.cache.pages
    free(needed(seeing_folder, "cuda", 0), 1e12)
    wanted = (
        r"needs .* for the vision tower with an image \(21\.0 MB\), weights and a cache \(bf16\) "
        r"of 1024 tokens for 2 sequences, free on cuda"
    )
    with pytest.raises(ResourceError, match=wanted) as e:
        placed(seeing_folder, "cuda", "cuda", tower())
    assert "--vision-device cpu keeps nothing for images" in str(e.value.hint)


def test_the_first_of_several_gpus_alone_has_the_tower(seeing_folder: Path, free: Free) -> None:
    free(1e12, 1e12)
    whole = account(seeing_folder, "cuda")
    own = replace(whole, opened=shard_of(whole.opened, Share(0, 2)), ranks=2)
    decided, vision, missing = _with_vision(own, OPTIONS)
    assert vision is not None, missing
    assert (vision.place.device, missing) == ("cuda", "")
    first, size = decided.account, decided.cache
    apart = first.needed(size, size.all_pages) - first.follower.needed(size, size.all_pages)
    assert apart == first.vision_bytes > 0
    free(first.follower.needed(size, size.all_pages) * memory.HEADROOM + 2, 1e12)
    with pytest.raises(ResourceError, match="for the vision tower with an image") as e:
        _with_vision(own, replace(OPTIONS, vision_device="cuda"))
    assert "--vision-device cpu keeps nothing for images" in str(e.value.hint)
    assert "drafts" not in str(e.value.hint)


def test_room_for_smaller_images_is_better_than_the_cpu(seeing_folder: Path, free: Free) -> None:
    free(1e12, 1e12)
    own, towers = account(seeing_folder, "cuda"), [tower(900 << 20, 800 << 20), tower()]
    for left, expected in ((30 << 20, (False, 30 << 20)), (20 << 20, (True, 20 << 20))):
        free(1e12, 1e12)
        free(needed(seeing_folder, "cuda", left), 1e12)
        decided, found = place_tower(
            lambda _: towers,
            "auto",
            "cuda",
            lambda n: decide(replace(own, vision_bytes=n), OPTIONS),
        )
        assert (found.streamed, decided.account.vision_bytes) == expected
        assert "an image of 1,000,000 pixels" in found.reason


@pytest.mark.parametrize(
    ("lost", "streamed", "place"),
    [
        (0.2, 0.1, ("cuda", False)),
        (0.3, 0.2, ("cuda", True)),
        (0.9, 0.3, ("cuda", True)),
        (2.0, 0.8, ("cuda", True)),
        (2.0, 0.95, ("cpu", False)),
    ],
)
def test_a_part_of_sequences_that_memory_chose_may_go(
    seeing_folder: Path, free: Free, lost: float, streamed: float, place: tuple[str, bool]
) -> None:
    """A quarter for a whole tower, and all but four where the CPU would run it."""
    own = account(seeing_folder, "cuda")
    options = replace(OPTIONS, max_sequences=None)

    def sized(needed: int) -> Decided:
        return decide(replace(own, vision_bytes=needed), options)

    free(1e12, 1e12)
    size = replace(sized(0).cache, sequences=40, pages=40 * 16)
    free(own.needed(size, size.all_pages) * memory.HEADROOM + 2, 1e12)
    plain = sized(0).sequences.count
    assert 30 < plain < 64
    each = (own.row_bytes(size) + own.page_bytes(size.pages)) // 40
    taken = [int(share * plain * each) for share in (lost, streamed)]
    decided, found = place_tower(lambda _: [tower(*taken)], "auto", "cuda", sized)
    assert (found.device, found.streamed) == place
    left = decided.sequences.count
    assert left >= (0.75 * plain if place == ("cuda", False) else FEW_SEQUENCES)
    assert (left < plain) == (place[0] == "cuda")


def test_a_machine_without_room_for_the_tower(seeing_folder: Path, free: Free) -> None:
    free(1e12, 1e12)
    left = needed(seeing_folder, "cuda", 0)
    free(left, 1000)
    _, found = placed(seeing_folder, "auto", "cuda", tower())
    assert "the machine has not the 41.9 MB either, so images may fail" in found.reason
    with pytest.raises(ResourceError, match=r"needs 41\.9 MB for the vision tower .* on cpu") as e:
        placed(seeing_folder, "cpu", "cuda", tower())
    assert "--vision-device cuda" in str(e.value.hint)


def test_a_model_on_a_cpu(seeing_folder: Path, free: Free) -> None:
    free(0, 1e12)
    decided, found = placed(seeing_folder, "auto", "cpu", tower())
    assert (found, decided.account.vision_bytes) == (VisionPlace("cpu"), 40 << 20)
    left = needed(seeing_folder, "cpu", 0)
    free(0, left)
    decided, found = placed(seeing_folder, "auto", "cpu", tower())
    assert decided.account.vision_bytes == 0
    assert "memory has no room beside the cache for the 41.9 MB" in found.reason
    with pytest.raises(ResourceError, match=r"vision tower with an image \(41\.9 MB\)") as e:
        placed(seeing_folder, "cpu", "cpu", tower())
    assert "--vision-device auto keeps nothing for images" in str(e.value.hint)
    with pytest.raises(RequestError, match="runs on a GPU only where the model does"):
        placed(seeing_folder, "cuda", "cpu", tower())


def test_a_loaded_model_keeps_room_and_says_nothing_where_there_was_no_choice(
    seeing_folder: Path,
) -> None:
    model = lowbit.load(seeing_folder, device="cpu", context=1024)
    assert model.vision is not None
    assert model.vision.place == VisionPlace("cpu")
    with pytest.raises(RequestError, match="runs on a GPU only where the model does"):
        lowbit.load(seeing_folder, device="cpu", vision_device="cuda")


def test_text_is_answered_where_only_the_tower_does_not_fit(
    seeing_folder: Path, free: Free
) -> None:
    free(0, needed(seeing_folder, "cpu", 0) + 1000)
    model = lowbit.load(seeing_folder, OPTIONS, device="cpu")
    assert len(model.generate("Hi", max_new_tokens=2).token_ids) == 2
    assert model.vision is not None
    assert "images may fail" in model.vision.place.reason
