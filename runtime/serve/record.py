"""One request as the log and the metrics see it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from lowbit.runtime.speculation.tally import Tally
from lowbit.runtime.text.reasoning import Piece
from lowbit.runtime.text.tool_calls import Event, ToolCallStart


@dataclass(slots=True)
class Record:
    """History of a request.

    Attributes:
        started: time of its first byte.
        prompt_tokens: of all prompts.
        cached_tokens: of them, those that the cache held.
        new_tokens: of all answers.
        drafts: of answers that have ended.
        first_token_s: from the start to the first token; None before it.
        reasons: why the answers ended.
        ignored: fields that were taken and changed nothing.
        stream: true if the answer was streamed.
        prompts: texts of all prompts, where the log is to have them.
        answers: text and calls by the number of an answer, likewise.
    """

    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    drafts: Tally = field(default_factory=Tally)
    first_token_s: float | None = None
    reasons: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    stream: bool = False
    prompts: list[str] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)

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
            rest = whole - self.first_token_s
            if self.new_tokens > 1 and rest > 0:
                parts.append(f"{(self.new_tokens - 1) / rest:.0f} tok/s")
        if self.drafts.rounds:
            parts.append(self.drafts.speculated.words)
        if self.reasons:
            parts.append("+".join(self.reasons))
        if self.stream:
            parts.append("streamed")
        if self.ignored:
            parts.append("ignored " + " ".join(self.ignored))
        return ", ".join(parts)


def record_of(request: Request) -> Record:
    """The record of a request, which the outermost layer has begun."""
    record: Record = request.scope["lowbit.record"]
    return record
