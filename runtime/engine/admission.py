"""Requests that an engine can run, as its sequences."""

from typing import TYPE_CHECKING

from lowbit.formats.errors import RequestError
from lowbit.formats.sampling_ranges import LOGPROBS
from lowbit.runtime.engine.sequence import Sequence, TokenRequest
from lowbit.runtime.state.pages import EXTRA, PAGE
from lowbit.runtime.state.sampler_rows import check_bias_ids
from lowbit.runtime.state.sampling import random_seed

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine


def new_sequence(request: TokenRequest, engine: "Engine") -> Sequence:
    """The sequence of a request.

    Raises:
        RequestError: see `Engine.submit`.
    """
    engine.check(request.prompt)
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
    )
    pages = engine.runner.state.pages.count - EXTRA
    if sequence.page_count > pages:
        raise RequestError(
            f"the request may take {sequence.page_count * PAGE} tokens of the cache, which has "
            f"{pages * PAGE}",
            hint="ask for fewer new tokens or a larger cache",
        )
    return sequence
