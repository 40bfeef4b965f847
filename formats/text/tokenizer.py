"""tokenizer.json of a model folder, used the way transformers uses it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError, TooLongError
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import object_of
from lowbit.formats.text.child import ids_of_marked
from lowbit.formats.text.child_process import SECONDS, WorkerError
from lowbit.formats.text.components import is_linear
from lowbit.formats.text.settings import read_settings
from lowbit.formats.text.vocabulary import check_vocabulary, complete
from lowbit.formats.text.worker import Worker

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HubTokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 48_000_000  # Gemma's, the largest published, has 35,000,000
WORKER_BYTES = 1 << 30  # address space for a tokenizer and the tokens of a text
LOAD_SECONDS_PER_BYTE = 1e-6  # of the file; real ones take a tenth
SECONDS_PER_BYTE = 1e-5  # of text, added to the worker's own seconds; real ones take 1e-6
# Characters that take a millisecond. While the library encodes a text it holds Python's lock, which
# stops all other threads; not so for a batch, also of one text
BRIEF = 4096
SHORTEST = 65_536  # characters that are encoded with any context
SLACK = 16  # tokens by which the end of a cut text may differ
SHRINK = 4  # bytes that normalization may turn into one: a mathematical letter becomes ASCII


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text with a mark inside each place that spells an added token and is none."""

    text: str  # with the mark behind the first character of such a place
    mark: str = ""  # one character, which is no part of the text; empty where nothing is marked

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "") if self.mark else self.text


@dataclass(frozen=True, slots=True, eq=False)
class TextTokenizer:
    """A tokenizer without the padding and truncation of its file."""

    path: Path  # of tokenizer.json
    # tokenizer of the tokenizers library; beside a worker it has the vocabulary only
    hub: "HubTokenizer" = field(repr=False)
    vocabulary: int  # the highest id plus one
    longest: int  # bytes of the longest token
    special_ids: frozenset[int] = field(repr=False)  # ids of tokens that are no text
    byte_level: bool  # tokens are strings of bytes
    # process that encodes and decodes where the file has parts that may run away
    worker: Worker | None = field(repr=False)

    def encode(
        self, text: str | MarkedText, framed: bool = False, most: int | None = None
    ) -> list[int]:
        """Encode a text; added tokens spelled out in it become single ids, but not marked ones.

        Args:
            framed: add the tokens that the post-processor puts around a text, like Llama's first.
            most: largest number of tokens; a longer text is refused before all of it is encoded.

        Raises:
            TooLongError: text that has more tokens.
            RequestError: text that is not valid Unicode.
            CheckpointError: the tokenizer fails, or takes too much time or memory.
        """
        marked = text if isinstance(text, MarkedText) else MarkedText(text)
        plain = marked.plain
        self._check_unicode(plain)
        if most is not None:
            self._check_count(plain, framed, most)
        if marked.mark:
            return self._encode([marked.text], framed, marked.mark)[0]
        return self._encode([plain], framed)[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts without frames; errors as in `encode`."""
        for text in texts:
            self._check_unicode(text)
        return self._encode(list(texts), framed=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as the library does, special tokens included.

        Raises:
            CheckpointError: the tokenizer fails, or takes too much time or memory.
        """
        seconds = self._seconds(len(ids))
        with self._explaining(seconds):
            if self.worker is not None:
                asked: str = self.worker.ask({"do": "decode", "ids": list(ids)}, seconds)
                return asked
            text: str = self.hub.decode(list(ids), skip_special_tokens=False)
            return text

    def max_bytes(self, context: int) -> int:
        """Bytes of the longest text that a context of `context` tokens can hold."""
        return context * self.longest * SHRINK

    def check_ids(self, ids: Sequence[int], rows: int) -> None:
        """Refuse ids for which a model has no embedding.

        Raises:
            CheckpointError: naming the tokenizer and the id.
        """
        highest = max(ids, default=0)
        if highest >= rows:
            raise CheckpointError(
                f"`{self.path}` gives token {highest}, the model has a vocabulary of {rows}",
                hint="take the tokenizer from the original checkpoint",
            )

    def _check_unicode(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from None

    def _check_count(self, text: str, framed: bool, most: int) -> None:
        """Refuse a text whose beginning alone has more than `most` tokens."""
        length = max(SHORTEST, 4 * most)  # characters; English has 4.5 for each token
        while length < len(text):
            if len(self._encode([text[:length]], framed)[0]) > most + SLACK:
                raise TooLongError(f"the prompt has more than {most} tokens, the context is {most}")
            length *= 2

    def _encode(self, texts: list[str], framed: bool, mark: str = "") -> list[list[int]]:
        seconds = self._seconds(sum(map(len, texts)))
        with self._explaining(seconds):
            if self.worker is not None:
                job = {"do": "encode", "texts": texts, "framed": framed, "mark": mark}
                asked: list[list[int]] = self.worker.ask(job, seconds)
                return asked
            if mark:
                return [ids_of_marked(self.hub, text, framed, mark) for text in texts]
            if len(texts) == 1 and len(texts[0]) <= BRIEF:
                return [self.hub.encode(texts[0], add_special_tokens=framed).ids]
            batch = self.hub.encode_batch(texts, add_special_tokens=framed)
            return [encoding.ids for encoding in batch]

    def _seconds(self, length: int) -> float:
        """Time limit for a text of `length` characters or tokens."""
        own = 0.0 if self.worker is None else self.worker.seconds
        return own + SECONDS_PER_BYTE * length

    @contextmanager
    def _explaining(self, seconds: float) -> Iterator[None]:
        """Turn every failure of the library or of the worker into a sentence."""
        try:
            yield
        except WorkerError as error:
            match error.kind:
                case "syntax":
                    raise unreadable(self.path, error) from None
                case "time":
                    reason = f"takes longer than {seconds:.3g} s for a text"
                case "memory" | "died":
                    reason = f"takes more than {WORKER_BYTES >> 20} MiB of memory, or crashes"
                case _:
                    reason = f"fails: {error}"
            raise self._failure(reason) from None
        except BaseException as error:
            if not is_from_library(error):
                raise
            raise self._failure(f"fails: {error}") from None

    def _failure(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the tokenizer `{self.path}` {reason}", hint="copy it from the original checkpoint"
        )


def load_text_tokenizer(folder: Path, purpose: str = "", seconds: float = SECONDS) -> TextTokenizer:
    """Read the tokenizer of a model folder.

    As in transformers, truncation, padding and dropout of tokenizer.json are left out, and tokens
    that only tokenizer_config.json lists are added.

    Args:
        purpose: use of the tokenizer, for the message that it is missing: "calibration".
        seconds: time limit of a worker that loads or uses it, if one is needed.

    Raises:
        CheckpointError: the file is missing, malformed, too large or not a regular file.
    """
    path = folder / TOKENIZER_FILE
    data = _read(path, purpose)
    content = object_of(data, path)
    changed = complete(content, read_settings(folder), path)
    longest = check_vocabulary(content, path)
    byte_level = _is_byte_level(content)
    ids = content["model"]["vocab"]
    vocabulary = max(ids.values(), default=-1) + 1 if isinstance(ids, dict) else len(ids)
    worker = None
    if not is_linear(content):
        allowed = seconds + LOAD_SECONDS_PER_BYTE * len(data)
        prelude = {"do": "load", "tokenizer": json.dumps(content), "seconds": allowed}
        worker = Worker(seconds, WORKER_BYTES, "tokenizers", prelude)
        content, changed = _vocabulary_only(content), True
    data = json.dumps(content).encode() if changed else data
    del content, ids  # free memory before the library reads the file again
    hub = _parse(data, path)
    added = hub.get_added_tokens_decoder()
    tokenizer = TextTokenizer(
        path=path,
        hub=hub,
        vocabulary=max(vocabulary, max(added, default=-1) + 1),
        longest=longest,
        special_ids=frozenset(id for id, token in added.items() if token.special),
        byte_level=byte_level,
        worker=worker,
    )
    tokenizer.encode("")  # a tokenizer that only the worker can read may fail there
    return tokenizer


def read_tokenizer(folder: Path, purpose: str) -> dict[str, Any]:
    """Read the content of tokenizer.json unchanged, and check its tokens.

    Raises:
        CheckpointError: see `load_text_tokenizer`.
    """
    path = folder / TOKENIZER_FILE
    content = object_of(_read(path, purpose), path)
    check_vocabulary(content, path)
    return content


def _read(path: Path, purpose: str) -> bytes:
    try:
        return read_bytes(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        need = f", which {purpose} needs" if purpose else ""
        raise CheckpointError(
            f"`{path.parent}` has no {path.name}{need}",
            hint="copy it from the original checkpoint",
        ) from None


def _parse(data: bytes, path: Path) -> "HubTokenizer":
    """Make the library's tokenizer from a file's content."""
    from tokenizers import Tokenizer

    try:
        hub = Tokenizer.from_buffer(data)
    except BaseException as error:
        if not is_from_library(error):
            raise
        raise unreadable(path, error) from None
    hub.no_truncation()
    hub.no_padding()
    return hub


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file that the library cannot read."""
    return CheckpointError(
        f"`{path}` is not a tokenizer: {str(error)[:200]}",
        hint="copy it from the original checkpoint",
    )


def is_from_library(error: BaseException) -> bool:
    """Tell if an exception may come from the tokenizers library.

    The library has no exception class; a panic of its Rust code does not derive from Exception.
    """
    if isinstance(error, LowbitError):
        return False
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _vocabulary_only(content: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with the same tokens, without the parts that process text."""
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    return {**content, **dict.fromkeys(parts)}


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    decoder = content.get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
