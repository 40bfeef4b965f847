"""One answer while the engine generates it, and the updates that tell a client of it."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.engine.stream import Answer, FinishReason
from lowbit.runtime.text.answer import Event
from lowbit.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lowbit.runtime.serve.worker import Mailbox


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
class Update:
    """New text and tokens of one answer.

    Attributes:
        index: number of the answer in its request.
        events: new text and calls.
        tokens: new tokens with log-probabilities, where the request asks for them.
        cached_tokens: prompt tokens that the cache held.
        prompt: log-probabilities of the prompt's tokens, in the first update, where the request
            asks for them.
        end: set in the last update, unless an error ended the answer.
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
        """True if no update of this answer follows."""
        return self.end is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Job:
    """An answer that the engine generates; all but `cancel` belongs to the worker's thread.

    Attributes:
        index: number of the answer in its request.
        request: request to the engine.
        mailbox: queue of the updates.
        tokenizer: tokenizer of the model.
        asked_at: time of the request.
        cancelled: nobody waits for the answer any more.
        answer: the answer so far, once the request has been submitted and until its last update.
    """

    index: int
    request: TokenRequest
    mailbox: "Mailbox"
    tokenizer: Tokenizer
    asked_at: float
    cancelled: bool = False
    answer: Answer | None = None
    _updated: bool = False  # there has been an update
    _first_tokens: int = 0  # of the first step
    _first_at: float = 0.0

    def cancel(self) -> None:
        """End the answer before the next step, from any thread."""
        self.cancelled = True
        if self.answer is not None:
            self.answer.handle.cancel()

    def collect(self) -> Update | None:
        """The update since the last call; None if nothing is new."""
        answer = self.answer
        if answer is None:
            return None
        handle, first = answer.handle, answer.count == 0
        prompt = () if self._updated else handle.prompt_log_probabilities
        update = Update(self.index, cached_tokens=handle.reused, prompt=prompt)
        try:
            for id in handle.poll():
                self._push(answer, id, update)
                if answer.finish_reason is not None:
                    break
        except LowbitError as error:
            return replace(update, error=error)
        if first:
            self._first_tokens, self._first_at = answer.count, answer.last_at
        if handle.ended:
            update.events.extend(answer.end())
        if answer.finish_reason is not None:
            return replace(update, end=self._end(answer, answer.finish_reason))
        if not update.events and not update.tokens:
            return None
        self._updated = True
        return update

    def _push(self, answer: Answer, id: int, update: Update) -> None:
        """Read a token; what is certain with it is appended to the update."""
        in_reasoning = answer.in_reasoning
        update.events.extend(answer.push(id))
        request = self.request
        if request.sampling.logprobs is not None and id not in request.stop_ids:
            found = answer.handle.log_probabilities[answer.count - 1]
            update.tokens.append(AnswerToken(id, found, in_reasoning))

    def _end(self, answer: Answer, reason: FinishReason) -> End:
        return End(
            reason=reason,
            stop=answer.stop,
            cached_tokens=answer.handle.reused,
            new_tokens=answer.count,
            reasoning_tokens=answer.reasoning_tokens,
            calls=answer.calls,
            speculation=answer.handle.speculation,
            first_tokens=self._first_tokens,
            first_at=self._first_at,
            last_at=answer.last_at,
        )
