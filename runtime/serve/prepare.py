"""From a request to what the engine is asked for; runs apart from the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.errors import SettingError
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import CheckedRequest, TokenRequest
from lowbit.runtime.serve.conversation import Conversation, encode
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.job import Ask
from lowbit.runtime.serve.restrict import NewConstraint, constraint_of
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.state.sampling import SamplingParams
from lowbit.runtime.text.reasoning import begin_of
from lowbit.runtime.text.tools import form_of, read_tools

SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Wanted:
    """Wishes of a request for its answers, whichever API it came through.

    Attributes:
        sampling: settings by name; those left out are the model's own.
        most: new tokens; None for as many as the context holds.
        stops: strings that end an answer.
        stop_ids: further tokens that end it.
        ignore_stops: the model's own stop tokens are tokens like others.
        logprobs: likeliest tokens to report at each place; None reports none.
        prompt_logprobs: the same for the tokens of the prompt.
        count: answers to each prompt.
        stream: they are sent as they are made.
    """

    sampling: Mapping[str, Any]
    most: int | None
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_stops: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    count: int = 1
    stream: bool = False


def asks_of(
    model: Model, settings: ServeSettings, conversation: Conversation, wanted: Wanted
) -> list[Ask]:
    """The answers to a conversation that are asked for.

    Raises:
        RequestError, ApiError: the request cannot be served.
    """
    offered = conversation.offered
    tools = read_tools(offered)
    form = form_of(model.template) if tools and model.template is not None else None
    ids = encode(model, conversation)
    budget = conversation.budget
    if budget is None:
        budget = settings.max_thinking_tokens
    new_constraint = constraint_of(model, conversation, ids, tools, form, budget)
    tokens = tokens_of(model, ids, wanted)
    ask = Ask(
        tokens,
        begin_of(ids, model.tokenizer),
        wanted.stops,
        tools,
        form,
        conversation.parallel,
        wanted.stream,
    )
    return copies(ask, wanted.count, new_constraint)


def tokens_of(model: Model, prompt: Sequence[int], wanted: Wanted) -> CheckedRequest:
    """A checked request for the engine, without a constraint.

    Raises:
        RequestError, ApiError: a prompt that cannot be run, or a value out of range.
    """
    stop_ids = frozenset() if wanted.ignore_stops else model.stop_ids
    try:
        request = TokenRequest(
            prompt=tuple(prompt),
            sampling=_sampling(model, wanted),
            max_new_tokens=wanted.most,
            stop_ids=stop_ids | frozenset(wanted.stop_ids),
            message_ends=model.stop_ids,
            prompt_logprobs=wanted.prompt_logprobs,
        )
        return model.engine.limits.check(request)
    except SettingError as error:
        raise invalid(str(error), error.setting, "invalid_value") from None


def copies(ask: Ask, count: int, new_constraint: NewConstraint) -> list[Ask]:
    """The same question `count` times, with a constraint and a seed of its own for each answer."""
    first = ask.tokens.request.sampling.seed
    found = []
    for index in range(count):
        seed = None if first is None else (first + index) % SEEDS
        found.append(replace(ask, tokens=ask.tokens.answer(new_constraint(), seed)))
    return found


def _sampling(model: Model, wanted: Wanted) -> SamplingParams:
    """The model's own settings, replaced by those of the request."""
    given = {name: value for name, value in wanted.sampling.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])  # other servers take -1 for off
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return replace(model.defaults, logprobs=wanted.logprobs, **given)


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise invalid(f"`logit_bias` names tokens by their ids, got `{key[:40]}`", "logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)
