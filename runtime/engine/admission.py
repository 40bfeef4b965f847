"""Requests that an engine can run, as its sequences."""

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

from lowbit.formats.errors import QueueFullError, RequestError
from lowbit.formats.sampling_ranges import LOGPROBS
from lowbit.runtime.engine.restrict import first_unbound
from lowbit.runtime.engine.sequence import Sequence, TokenRequest
from lowbit.runtime.state.pages import EXTRA, PAGE
from lowbit.runtime.state.sampler_rows import check_bias_ids
from lowbit.runtime.state.sampling import random_seed

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine


def check_prompt(ids: Ids[int], engine: "Engine", start: int = 0) -> None:
    """Refuse a prompt that cannot be run.

    Raises:
        RequestError: empty, longer than the context, an id outside the vocabulary, or no token
            number `start`.
    """
    if not ids:
        raise RequestError("the prompt is empty", hint="give at least one token")
    if len(ids) > engine.context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, the context is {engine.context}",
            hint=f"shorten the prompt{engine.advice(len(ids), ', or ')}",
        )
    rows = engine.decoder.config.vocab_size
    if not all(0 <= id < rows for id in ids):
        raise RequestError(f"token ids must be between 0 and {rows - 1}")
    if not 0 <= start < len(ids):
        raise RequestError(f"the sequence has {len(ids)} tokens, none is number {start}")


def check_queue(engine: "Engine") -> None:
    """Refuse a request where as many wait as may.

    Raises:
        QueueFullError: see `Engine.submit`.
    """
    asked = {*engine.waiting, *engine.running}  # a step may move one from these to those
    ahead = sum(not each.cancelled for each in asked)  # the next step ends the others
    if engine.most_waiting is not None and ahead >= engine.rows + engine.most_waiting:
        raise QueueFullError(
            f"{ahead} requests run or wait, and no more than {engine.rows} run together",
            hint="ask again later",
        )


def new_sequence(request: TokenRequest, engine: "Engine") -> Sequence:
    """The sequence of a request.

    Raises:
        RequestError: see `Engine.submit`.
    """
    check_prompt(request.prompt, engine)
    check_bias_ids(request.sampling, engine.runner.sampler.vocabulary)
    asked, scored = request.max_new_tokens, request.prompt_logprobs
    if scored is not None and not LOGPROBS.allows(scored):
        raise RequestError(f"`prompt_logprobs` must be {LOGPROBS.expected}, got {scored}")
    least = 1 if scored is None else 0
    if asked is not None and asked < least:
        raise RequestError(f"`max_new_tokens` must be at least {least}, got {asked}")
    room, seed = engine.room(len(request.prompt)), request.sampling.seed
    sequence = Sequence(
        request=request,
        count=room if asked is None else min(asked, room),
        seed=random_seed() if seed is None else seed,
        unbound=first_unbound(request.constraint),
    )
    pages = engine.runner.state.pages.count - EXTRA
    if sequence.page_count > pages:
        raise RequestError(
            f"the request may take {sequence.page_count * PAGE} tokens of the cache, which has "
            f"{pages * PAGE}",
            hint="ask for fewer new tokens or a larger cache",
        )
    return sequence
