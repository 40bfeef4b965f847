"""Requests that an engine can run, and those that it refuses."""

import re
from dataclasses import replace

import pytest
import torch

from lowbit.formats.errors import RequestError, SettingError, TooLongError
from lowbit.runtime.engine.request import Limits, Request
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.state.sampling_params import SamplingParams

LIMITS = Limits(
    256, positions=512, table_rows=4096, hidden=8, vocabulary=4000, pages=3, images=True
)
IMAGE = ImageSpan(1, 1, 2, torch.zeros(2, 8), b"")


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
            Request((1, 2), images=(IMAGE,)),
            RequestError,
            "image 1: tokens 1 to 2 do not fit, the prompt has 2 tokens",
        ),
        (
            Request((1,) * 9, images=(IMAGE, replace(IMAGE, start=2))),
            RequestError,
            "image 2: tokens 2 to 3 begin before token 3",
        ),
        (
            Request((1,) * 9, images=(replace(IMAGE, start=-1),)),
            RequestError,
            "image 1: tokens -1 to 0 begin before token 0",
        ),
        (
            Request((1,) * 9, images=(replace(IMAGE, rows=0),)),
            RequestError,
            "image 1 has 0 x 2 tokens",
        ),
        (
            Request((1,) * 9, images=(replace(IMAGE, embeddings=torch.zeros(2, 9)),)),
            RequestError,
            "the image at token 1 has embeddings [2, 9] of torch.float32, expected numbers of a "
            "floating-point type, [2, 8]",
        ),
        (
            Request((1,) * 9, images=(replace(IMAGE, embeddings=torch.zeros(2, 8).int()),)),
            RequestError,
            "embeddings [2, 8] of torch.int32",
        ),
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


def test_a_model_of_text_refuses_images() -> None:
    limits = replace(LIMITS, images=False)
    with pytest.raises(RequestError, match="the model takes no images, the prompt has 1"):
        limits.check(Request((1, 2, 3), images=(IMAGE,)))
    assert limits.check(Request((1, 2, 3), max_new_tokens=5)).count == 5
