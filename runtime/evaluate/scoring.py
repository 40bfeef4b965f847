"""The two requests of an evaluation: the likelihood of a text, and its continuation."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.results import nonfinite_error
from lowbit.runtime.engine.stream import answer_all
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.chat import output_start

ROWS = 256  # of logits at a time: 150 MB with a vocabulary of 150,000
NEW_TOKENS = 256  # where a task does not say, as in lm-evaluation-harness
COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # first wins
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "early_stopping": False}


@dataclass(frozen=True, slots=True)
class Score:
    """Natural log-likelihood of a continuation."""

    log_likelihood: float
    greedy: bool  # every token is the likeliest at its place
    truncated: bool  # the beginning of the context was left out


@dataclass(frozen=True, slots=True)
class Continuation:
    """Settings by which a task continues a text: what ends it, most tokens, and sampling."""

    stops: tuple[str, ...]
    count: int
    sampling: SamplingParams


def score(model: Model, context: Sequence[int], continuation: Sequence[int]) -> Score:
    """Log-likelihood of a continuation after a context.

    Tokens that do not fit are left out at the beginning of the context. A prefix that this call
    shares with the last one is not run again.

    Raises:
        RequestError: one of the two is empty, the continuation is longer than `model.context`, or
            an id lies outside the vocabulary.
        CheckpointError: the logits are NaN or infinite.
    """
    if not context or not continuation:
        raise RequestError("a context or a continuation has no tokens")
    if len(continuation) > model.context:
        raise RequestError(
            f"the continuation has {len(continuation)} tokens, the context is {model.context}",
            hint=model.engine.limits.advice(len(continuation)) or None,
        )
    whole = [*context, *continuation]
    kept = whole[-model.context - 1 :]
    model.engine.limits.check_prompt([kept[-1]])
    ids = kept[:-1]
    total, greedy = 0.0, True
    for start in range(len(kept) - len(continuation) - 1, len(ids), ROWS):
        stop = min(start + ROWS, len(ids))
        likelihoods, likeliest = _score_rows(
            model.engine.logits(ids[:stop], start), kept[start + 1 : stop + 1]
        )
        if math.isnan(likelihoods):
            raise nonfinite_error(stop)
        total += likelihoods
        greedy = greedy and likeliest
    return Score(total, greedy, truncated=len(kept) < len(whole))


def _score_rows(logits: Tensor, ids: Sequence[int]) -> tuple[float, bool]:
    """Log-likelihood of ids [M] under logits [M, V]; True if they are the likeliest."""
    targets = torch.tensor(ids, device=logits.device)
    chosen = logits.gather(1, targets[:, None])[:, 0]
    likelihoods = (chosen - logits.logsumexp(-1)).double()
    return float(likelihoods.sum()), bool((logits.argmax(-1) == targets).all())


def read_continuation(settings: Mapping[str, Any], seed: int) -> Continuation:
    """Settings from the `generation_kwargs` of a task; greedy unless it says otherwise.

    Raises:
        RequestError: a setting that is not implemented, or one of an impossible value.
    """
    known = {"until", "do_sample", *COUNTS, *SAMPLING}
    for name, value in settings.items():
        if name not in known and (name not in NEUTRAL or NEUTRAL[name] != value):
            raise RequestError(f"the task's generation setting `{name}: {value}` is not supported")
    until = settings.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"the task's stop strings {until!r} are not text")
    counts = [name for name in COUNTS if settings.get(name) is not None]
    count = int(_number(settings, counts[0], 0)) if counts else NEW_TOKENS
    if count < 1:
        raise RequestError(f"the task asks for {count} new tokens")
    sample = settings.get("do_sample")
    temperature = _number(settings, "temperature", 1.0 if sample else 0.0)
    drawn = {
        name: _number(settings, name, 0.0) for name in SAMPLING if settings.get(name) is not None
    }
    drawn["temperature"] = 0.0 if sample is False else temperature
    if "top_k" in drawn:
        drawn["top_k"] = int(drawn["top_k"])
    params = replace(SamplingParams(seed=seed), **drawn)  # type: ignore[arg-type]
    return Continuation(tuple(stop for stop in stops if stop), count, params)


def _number(settings: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = settings.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"the task's generation setting `{name}: {value!r}` is not a number")
    return float(value)


def carry_on(
    model: Model, asked: Iterable[tuple[Sequence[int], Continuation]], chat: bool = False
) -> Iterator[tuple[int, str, bool]]:
    """Texts that follow prompts, made together, as many as the model has sequences.

    Args:
        asked: token ids of each prompt and how it is continued; read as there is room.
        chat: the prompts came from the chat template; reasoning is then left out.

    Yields:
        The number of a prompt, its text, and True if the prompt's beginning was left out for it, in
        the order in which they end.

    Raises:
        RequestError: an empty prompt, or a context that has no room for one.
        LowbitError: a text could not be made; the others are given up.
    """
    cut: list[bool] = []

    def requests() -> Iterator[Request]:
        for prompt, continuation in asked:
            request = _request(model, prompt, continuation, chat)
            cut.append(len(request.prompt) < len(prompt))
            yield request

    for number, made in answer_all(model.engine, model.tokenizer, requests()):
        if isinstance(made, LowbitError):
            raise made
        yield number, made.text, cut[number]


def _request(
    model: Model, prompt: Sequence[int], continuation: Continuation, chat: bool
) -> Request:
    """A request for the text behind as much of a prompt as the context has room for."""
    room = model.context - continuation.count
    if room < 1:
        raise RequestError(
            f"{continuation.count} new tokens leave no room for a prompt in the context of "
            f"{model.context}",
            hint=model.engine.limits.advice(continuation.count + 1) or None,
        )
    tokenizer = model.tokenizer
    kept = tuple(prompt[-room:])
    special = {tokenizer.token_id(stop) for stop in continuation.stops} & tokenizer.special_ids
    request = Request(
        prompt=kept,
        sampling=continuation.sampling,
        max_new_tokens=continuation.count,
        stop_ids=model.stop_ids | {id for id in special if id is not None},
        message_ends=model.stop_ids,
        stops=continuation.stops,
        begin=output_start(kept, tokenizer) if chat else "raw",
    )
    return model.engine.limits.check(request)
