"""Body of /v1/completions."""

from typing import Annotated

from pydantic import Field

from lowbit.runtime.serve.limits import MOST_IDS, MOST_PROMPTS
from lowbit.runtime.serve.schemas.common import Hints, SamplingBody
from lowbit.runtime.serve.schemas.formats import FormatFields
from lowbit.runtime.serve.schemas.neutral import NEUTRAL

Ids = Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=MOST_IDS)]
Prompts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
IdPrompts = Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]


class CompletionBody(SamplingBody, FormatFields):
    """The whole body."""

    HARMLESS = frozenset({"user", "add_special_tokens", "best_of"}) | Hints.HARMLESS
    NEUTRAL = NEUTRAL | {"logprobs": (False,)}
    prompt: str | Prompts | Ids | IdPrompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    add_special_tokens: bool | None = None
