"""Text to token ids and back, and text as a stream that never breaks a character.

Only byte-level BPE (Qwen, Llama 3) is read: there a token is a string of bytes, so the text of a
sequence is the text of the joined bytes and can be emitted as the bytes arrive.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever it is spelled, so a message
could end its own turn and begin one of the system. `ControlTokens` marks such places of a
conversation before the template sees them, by an unused character behind their first one. What the
template writes itself has no mark. The tokenizer takes marked places for the plain text that they
are.
"""

import codecs
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.text.template import MAX_PROMPT_BYTES, check_length
from lowbit.formats.text.tokenizer import MarkedText, TextTokenizer, load_text_tokenizer
from lowbit.formats.text.vocabulary import byte_alphabet

END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
NOTHING = r"(?!)"  # is never found
SHAPED = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Tokens of one tokenizer that control a model where they stand in its prompt."""

    texts: frozenset[str]
    shaped: re.Pattern[str]  # matches those in angle brackets, and other words in them
    others: re.Pattern[str]  # matches the others

    def held_by(self, text: str) -> bool:
        """True if a text spells one of them."""
        if self.others.pattern != NOTHING and self.others.search(text) is not None:
            return True
        return "<" in text and any(found[0] in self.texts for found in self.shaped.finditer(text))

    def marked(self, value: Any, mark: str, but: Collection[str] = ()) -> Any:
        """Plain JSON with the mark behind the first character of every control token.

        Args:
            value: texts, and lists and objects of them; others stay as they are.
            but: texts of tokens that are left alone.

        Raises:
            RecursionError: too deep nesting.
        """
        match value:
            case str():
                return self._marked(value, mark, but)
            case Mapping():
                return {
                    self.marked(key, mark, but): self.marked(item, mark, but)
                    for key, item in value.items()
                }
            case list() | tuple():
                return [self.marked(item, mark, but) for item in value]
        return value

    def _marked(self, text: str, mark: str, but: Collection[str]) -> str:
        def marked(found: re.Match[str]) -> str:
            word = found[0]
            return word if word not in self.texts or word in but else word[0] + mark + word[1:]

        before = ""
        while text != before:  # one token may overlap another
            before, text = text, self.others.sub(marked, text)
        return self.shaped.sub(marked, text)


def control_tokens(added: Collection[tuple[str, bool]]) -> ControlTokens:
    """The control tokens of a tokenizer: those that are special, or look like `<think>`.

    Others are text that has a token of its own, such as a run of spaces.

    Args:
        added: texts of the added tokens, and whether they are special.
    """
    known = {text: SHAPED.fullmatch(text) is not None for text, special in added if special}
    known |= {text: True for text, _ in added if SHAPED.fullmatch(text)}
    shaped = [text for text, is_shaped in known.items() if is_shaped]
    others = [text for text, is_shaped in known.items() if not is_shaped and len(text) > 1]
    longest = max(map(len, shaped), default=0) - 2
    words = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    return ControlTokens(
        texts=frozenset(shaped + others),
        shaped=re.compile(rf"<[^<>\s]{{1,{longest}}}>" if shaped else NOTHING),
        others=re.compile(words or NOTHING),
    )


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A byte-level BPE tokenizer."""

    text: TextTokenizer
    # Tokens that control the model where they stand in its prompt
    control: ControlTokens = field(init=False, compare=False, repr=False)
    _bytes: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)  # by id

    def __post_init__(self) -> None:
        """Collect the control tokens."""
        added = self.text.hub.get_added_tokens_decoder().values()
        control = control_tokens([(token.content, token.special) for token in added])
        object.__setattr__(self, "control", control)

    @property
    def vocabulary(self) -> int:
        """Ids from here on stand for no token."""
        return self.text.vocabulary

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of decoded text."""
        return self.text.special_ids

    def encode(
        self, text: str | MarkedText, framed: bool = False, context: int | None = None
    ) -> list[int]:
        """Ids of a text; added tokens spelled out in it become single ids, but not marked ones.

        Args:
            framed: add what the tokenizer puts around a text, such as Llama's first token; a chat
                template writes that itself.
            context: tokens that are of use; a text that is much too long for them is refused
                before all of it is encoded.

        Raises:
            RequestError: the text holds half a surrogate pair, as undecodable arguments do, or is
                much too long.
            CheckpointError: the tokenizer fails, or takes too much time or memory.
        """
        if context is not None:
            length = len(text.text if isinstance(text, MarkedText) else text)
            check_length(length, self.max_bytes(context))
        return self.text.encode(text, framed, context)

    def max_bytes(self, context: int) -> int:
        """Bytes of the longest prompt that a context of so many tokens can hold."""
        return min(self.text.max_bytes(context), MAX_PROMPT_BYTES)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return bytes_to_text(b"".join(self.token_bytes(id) for id in ids))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name."""
        id: int | None = self.text.hub.token_to_id(token)
        return id

    def token_bytes(self, id: int) -> bytes:
        """Bytes that a token adds to the text; none for special and unknown ids."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._read_bytes(id)
        return found

    def _read_bytes(self, id: int) -> bytes:
        token: str | None = None if id in self.special_ids else self.text.hub.id_to_token(id)
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
    text = load_text_tokenizer(folder)
    if not text.byte_level:
        raise UnsupportedModelError(f"`{text.path}`: only byte-level tokenizers are supported")
    return Tokenizer(text)


def bytes_to_text(data: bytes) -> str:
    """UTF-8 text; what is not UTF-8 becomes U+FFFD."""
    return data.decode("utf-8", errors="replace")


@dataclass(slots=True)
class TextStream:
    """Turns tokens into text as they come, whole characters only.

    The pieces joined are `Tokenizer.decode` of all tokens.
    """

    tokenizer: Tokenizer
    _utf8: codecs.BufferedIncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, id: int) -> str:
        """The text that this token completes; may be empty."""
        data = self.tokenizer.token_bytes(id)
        if data.isascii() and not self._utf8.buffer:  # most tokens; the decoder is slow Python
            return data.decode("ascii")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The broken character at the end of the text, if there is one."""
        return self._utf8.decode(b"", final=True)
