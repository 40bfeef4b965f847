"""Log-probabilities as OpenAI's two formats write them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.serve.job import AnswerToken
from lowbit.runtime.text.tokenizer import Tokenizer, bytes_to_text

LEAST = -9999.0  # stands for minus infinity, which JSON cannot write


def of_chat(tokenizer: Tokenizer, tokens: Sequence[AnswerToken]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat; tokens of the reasoning are left out."""
    return [
        {
            **_token(tokenizer, token.id, token.found.chosen),
            "top_logprobs": [_token(tokenizer, id, value) for id, value in token.found.top],
        }
        for token in tokens
        if not token.reasoning
    ]


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token by itself: its text, or its name where it is special."""
    return bytes_to_text(tokenizer.token_bytes(id)) or tokenizer.text.hub.id_to_token(id) or ""


def finite(value: float) -> float:
    """A logarithm that JSON can write."""
    return max(value, LEAST)


def _token(tokenizer: Tokenizer, id: int, value: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(id)
    return {
        "token": token_text(tokenizer, id),
        "logprob": finite(value),
        "bytes": list(data),
    }


@dataclass(slots=True)
class TextLogprobs:
    """`logprobs` of completions, token by token.

    Attributes:
        offset: characters of text before the next token.
    """

    tokenizer: Tokenizer
    offset: int = 0
    _tokens: list[str] = field(default_factory=list)
    _chosen: list[float | None] = field(default_factory=list)
    _top: list[dict[str, float] | None] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget tokens that have been written; offsets go on."""
        for values in (self._tokens, self._chosen, self._top, self._offsets):
            values.clear()

    def add(self, tokens: Sequence[AnswerToken]) -> None:
        """Append new tokens."""
        for token in tokens:
            self.add_one(token.id, token.found)

    def add_one(self, id: int, found: TokenLogProbabilities | None) -> None:
        """Append a token; None stands for a first one, which follows nothing."""
        text = _name(self.tokenizer, id)
        self._tokens.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)
        if found is None:
            self._chosen.append(None)
            self._top.append(None)
            return
        self._chosen.append(finite(found.chosen))
        top = {_name(self.tokenizer, other): finite(value) for other, value in found.top}
        top.setdefault(text, finite(found.chosen))
        self._top.append(top)

    def fields(self) -> dict[str, Any]:
        """As the API has them."""
        return {
            "tokens": list(self._tokens),
            "token_logprobs": list(self._chosen),
            "top_logprobs": list(self._top),
            "text_offset": list(self._offsets),
        }


def _name(tokenizer: Tokenizer, id: int) -> str:
    """A token by itself; half a character as its bytes, the way OpenAI writes it."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode() if data else token_text(tokenizer, id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
