"""The sampling fields of OpenAI's bodies."""

from lowbit.runtime.serve.prepare import Wanted
from lowbit.runtime.serve.schemas.common import SamplingBody

SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def wanted_of(body: SamplingBody, most: int | None, logprobs: int | None) -> Wanted:
    """Fields of a body about its answers.

    Args:
        body: of the request.
        most: new tokens; None for as many as the context holds.
        logprobs: likeliest tokens to report at each place; None reports none.
    """
    return Wanted(
        sampling={name: getattr(body, name) for name in SETTINGS},
        most=most,
        stops=tuple(body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        ignore_stops=bool(body.ignore_eos),
        logprobs=logprobs,
        count=body.n or 1,
    )
