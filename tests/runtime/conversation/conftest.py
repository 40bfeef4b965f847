"""A chat whose model answers from a script, and a view that keeps what it is shown."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.conversation.chat import AnswerSettings, Chat, ChatPrompt
from lowbit.runtime.conversation.respond import View
from lowbit.runtime.engine.stream import Generation, Timings
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.answer import Piece
from lowbit.runtime.text.chat import Message

Answer = Sequence[str | BaseException]  # pieces; an exception is raised in their place


@dataclass
class ScriptedStream:
    """Pieces of an answer, as `Stream` has them."""

    generation: Generation
    pieces: Iterator[Piece]

    def close(self) -> None:
        self.pieces = iter(())


@dataclass
class ScriptedModel:
    """A model whose tokens are letters; it answers what it is told to."""

    context: int = 200
    switch: bool = True
    has_template: bool = True
    defaults: SamplingParams = field(default_factory=SamplingParams)
    answers: list[Answer] = field(default_factory=list)
    asked: list[list[Message]] = field(default_factory=list)
    encoded: list[tuple[list[Message], bool | None]] = field(default_factory=list)
    settings: AnswerSettings | None = None

    def encode(self, messages: Sequence[Message], thinking: bool | None = None) -> ChatPrompt:
        if thinking is not None and not self.switch:
            raise RequestError("thinking cannot be switched")
        if not messages:
            raise RequestError("the conversation is empty")
        self.encoded.append((list(messages), thinking))
        ids = [0] * sum(len(message["content"]) + 2 for message in messages)
        return ChatPrompt(messages, thinking, ids)

    def stream(self, prompt: ChatPrompt, settings: AnswerSettings) -> ScriptedStream:
        count = len(prompt.ids)
        if count > self.context:
            raise RequestError(f"the prompt has {count} tokens, the context {self.context}")
        self.asked.append(list(prompt.messages))
        self.settings = replace(settings, thinking=prompt.thinking)
        answer = self.answers.pop(0) if self.answers else ["fine"]
        text = "".join(part for part in answer if isinstance(part, str))
        timings = Timings(count, 0, 0.1, 0.1, 10.0)
        made = Generation(tuple(prompt.ids), (0,) * len(text), "", text, "stop", 1, timings)
        return ScriptedStream(made, self._pieces(answer))

    def _pieces(self, answer: Answer) -> Iterator[Piece]:
        for part in answer:
            if isinstance(part, BaseException):
                raise part
            yield Piece(part.removeprefix("~"), part.startswith("~"))  # ~ marks reasoning


@dataclass
class Shown:
    """Record of a view's calls."""

    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finished: list[Generation] = field(default_factory=list)
    text: str = ""

    def show(self, piece: Piece) -> None:
        self.text += piece.text

    def end(self) -> None:
        self.text += "\n"

    def fail(self, error: LowbitError) -> None:
        self.errors.append(str(error))

    def view(self, interactive: bool = True) -> View:
        return View(self.notes.append, self.fail, lambda: self, self.finished.append, interactive)


@pytest.fixture
def shown() -> Shown:
    return Shown()


NewChat = Callable[..., tuple[Chat, ScriptedModel]]


@pytest.fixture
def new_chat() -> NewChat:
    """`new_chat(*answers, **fields of the model)`."""

    def make(*answers: Answer, **fields: Any) -> tuple[Chat, ScriptedModel]:
        model = ScriptedModel(answers=list(answers), **fields)
        return Chat(model, "some/model", AnswerSettings({"temperature": 0.5})), model

    return make
