"""Speed with drafts behind prompts of a user's text, in turn with runs without drafts."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.lab.bench import TimedRun, in_turn, summed, timed_answer

Id = str | int
Make = Callable[[], Request | LowbitError]


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    """Answers to one prompt, or to several."""

    id: Id | None  # of the prompt; None for several
    tokens: int  # timed ones, behind those of the first step
    tokens_per_s: float  # median of the runs; of several prompts all tokens by their time
    plain_tokens_per_s: float  # the same without drafts
    factor: float  # between both
    speculation: Speculated | None  # drafts of the timed runs


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A prompt that could not be measured."""

    id: Id
    error: str
    hint: str | None


def bench_prompts(
    model: Model, asked: Sequence[tuple[Id, Make]], runs: int
) -> Iterator[PromptSpeed | FailedPrompt]:
    """Time the answers to prompts one by one.

    Args:
        model: loaded with speculation; the conversations in its cache are dropped.
        asked: id of each prompt, and what makes its request for every run.
        runs: repetitions, of which the median counts; one more warms up.
    """
    for id, make in asked:
        try:
            found, factor = in_turn(model, runs, lambda make=make: _run(model, make))  # type: ignore[misc]
        except LowbitError as error:
            yield FailedPrompt(id, str(error), error.hint)
            continue
        if factor is None:
            raise ValueError("the model was loaded without speculation")
        timed = found[1:]
        rate = statistics.median(each.tokens_per_s for each in timed)
        drafts = summed(each.speculation for each in timed)
        yield PromptSpeed(id, timed[0].tokens, rate, rate / factor, factor, drafts)


def _run(model: Model, make: Make) -> TimedRun:
    request = make()
    if isinstance(request, LowbitError):
        raise request
    return timed_answer(model, request)


def total(speeds: Sequence[PromptSpeed]) -> PromptSpeed:
    """All prompts together: how long their answers took, one behind the other."""
    tokens = sum(each.tokens for each in speeds)
    seconds = sum(each.tokens / each.tokens_per_s for each in speeds)
    plain_seconds = sum(each.tokens / each.plain_tokens_per_s for each in speeds)
    return PromptSpeed(
        id=None,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        plain_tokens_per_s=tokens / plain_seconds,
        factor=plain_seconds / seconds,
        speculation=summed(each.speculation for each in speeds),
    )
