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
    """A token with its log-probabilities, where the request asks for them."""

    id: int  # id of the token
    found: TokenLogProbabilities  # log-probabilities in its place
    reasoning: bool  # the token belongs to the reasoning


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer."""

    # `stop` for a stop token or string, `length` for a full context or the limit
    reason: FinishReason
    stop: str | None = None  # stop string that ended it, if one did
    cached_tokens: int = 0  # prompt tokens that the cache held
    new_tokens: int = 0  # tokens of the output
    reasoning_tokens: int = 0  # new tokens that are reasoning
    calls: int = 0  # complete calls of tools
    # Drafted and accepted tokens; None where speculation is off
    speculation: Speculated | None = None
    first_tokens: int = 0  # new tokens of the first step
    first_at: float = 0.0  # time of the first step's end
    last_at: float = 0.0  # time of the last token

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
    """New text and tokens of one answer."""

    index: int  # number of the answer in its request
    events: list[Event] = field(default_factory=list)  # new text and calls
    # New tokens with log-probabilities, where the request asks for them
    tokens: list[AnswerToken] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that the cache held
    # Log-probabilities of the prompt's tokens, in the first delta, where the request asks for them
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End | None = None  # set in the last delta, unless an error ended the answer
    error: LowbitError | None = None  # error that ended the answer

    @property
    def last(self) -> bool:
        """True if no delta of this answer follows."""
        return self.end is not None or self.error is not None
