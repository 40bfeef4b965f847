"""Pixels that are stored until somebody cuts them, and their bound."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image

from lowbit.runtime.images import picture as picture_module
from lowbit.runtime.images import pixels as module
from lowbit.runtime.images.known import KnownPictures
from lowbit.runtime.images.patches import image_patches
from lowbit.runtime.images.picture import Picture, PictureReader
from lowbit.runtime.images.pixels import (
    LEAST_STORED,
    MOST_STORED,
    Pixels,
    PixelStore,
    pixels_of,
)
from lowbit.runtime.images.shared import SharedBytes
from tests.runtime.images.pictures import SETTINGS, picture, saved

FEW = Image.new("RGB", (10, 10))  # 100 pixels


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_STORED", 50)
    monkeypatch.setattr(picture_module, "MOST_KEPT_PIXELS", 6000)


def reader(most: int, sends: bool = True) -> PictureReader:
    return PictureReader(SETTINGS, KnownPictures(pixels=PixelStore(most)), sends)


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_large_picture_is_cut_from_its_stored_pixels(kind: str, sends: bool) -> None:
    file = saved(picture(90, 70), kind)
    found = reader(6300, sends).read(file)
    assert not found.goes_along
    pixels = found.take_pixels()
    assert pixels is not None
    assert isinstance(pixels.rgb, SharedBytes) == sends
    cut = image_patches(pixels, SETTINGS)
    assert torch.equal(cut.values(), image_patches(file, SETTINGS).values())
    assert found.take_pixels() is None


def test_room_is_for_all_prompts_together_and_comes_back() -> None:
    known = KnownPictures(pixels=PixelStore(2 * 6300))
    files = [saved(picture(90, 70, seed)) for seed in range(6)]

    def read(number: int) -> Picture:
        return PictureReader(SETTINGS, known).read(files[number])

    first, second, third = map(read, range(3))
    assert [each.pixels is not None for each in (first, second, third)] == [True, True, False]
    assert first.take_pixels() is not None  # somebody cuts it
    fourth = read(3)
    assert fourth.pixels is not None
    assert read(4).pixels is None
    del second  # its request has ended
    assert read(5).pixels is not None


def test_small_pictures_and_too_large_ones_are_not_stored() -> None:
    store = PixelStore(100)
    assert store.keep(Image.new("RGB", (7, 7)), sends=True) is None
    assert store.keep(Image.new("RGB", (11, 10)), sends=True) is None
    assert store.keep(FEW, sends=True) is not None


def test_pixels_that_are_copied_count(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may = threading.Event(), threading.Event()

    def slow(*given: Any) -> Pixels | None:
        begun.set()
        assert may.wait(20)
        return pixels_of(*given)

    monkeypatch.setattr(module, "pixels_of", slow)
    store = PixelStore(199)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(store.keep, FEW, True)
        assert begun.wait(20)
        assert store.keep(FEW, True) is None
        may.set()
        held = first.result(20)
    assert held is not None
    assert store.keep(FEW, True) is None
    del held, first
    assert store.keep(FEW, True) is not None


def test_room_comes_back_from_pixels_that_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: object) -> SharedBytes:
        raise OSError(errno.EMFILE, "Too many open files")

    def bug(*_: object) -> Pixels:
        raise MemoryError

    store = PixelStore(100)
    with monkeypatch.context() as patch:
        patch.setattr(SharedBytes, "joined", full)
        assert store.keep(FEW, True) is None
        patch.setattr(module, "pixels_of", bug)
        with pytest.raises(MemoryError):
            store.keep(FEW, True)
    assert store.keep(FEW, True) is not None


def test_descriptors_of_stored_pictures_are_few() -> None:
    """A process may have 1,024 files, and connections are files, too."""
    assert MOST_STORED // LEAST_STORED <= 64
