"""Messages between the HTTP side and the engine, as MessagePack.

A step of the engine is one message, whatever the number of its answers. Requests and their grammars
are called by numbers that the HTTP side chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lowbit.formats import errors
from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import LowbitError
from lowbit.formats.image_settings import ImageSettings
from lowbit.runtime.engine.image_input import (
    ImageInput,
    PictureEmbedder,
    PictureEmbeddings,
    span_of,
)
from lowbit.runtime.engine.request import Limits, Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.engine.stats import Load, Speculated
from lowbit.runtime.images.file import PictureFile, StoredFile
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.answer import OutputStart

SMALL_FILE = 256 << 10  # bytes that take less time than a question and its answer


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message; its first element names its class."""


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """A LowbitError on its way between processes."""

    kind: str  # name of its class
    message: str
    hint: str | None

    def error(self) -> LowbitError:
        """The error, without what a class adds to a LowbitError."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, LowbitError)):
            kind = LowbitError
        found: LowbitError = kind.__new__(kind)
        LowbitError.__init__(found, self.message, self.hint)
        return found


def problem_of(error: LowbitError) -> Problem:
    """An error as a message has it."""
    return Problem(type(error).__name__, str(error), error.hint)


class Facts(Message):
    """First message of an engine: what the HTTP side needs to know of its model."""

    folder: bytes  # names of files need not be UTF-8
    limits: Limits
    defaults: SamplingParams
    stop_ids: frozenset[int]
    sequences: int  # decoded together
    activations: Activations
    positions: int  # most drafts of a round; 0 without speculation
    allow_control_tokens: bool
    refuse_late_system: bool
    images: ImageInput | None  # None for a model that takes none
    load_s: float  # seconds that loading took


class NotStarted(Message):
    """First message of a process that cannot do its work."""

    problem: Problem
    trace: str  # its traceback there

    def error(self) -> LowbitError:
        """The error, with a note of the traceback, which --debug shows."""
        found = self.problem.error()
        found.add_note(self.trace)
        return found


class Settings(Message):
    """First message to an engine."""

    share: int  # rows that longer answers of one client may have
    grammar_bytes: int  # memory that the grammars of all requests may take


class Source(msgspec.Struct, array_like=True, frozen=True):
    """A grammar as text, see `GrammarSource`."""

    text: str
    what: str
    limits: Mapping[str, Any]


class MakeGrammar(Message):
    """Make a grammar; `GrammarMade` answers."""

    number: int
    source: Source


class DropGrammar(Message):
    """Forget a grammar, or stop making it; answers that follow it go on."""

    number: int


class GrammarMade(Message):
    """A grammar can be followed, unless there is a problem."""

    number: int
    problem: Problem | None


class Constraints(msgspec.Struct, array_like=True, frozen=True):
    """Limits of an answer.

    Attributes:
        budget: most tokens of reasoning; None for any number.
        grammar: number of the grammar; None without one.
        calls: ids of the tokens around the calls that alone follow it; None if all text does.
    """

    budget: int | None = None
    grammar: int | None = None
    calls: tuple[int, int] | None = None


class ShownPixels(msgspec.Struct, array_like=True, frozen=True):
    """Pixels of a decoded picture."""

    width: int
    height: int
    rgb: SharedBytes


class ShownPicture(msgspec.Struct, array_like=True, frozen=True):
    """A picture of a prompt, with its pixels or a small file where those are handed on.

    Others are sent when they are needed, see `AskFile`.
    """

    content: bytes | None
    settings: ImageSettings
    rows: int
    columns: int
    digest: bytes
    pixels: ShownPixels | None

    def picture(self, file: PictureFile) -> Picture:
        """The picture, with its pixels in this process's memory."""
        shown, pixels = self.pixels, None
        if shown is not None:
            pixels = Pixels(shown.width, shown.height, shown.rgb.take())
        if self.content is not None:
            file = StoredFile(self.content)
        return Picture(file, self.settings, self.rows, self.columns, self.digest, pixels)


class ShownImage(msgspec.Struct, array_like=True, frozen=True):
    """A place of a prompt where a picture is."""

    start: int  # index of its first token
    picture: int  # number of the picture, which may be in several places


class Begin(Message):
    """Begin answers to a prompt, which is sent once, as pixels of its images are.

    The fields are those of `Request` that the engine looks at; answers differ in their sampling.
    """

    numbers: list[int]
    id: str  # of the client's request, for the log
    prompt: list[int]
    sampling: list[SamplingParams]
    count: int
    stop_ids: frozenset[int]
    message_ends: frozenset[int]
    prompt_logprobs: int | None
    pictures: list[ShownPicture]
    images: list[ShownImage]
    client: str
    begin: OutputStart
    constraints: Constraints

    def requests(
        self, embedder: PictureEmbedder, file_of: Callable[[int, bytes], PictureFile]
    ) -> list[Request]:
        """The request for each answer, without its constraint.

        Args:
            embedder: makes the embeddings of pictures.
            file_of: the file of a picture, by the number of an answer that shows it and its digest.
        """
        number = self.numbers[0]
        pictures = [each.picture(file_of(number, each.digest)) for each in self.pictures]
        first = Request(
            prompt=tuple(self.prompt),
            max_new_tokens=self.count,
            stop_ids=self.stop_ids,
            message_ends=self.message_ends,
            prompt_logprobs=self.prompt_logprobs,
            images=tuple(
                span_of(pictures[each.picture], each.start, embedder) for each in self.images
            ),
            client=self.client,
            begin=self.begin,
            count=self.count,
        )
        return [replace(first, sampling=each) for each in self.sampling]


def begin_of(
    numbers: Sequence[int], id: str, requests: Sequence[Request], constraints: Constraints
) -> Begin:
    """The message for requests that `Limits.check` has checked; they differ in sampling alone."""
    request = requests[0]
    if request.count is None or request.constraint is not None:
        raise ValueError("the request has not been checked, or has what no message can carry")
    shown = [picture_of(each) for each in request.images]
    pictures = {each.digest: each for each in shown}
    places = {digest: number for number, digest in enumerate(pictures)}
    return Begin(
        numbers=list(numbers),
        id=id,
        prompt=list(request.prompt),
        sampling=[each.sampling for each in requests],
        count=request.count,
        stop_ids=request.stop_ids,
        message_ends=request.message_ends,
        prompt_logprobs=request.prompt_logprobs,
        pictures=[_shown(each) for each in pictures.values()],
        images=[
            ShownImage(span.start, places[each.digest])
            for span, each in zip(request.images, shown, strict=True)
        ],
        client=request.client,
        begin=request.begin,
        constraints=constraints,
    )


def picture_of(span: ImageSpan) -> Picture:
    """The picture of a span that has its file; raises ValueError for others."""
    made = span.embeddings
    if not isinstance(made, PictureEmbeddings):
        raise ValueError("an image without its file cannot be sent")
    return made.picture


def _shown(found: Picture) -> ShownPicture:
    # The request, which lives as long as its answer, does not keep pixels that are sent.
    pixels = shown_pixels(found) if found.goes_along else None
    content = None
    if found.pixels is None and isinstance(found.file, StoredFile):
        content = found.file.stored if len(found.file.stored) <= SMALL_FILE else None
    return ShownPicture(content, found.settings, found.rows, found.columns, found.digest, pixels)


def shown_pixels(found: Picture) -> ShownPixels | None:
    """Take the shared pixels of a picture for a message; None if it has none."""
    pixels = found.take_pixels()
    if pixels is None or not isinstance(pixels.rgb, SharedBytes):
        return None
    return ShownPixels(pixels.width, pixels.height, pixels.rgb)


class Cancel(Message):
    """End answers before the next step."""

    numbers: list[int]


class More(msgspec.Struct, array_like=True, frozen=True):
    """News of an answer beside its new tokens."""

    number: int
    reused: int = 0  # tokens of the prompt that came from the prefix cache
    ended: bool = False  # no more tokens come
    log_probabilities: list[TokenLogProbabilities] = []  # of its new tokens, if it asks for them
    prompt: list[TokenLogProbabilities | None] = []  # of its prompt's tokens, likewise
    speculation: Speculated | None = None  # so far
    problem: Problem | None = None  # that ended it
    queued_s: float | None = None  # that it waited for its row; said once


class Step(Message):
    """New tokens of answers: those of number `numbers[i]` are `tokens[i]`."""

    numbers: list[int]
    tokens: list[list[int]]
    more: list[More]


class Health(Message):
    """State of the engine, whenever it changes, and once a second."""

    stalled: bool = False  # answers have waited for one step too long
    problem: Problem | None = None  # of the last step; None while steps succeed


class AskLoad(Message):
    """Ask for the load; `LoadFound` answers."""


class LoadFound(Message):
    """Load of the engine."""

    load: Load
    grammar_bytes: int  # memory of all grammars
    grammars_waiting: int  # for memory


class AskFile(Message):
    """Ask for the file of a picture whose pixels are not there; `FileFound` answers.

    A growing chat shows its pictures again in every turn, and their tokens are in the cache.
    """

    number: int  # of an answer that shows the picture
    digest: bytes  # of it


class FileFound(Message):
    """File of a picture, or its pixels; without both where no answer shows it any more."""

    digest: bytes
    pixels: ShownPixels | None = None
    shared: SharedBytes | None = None
    content: bytes | None = None  # where the system cannot share it
    problem: Problem | None = None  # why it cannot be sent


class Ended(Message):
    """Last message of an engine that knows why it ends."""

    problem: Problem


ToEngine = Settings | MakeGrammar | DropGrammar | Begin | Cancel | AskLoad | FileFound
FromEngine = Facts | NotStarted | GrammarMade | Step | Health | LoadFound | Ended | AskFile
