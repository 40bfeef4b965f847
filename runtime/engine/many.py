"""Many requests through one engine, each answered as soon as it is complete."""

from collections.abc import Iterable, Iterator

from lowbit.formats.errors import LowbitError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.stream import Answer, Generation, Request
from lowbit.runtime.text.tokenizer import Tokenizer


def answer_all(
    engine: Engine, tokenizer: Tokenizer, requests: Iterable[Request | LowbitError]
) -> Iterator[tuple[int, Generation | LowbitError]]:
    """Run requests together, as many as there is room for.

    Args:
        engine: runs them.
        tokenizer: of the model.
        requests: in the order in which they begin; an error stands for a request that could not
            be made. They are asked for when there is room.

    Yields:
        The number of a request and its result or the error that ended it, in the order in which
        they end.
    """
    waiting = enumerate(requests)
    running: dict[int, Answer] = {}
    more = True
    beside = engine.rows  # as many wait as run, so that a row that becomes free is taken at once
    if engine.most_waiting is not None:
        beside = min(beside, engine.most_waiting)
    while running or more:
        while more and len(running) < engine.rows + beside:
            number, request = next(waiting, (-1, None))
            more = request is not None
            if isinstance(request, Request):
                try:
                    running[number] = Answer(request, tokenizer, engine.submit(request.tokens))
                except LowbitError as error:
                    yield number, error
            elif request is not None:
                yield number, request
        if running:
            engine.step()
        for number, answer in list(running.items()):
            result = _advance(answer)
            if result is not None:
                del running[number]
                yield number, result


def _advance(answer: Answer) -> Generation | LowbitError | None:
    """Take the tokens that are there; the result where they are the last."""
    try:
        for id in answer.handle.poll():
            if answer.generation is None:
                answer.push(id)
    except LowbitError as error:
        return error
    if answer.handle.ended:
        answer.end()
    return answer.generation
