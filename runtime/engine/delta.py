"""Delta: the text, calls, tokens and log-probabilities that a step adds to an answer."""

from dataclasses import dataclass, field
from typing import Literal

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.text.answer import Event

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token with its log-probabilities, where the request asks for them.

    Attributes:
        id: id of the token.
        found: log-probabilities in its place.
        reasoning: the token belongs to the reasoning.
    """

    id: int
    found: TokenLogProbabilities
    reasoning: bool


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer.

    Attributes:
        reason: `stop` for a stop token or string, `length` for a full context or the limit.
        stop: stop string that ended it, if one did.
        cached_tokens: prompt tokens that the cache held.
        new_tokens: tokens of the output.
        reasoning_tokens: new tokens that are reasoning.
        calls: complete calls of tools.
        speculation: drafted and accepted tokens; None where speculation is off.
        first_tokens: new tokens of the first step.
        first_at: time of the first step's end.
        last_at: time of the last token.
    """

    reason: FinishReason
    stop: str | None = None
    cached_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0
    speculation: Speculated | None = None
    first_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0

    @property
    def chat_reason(self) -> str:
        """`finish_reason` of a chat."""
        return "tool_calls" if self.calls and self.reason == "stop" else self.reason

    @property
    def message_reason(self) -> str:
        """`stop_reason` of Anthropic's messages."""
        if self.reason == "length":
            return "max_tokens"
        if self.stop is not None:
            return "stop_sequence"
        return "tool_use" if self.calls else "end_turn"


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one answer.

    Attributes:
        index: number of the answer in its request.
        events: new text and calls.
        tokens: new tokens with log-probabilities, where the request asks for them.
        cached_tokens: prompt tokens that the cache held.
        prompt: log-probabilities of the prompt's tokens, in the first delta, where the request
            asks for them.
        end: set in the last delta, unless an error ended the answer.
        error: error that ended the answer.
    """

    index: int
    events: list[Event] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    cached_tokens: int = 0
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End | None = None
    error: LowbitError | None = None

    @property
    def last(self) -> bool:
        """True if no delta of this answer follows."""
        return self.end is not None or self.error is not None
