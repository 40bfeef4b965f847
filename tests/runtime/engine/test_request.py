"""Requests that an engine can run, and those that it refuses."""

import re
from dataclasses import replace

import pytest
import torch

from lowbit.formats.errors import RequestError, SettingError, TooLongError
from lowbit.runtime.engine.request import Limits, Request
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.state.step import Embedded

LIMITS = Limits(256, positions=512, table_rows=4096, hidden=8, vocabulary=4000, pages=3)
LATE, WIDE = (Embedded(1, torch.zeros(shape), b"") for shape in ((2, 8), (1, 9)))


@pytest.mark.parametrize(
    ("prompt", "asked", "count"),
    [(1, 5, 5), (1, None, 256), (1, 999, 256), (256, None, 1), (192, 1, 1), (100, 93, 93)],
)
def test_new_tokens_that_fit(prompt: int, asked: int | None, count: int) -> None:
    found = replace(LIMITS, pages=4).check(Request((4095,) * prompt, max_new_tokens=asked))
    assert found.count == count


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(()), RequestError, "the prompt is empty"),
        (
            Request((1,) * 257),
            TooLongError,
            "the prompt has 257 tokens, the context is 256",
        ),
        (Request((1, 4096)), RequestError, "token ids must be between 0 and 4095"),
        (Request((-1,)), RequestError, "token ids must be between 0 and 4095"),
        (
            Request((1, 2), embedded=(LATE,)),
            RequestError,
            "embeddings [2, 8] from token 1 on do not fit: the prompt has 2 tokens, the model 8",
        ),
        (Request((1, 2), embedded=(WIDE,)), RequestError, "embeddings [1, 9] from token 1 on"),
        (
            Request((1,), max_new_tokens=194),
            RequestError,
            "the request may take 256 tokens of the cache, which has 192",
        ),
    ],
)
def test_prompts_that_do_not_fit(
    request_: Request, error: type[RequestError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised:
        LIMITS.check(request_)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("request_", "setting", "message"),
    [
        (Request((1,), max_new_tokens=0), "max_new_tokens", "must be at least 1, got 0"),
        (
            Request((1,), max_new_tokens=-1, prompt_logprobs=0),
            "max_new_tokens",
            "must be at least 0, got -1",
        ),
        (Request((1,), prompt_logprobs=-1), "prompt_logprobs", "must be "),
        (
            Request((1,), SamplingParams(1.0, logit_bias=((4000, 1.0),))),
            "logit_bias",
            "must name tokens from 0 to 3999, got 4000",
        ),
    ],
)
def test_settings_out_of_range_are_named(request_: Request, setting: str, message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(f"`{setting}` {message}")) as raised:
        LIMITS.check(request_)
    assert raised.value.setting == setting


def test_hint_for_a_prompt_beyond_the_context() -> None:
    for tokens, hint in ((257, ", or ask for a larger --context"), (513, "")):
        with pytest.raises(TooLongError) as raised:
            LIMITS.check_prompt([1] * tokens)
        assert raised.value.hint == f"shorten the prompt{hint}"


def test_first_token_of_a_part_to_score() -> None:
    LIMITS.check_prompt([1, 2], start=1)
    with pytest.raises(RequestError, match="the sequence has 2 tokens, none is number 2"):
        LIMITS.check_prompt([1, 2], start=2)
