"""One request as the log and the metrics see it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from lowbit.runtime.serve.job import End
from lowbit.runtime.speculation.tally import Tally
from lowbit.runtime.text.reasoning import Piece
from lowbit.runtime.text.tool_calls import Event, ToolCallStart

MOST_ERROR_CHARACTERS = 300


@dataclass(slots=True)
class Record:
    """History of a request.

    Attributes:
        started: time of its first byte.
        prompt_tokens: of all prompts.
        cached_tokens: of them, those that the cache held.
        new_tokens: of all answers.
        later_tokens: of them, those behind the first step of their answer.
        drafts: of answers that have ended.
        first_token_s: from the start to the first token, or to its text before an answer has
            ended; None before it.
        last_token_s: from the start to the last token of an answer that has ended.
        reasons: why the answers ended.
        error: why the request was refused or failed.
        ignored: fields that were taken and changed nothing.
        stream: true if the answer was streamed.
        prompts: texts of all prompts, where the log is to have them.
        answers: text and calls by the number of an answer, likewise.
    """

    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    later_tokens: int = 0
    drafts: Tally = field(default_factory=Tally)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: str | None = None
    ignored: list[str] = field(default_factory=list)
    stream: bool = False
    prompts: list[str] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)

    def add_end(self, end: End) -> None:
        """Count an answer that has ended."""
        self.reasons.append(end.reason)
        self.cached_tokens += end.cached_tokens
        self.new_tokens += end.new_tokens
        if end.speculation is not None:
            self.drafts.add(end.speculation)
        if end.new_tokens:
            first_s = end.first_at - self.started  # text may come much later
            self.first_token_s = min(first_s, self.first_token_s or first_s)
            self.last_token_s = max(end.last_at - self.started, self.last_token_s)
            self.later_tokens += end.new_tokens - end.first_tokens

    def add_text(self, index: int, events: Sequence[Event]) -> None:
        """Append to an answer."""
        for event in events:
            if isinstance(event, Piece):
                text = event.text
            elif isinstance(event, ToolCallStart):
                text = f" {event.name} "
            else:
                text = event.fragment
            self.answers[index] = self.answers.get(index, "") + text

    @property
    def text(self) -> list[str]:
        """Lines for the log."""
        answers = [f"answer {index}: {text}" for index, text in sorted(self.answers.items())]
        return [*(f"prompt: {text}" for text in self.prompts), *answers]

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self.started

    def line(self, method: str, path: str, status: int) -> str:
        """One line for the log."""
        whole = self.seconds
        parts = [f"{method} {path} {status} {whole * 1e3:.1f} ms"]
        if self.prompt_tokens:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"prompt {self.prompt_tokens}{cached}, new {self.new_tokens}")
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.1f} ms")
            rest = self.last_token_s - self.first_token_s
            if self.later_tokens and rest > 0:
                parts.append(f"{self.later_tokens / rest:.0f} tok/s")
        if self.drafts.rounds:
            parts.append(self.drafts.speculated.words)
        if self.reasons:
            parts.append("+".join(self.reasons))
        if self.stream:
            parts.append("streamed")
        if self.ignored:
            parts.append("ignored " + " ".join(self.ignored))
        if self.error is not None:
            parts.append(self.error[:MOST_ERROR_CHARACTERS])
        return ", ".join(parts)


def record_of(request: Request) -> Record:
    """The record of a request, which the outermost layer has begun."""
    record: Record = request.scope["lowbit.record"]
    return record
