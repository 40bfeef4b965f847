"""Messages between the processes arrive as they were sent."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch

from lowbit.formats import errors
from lowbit.formats.errors import LowbitError, SettingError, TooLongError
from lowbit.runtime.engine.image_input import span_of
from lowbit.runtime.engine.prompts import EmbedderElsewhere
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.stats import Load, OfSource, Speculated
from lowbit.runtime.images.data_url import bytes_of_data_url
from lowbit.runtime.images.file import EncodedFile, GoesOn, StoredFile
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link.messages import (
    SMALL_FILE,
    Begin,
    Constraints,
    FromEngine,
    LoadFound,
    More,
    Step,
    ToEngine,
    begin_of,
    problem_of,
)
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.images.pictures import SETTINGS

REQUEST = Request(
    prompt=(5, 248_000, 0),
    sampling=SamplingParams(temperature=0.3, seed=2**63 - 1, logit_bias=((7, -100.0),), logprobs=3),
    max_new_tokens=9,
    stop_ids=frozenset({1, 2}),
    message_ends=frozenset({2}),
    prompt_logprobs=0,
    client="203.0.113.7",
    begin="reasoning",
    count=9,
)


@dataclass(frozen=True)
class Other:
    """Stands for the file of a picture, which is elsewhere."""

    number: int
    digest: bytes

    def content(self, goes_on: GoesOn) -> bytes:
        raise AssertionError("nobody needs it")


def carried(message: object, kind: object, most: int = 6000) -> object:
    """A message as another process gets it, which a channel gives the files of shared bytes."""
    files: list[SharedBytes] = []

    def share(found: SharedBytes) -> int:
        files.append(found)
        return found.size

    data = msgspec.msgpack.encode(message, enc_hook=share)
    assert len(data) < most
    found: object = msgspec.msgpack.decode(data, type=kind, dec_hook=lambda *_: files.pop(0))
    return found


def test_a_request_arrives_with_all_that_the_engine_looks_at() -> None:
    limits = Constraints(3, 17, (8, 9))
    found = carried(begin_of([4], "abc", [REQUEST], limits), ToEngine)
    assert isinstance(found, Begin)
    [request] = found.requests(EmbedderElsewhere(), Other)
    assert request == REQUEST
    assert request.count == REQUEST.count
    assert (found.numbers, found.id, found.constraints) == ([4], "abc", limits)


def test_answers_to_one_prompt_are_one_message() -> None:
    picture = Picture(StoredFile(b"\x89PNG" * 1000), SETTINGS, 3, 5, b"digest")
    first = replace(REQUEST, images=(span_of(picture, 2, EmbedderElsewhere()),))
    requests = [replace(first, sampling=replace(first.sampling, seed=seed)) for seed in range(8)]
    found = carried(begin_of(range(8), "abc", requests, Constraints()), ToEngine)
    assert isinstance(found, Begin)
    assert len(msgspec.msgpack.encode(found)) < 6000
    made = found.requests(EmbedderElsewhere(), Other)
    assert [each.sampling.seed for each in made] == list(range(8))
    assert all(each.images is made[0].images and each.prompt == first.prompt for each in made)


def test_every_field_that_the_engine_looks_at_is_carried() -> None:
    """The engine looks at nothing below `client`; salts cannot be sent yet."""
    names = list(Request.__dataclass_fields__)
    looked_at = {*names[: names.index("client") + 1], "count"}
    looked_at -= {"constraint", "salt", "max_new_tokens"}
    own = {"numbers", "id", "begin", "constraints", "pictures"}
    assert looked_at | own == set(Begin.__struct_fields__)


URL = EncodedFile("data:image/png;base64,iVBORw0K", bytes_of_data_url)
SMALL, LARGE = (StoredFile(bytes(SMALL_FILE + more)) for more in (0, 1))


@pytest.mark.parametrize(
    ("file", "expected"),
    [(SMALL, SMALL), (LARGE, Other(4, b"digest")), (URL, Other(4, b"digest"))],
    ids=["small", "large", "a text"],
)
def test_images_are_carried_without_large_files(
    file: StoredFile | EncodedFile, expected: object
) -> None:
    picture = Picture(file, SETTINGS, 3, 5, b"digest")
    request = replace(REQUEST, images=(span_of(picture, 2, EmbedderElsewhere()),))
    found = carried(begin_of([4], "abc", [request], Constraints()), ToEngine, 6000 + SMALL_FILE)
    assert isinstance(found, Begin)
    made: list[Picture] = []

    class Noted(EmbedderElsewhere):
        def pieces(self, picture: Picture) -> Iterator[Any]:
            made.append(picture)
            return iter(())

    [made_request] = found.requests(Noted(), Other)
    [span] = made_request.images
    assert (span.start, span.rows, span.columns, span.digest) == (2, 3, 5, b"digest")
    assert callable(span.embeddings)
    span.embeddings()
    assert (made[0].file, made[0].settings) == (expected, SETTINGS)


def test_a_picture_in_several_places_is_carried_once_with_its_pixels() -> None:
    shared = SharedBytes.of(bytes(range(9)))
    cat = Picture(StoredFile(b"\x89PNG" * 500), SETTINGS, 1, 2, b"cat", Pixels(3, 1, shared))
    dog = Picture(StoredFile(b"\xff\xd8\xff"), SETTINGS, 1, 1, b"dog")
    shown = ((cat, 0), (dog, 2), (cat, 3))
    spans = tuple(span_of(each, start, EmbedderElsewhere()) for each, start in shown)
    message = begin_of([4], "abc", [replace(REQUEST, images=spans)], Constraints())
    assert cat.pixels is not None
    assert not cat.pixels.rgb  # they are not kept as long as the answer
    found = carried(message, ToEngine)
    assert isinstance(found, Begin)
    [request] = found.requests(EmbedderElsewhere(), Other)
    assert [(each.start, each.digest) for each in request.images] == [
        (0, b"cat"),
        (2, b"dog"),
        (3, b"cat"),
    ]
    pictures = [each.embeddings.picture for each in request.images]  # type: ignore[union-attr]
    assert pictures[0] is pictures[2]
    pixels = pictures[0].take_pixels()
    assert (pixels.width, pixels.height, pixels.rgb) == (3, 1, bytearray(range(9)))
    assert not shared._close.alive  # a descriptor is not kept as long as a prompt waits
    assert pictures[1].pixels is None


def test_an_image_without_its_file_cannot_be_sent() -> None:
    request = replace(REQUEST, images=(ImageSpan(0, 1, 1, torch.zeros(1, 4), b"x"),))
    with pytest.raises(ValueError, match="without its file"):
        begin_of([4], "abc", [request], Constraints())


@pytest.mark.parametrize("changes", [{"count": None}, {"constraint": object()}])
def test_what_no_message_can_carry_is_refused(changes: dict[str, object]) -> None:
    fields = {name: getattr(REQUEST, name) for name in Request.__dataclass_fields__}
    with pytest.raises(ValueError, match="no message"):
        begin_of([1], "", [Request(**(fields | changes))], Constraints())


def test_a_step_arrives() -> None:
    scores = TokenLogProbabilities(-0.1, ((3, -0.1), (4, -2.5)))
    drafts = Speculated(3, (3, 2), (2, 1), 2.0, {"drafter": OfSource(3, 5, 4, 3)})
    ended = problem_of(TooLongError("too long"))
    more = More(2, 7, True, [scores], [None, scores], drafts, ended)
    step = Step([1, 2], [[5], [6, 7, 248_000]], [more])
    assert carried(step, FromEngine) == step
    load = LoadFound(Load(1, 2, 3, 4, 5, 6, 7, 8), 10**10, 1)
    assert carried(load, FromEngine) == load


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_errors_keep_their_kind(kind: type) -> None:
    if not issubclass(kind, LowbitError):
        pytest.skip("no error of ours")
    error = SettingError("top_p", "is odd") if kind is SettingError else kind("a message", "a hint")
    found = problem_of(error).error()
    assert (type(found), str(found), found.hint) == (kind, str(error), error.hint)


def test_an_unknown_kind_is_an_error_all_the_same() -> None:
    for kind in ("Nonsense", "printable", "__name__"):
        found = msgspec.structs.replace(problem_of(LowbitError("x")), kind=kind).error()
        assert type(found) is LowbitError
