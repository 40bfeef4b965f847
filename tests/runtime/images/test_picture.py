"""Pictures: tokens by detail, digests, and limits of a prompt's images."""

import errno
import hashlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL.Image import Image

from lowbit.formats.errors import RequestError
from lowbit.runtime.images import known as known_module
from lowbit.runtime.images import patches
from lowbit.runtime.images import picture as module
from lowbit.runtime.images.decode import ImageLimits, UnreadableImageError, decode_image
from lowbit.runtime.images.known import KnownPictures
from lowbit.runtime.images.patches import image_patches
from lowbit.runtime.images.picture import PictureReader, limited
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link.channel import MOST_FILES
from tests.runtime.images.pictures import SETTINGS, picture, saved

WIDE = replace(SETTINGS, most_pixels=1 << 24)
PNG = saved(picture(90, 70))


def test_a_picture_has_the_tokens_of_its_patches() -> None:
    for width, height in ((90, 70), (31, 500), (700, 400)):
        file = saved(picture(width, height))
        found = PictureReader(SETTINGS).read(file)
        made = image_patches(file, found.settings)
        assert (found.rows, found.columns) == (made.rows, made.columns)


def test_the_digest_tells_files_and_settings_apart() -> None:
    def read(content: bytes, **changes: Any) -> bytes:
        return PictureReader(replace(SETTINGS, **changes)).read(content).digest

    other = saved(picture(90, 70, seed=1))
    digests = {read(PNG), read(other), read(PNG, most_pixels=5000), read(PNG, mean=(0.4, 0.5, 0.5))}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}
    assert read(bytes(bytearray(PNG))) in digests


def test_a_detail_limits_the_pixels() -> None:
    file = saved(picture(2000, 1500))
    reader = PictureReader(WIDE)
    low, auto, high = (reader.read(file, each) for each in ("low", "auto", "high"))
    assert low.rows * low.columns <= 256 < 1500 < auto.rows * auto.columns <= 2048
    assert (high.rows, high.columns) == (47, 62)
    assert len({low.digest, auto.digest, high.digest}) == 3


def test_a_detail_changes_nothing_for_a_small_image() -> None:
    reader = PictureReader(SETTINGS)
    assert reader.read(PNG, "auto").digest == reader.read(PNG, "high").digest


def test_an_unknown_detail_is_refused() -> None:
    with pytest.raises(RequestError, match=r"`detail` must be low, auto, high, got \"fine\""):
        limited(SETTINGS, "fine")


def test_a_detail_is_never_below_what_the_model_asks_for() -> None:
    least = replace(WIDE, least_pixels=1 << 20)
    assert limited(least, "low").most_pixels == 1 << 20


def test_many_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IMAGES", 2)
    reader = PictureReader(SETTINGS)
    reader.read(PNG)
    reader.read(PNG)
    with pytest.raises(RequestError, match="may have 2 images, this one has more"):
        reader.read(PNG)


def test_pixels_of_all_images_are_limited_before_one_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_PROMPT_PIXELS", 90 * 70 + 100)
    reader = PictureReader(SETTINGS)
    reader.read(PNG)
    reader.read(PNG)  # it is not decoded again
    words = "90 x 70 = 6300 pixels, all of its prompt may have 100 more"
    with pytest.raises(RequestError, match=words) as refused:
        reader.read(saved(picture(90, 70, 1)))
    assert refused.value.hint == "leave out the oldest ones"


def test_known_images_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat goes on whatever the images of its earlier turns have in all."""
    monkeypatch.setattr(module, "MOST_PROMPT_PIXELS", 90 * 70)
    known = KnownPictures()
    files = [saved(picture(90, 70, seed)) for seed in range(4)]
    for each in files[:3]:
        PictureReader(SETTINGS, known).read(each)
    reader = PictureReader(SETTINGS, known)
    assert [reader.read(each).rows for each in files] == [2] * 4
    assert [reader.read(each).rows for each in reversed(files[:3])] == [2] * 3
    assert PictureReader(SETTINGS, known).read(files[3]).rows == 2
    late = PictureReader(SETTINGS, known)
    late.read(saved(picture(90, 70, 4)))  # takes all that is left
    assert [late.read(each).rows for each in files] == [2] * 4


def test_pixels_that_are_decoded_in_vain_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a prompt with many damaged images would take a thread for minutes."""
    monkeypatch.setattr(module, "MOST_PROMPT_PIXELS", 3 * 90 * 70)
    reader = PictureReader(SETTINGS)
    for cut in (30, 31):
        with pytest.raises(RequestError, match="damaged"):
            reader.read(PNG[:-cut])
    with pytest.raises(RequestError, match="begins with the bytes"):
        reader.read(b"hello")  # no decoder has seen it
    assert reader.pixels == 2 * 90 * 70
    reader.read(PNG)
    with pytest.raises(RequestError, match="may have 0 more"):
        reader.read(PNG[:-32])


def test_scans_of_a_jpeg_count_as_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 20 KB may have thousands, each of which goes over all of its pixels."""
    file = saved(picture(40, 40), "JPEG", progressive=True)
    scan = file[file.rindex(b"\xff\xda") : -2]
    files = [file[:-2] + scan * (scans - 10) + file[-2:] for scans in (10, 16, 17, 48)]
    reader = PictureReader(SETTINGS)
    counts = [0]
    for each in files:
        reader.read(each)
        counts.append(reader.pixels)
    assert [after - before for before, after in pairwise(counts)] == [1600, 1600, 3200, 4800]
    monkeypatch.setattr(module, "MOST_PROMPT_PIXELS", 3199)
    with pytest.raises(RequestError, match=r"= 1600 pixels, worked on as 3200 for its scans, all"):
        PictureReader(SETTINGS).read(files[2])


def test_an_image_that_fails_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of parts may name one address, whose file comes once."""
    reads = Mock(side_effect=decode_image)
    hashes = Mock(side_effect=hashlib.sha256)
    monkeypatch.setattr(module, "decode_image", reads)
    reader, file = PictureReader(SETTINGS), PNG[:-30]
    monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=hashes))
    words = set()
    for each in (file, file, bytes(bytearray(file))):
        with pytest.raises(UnreadableImageError, match="damaged") as caught:
            reader.read(each)
        words.add(str(caught.value))
    assert (len(words), reads.call_count) == (1, 1)
    assert [call.args[0] for call in hashes.call_args_list].count(file) == 2


def test_an_image_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counted(content: bytes, limits: ImageLimits) -> Image:
        decoded.append(content)
        return decode_image(content, limits)

    monkeypatch.setattr(module, "decode_image", counted)
    known = KnownPictures()
    one, two = (PictureReader(SETTINGS, known) for _ in range(2))
    assert one.read(PNG).digest == two.read(PNG, "low").digest
    assert decoded == [PNG]
    assert (one.pixels, two.pixels) == (6300, 0)
    with pytest.raises(RequestError, match="damaged"):
        two.read(PNG[:200])
    with pytest.raises(RequestError, match="damaged"):
        two.read(PNG[:200])


def test_few_sizes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "MOST_KNOWN", 2)
    known = KnownPictures()
    for number, digest in enumerate((b"a", b"b", b"a", b"c")):
        if known.find(digest) is None:
            known.note(digest, (number, 1))
    assert [known.find(each) for each in (b"a", b"b", b"c")] == [(0, 1), None, (3, 1)]


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(90, 70), (64, 96), (700, 500)])
def test_decoded_pixels_make_the_same_patches(
    size: tuple[int, int], kind: str, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(picture(*size), kind)
    expected = image_patches(file, SETTINGS)
    found = PictureReader(SETTINGS, sends=sends).read(file)
    monkeypatch.setattr(patches, "decode_image", None)
    pixels = found.take_pixels()
    assert pixels is not None
    assert isinstance(pixels.rgb, SharedBytes) == sends
    assert found.take_pixels() is None  # they are nobody else's
    made = image_patches(pixels, SETTINGS)
    assert torch.equal(made.values(), expected.values())
    assert made.grid == expected.grid


def test_pixels_that_cannot_be_shared_are_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> SharedBytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SharedBytes, "joined", full)
    found = PictureReader(SETTINGS).read(saved(picture(90, 70)))
    assert (found.rows, found.columns, found.pixels) == (2, 3, None)


def test_many_pixels_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_PIXELS", 2 * 90 * 70)
    reader = PictureReader(SETTINGS)
    assert reader.read(saved(picture(128, 128))).pixels is None
    files = [saved(picture(90, 70, seed)) for seed in range(3)]
    assert [reader.read(each).pixels is not None for each in files] == [True, True, False]


def test_few_images_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor, and a message with too many would be lost."""
    assert module.MOST_KEPT <= MOST_FILES
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    reader = PictureReader(SETTINGS)
    files = [saved(picture(90, 70, seed)) for seed in range(3)]
    assert [reader.read(each).pixels is not None for each in files] == [True, True, False]


def test_a_file_that_a_prompt_shows_again_is_the_same_picture() -> None:
    reader = PictureReader(WIDE)
    large = saved(picture(2000, 1500))
    assert reader.read(large) is reader.read(bytes(bytearray(large)))
    assert reader.read(large, "low") is not reader.read(large)
    assert reader.count == 4
