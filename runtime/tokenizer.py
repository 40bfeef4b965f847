"""Text to token ids and back, and text as a stream that never breaks a character.

Only byte-level BPE (Qwen, Llama 3) is read: there a token is a string of bytes, so the text of a
sequence is the text of the joined bytes and can be emitted as the bytes arrive.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.decoders import ByteLevel

from lowbit.formats.errors import CheckpointError, RequestError, UnsupportedModelError

TOKENIZER_FILE = "tokenizer.json"
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        vocabulary: ids from here on stand for no token.
        special_ids: tokens that are left out of decoded text.
    """

    hub: HubTokenizer
    vocabulary: int
    special_ids: frozenset[int]

    def encode(self, text: str, framed: bool = False) -> list[int]:
        """Ids of a text; special tokens spelled out in it become single ids.

        Args:
            text: of a whole prompt.
            framed: add what the tokenizer puts around a text, such as Llama's first token; a chat
                template writes that itself.

        Raises:
            RequestError: the text holds half a surrogate pair, as undecodable arguments do.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from None
        ids: list[int] = self.hub.encode(text, add_special_tokens=framed).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return bytes_to_text(b"".join(self.token_bytes(id) for id in ids))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        id: int | None = self.hub.token_to_id(token)
        return id

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to the text; nothing for special and unknown ids."""
        token: str | None = None if id in self.special_ids else self.hub.id_to_token(id)
        if token is None:
            return b""
        table = byte_alphabet()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()  # an added token, stored as its text

    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn, where the vocabulary has them."""
        ids = [self.token_id(token) for token in END_OF_TURN]
        return tuple(id for id in ids if id is not None)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json of a model folder.

    Raises:
        CheckpointError: the file is missing or malformed.
        UnsupportedModelError: the tokenizer is not byte-level.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"`{folder}` has no {TOKENIZER_FILE}", hint="copy it from the original checkpoint"
        )
    try:
        hub = HubTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}") from None
    if not isinstance(hub.decoder, ByteLevel):
        raise UnsupportedModelError(f"`{path}`: only byte-level tokenizers are supported")
    added = hub.get_added_tokens_decoder()
    return Tokenizer(
        hub=hub,
        vocabulary=max(hub.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1),
        special_ids=frozenset(id for id, token in added.items() if token.special),
    )


@cache
def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def bytes_to_text(data: bytes) -> str:
    """UTF-8 text; what is not UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", errors="replace")


@dataclass(slots=True)
class TextStream:
    """Turns tokens into text as they come: whole characters only, cut before a stop string.

    The pieces joined are `Tokenizer.decode` of all tokens, up to the first stop string.

    Attributes:
        stops: strings that end the text and are not part of it.
        stopped: whether one of them has occurred.
    """

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    stopped: bool = False
    _held: str = ""
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._emit(self._utf8.decode(self.tokenizer.token_bytes(id)), final=False)

    def finish(self) -> str:
        """The text still held back."""
        return self._emit(self._utf8.decode(b"", final=True), final=True)

    def _emit(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        kept = 0 if final else max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a proper beginning of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
