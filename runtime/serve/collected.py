"""An answer that has come to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowbit.runtime.engine.sequence import TokenLogProbabilities
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.job import AnswerToken, End, Update
from lowbit.runtime.text.tool_calls import ToolArguments, ToolCallStart


@dataclass(slots=True)
class CollectedCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """Everything of one answer.

    Attributes:
        reasoning: text before the answer.
        content: text of the answer.
        calls: of tools.
        tokens: with log-probabilities, where they are wanted.
        prompt: log-probabilities of the prompt's tokens, likewise.
        end: set once it is complete.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    prompt: tuple[TokenLogProbabilities | None, ...] = ()
    end: End = field(default_factory=lambda: End("length"))

    def add(self, update: Update) -> None:
        """Append news."""
        for event in update.events:
            if isinstance(event, ToolCallStart):
                self.calls.append(CollectedCall(event.id, event.name))
            elif isinstance(event, ToolArguments):
                self.calls[event.index].arguments += event.fragment
            elif event.reasoning:
                self.reasoning += event.text
            else:
                self.content += event.text
        self.tokens += update.tokens
        self.prompt = self.prompt or update.prompt
        if update.end is not None:
            self.end = update.end


async def collect(answers: Answers) -> Sequence[Collected]:
    """All answers to a request, when the last has ended; errors as in `Answers.take`."""
    found = [Collected() for _ in answers.jobs]
    with answers:
        while not answers.complete:
            for update in await answers.take():
                found[update.index].add(update)
    return found
