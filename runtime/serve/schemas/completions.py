"""Body of /v1/completions."""

from typing import Annotated

from pydantic import Field

from lowbit.runtime.serve.limits import MOST_PROMPTS
from lowbit.runtime.serve.schemas.common import SamplingBody
from lowbit.runtime.serve.schemas.formats import FormatFields

Ids = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
IdPrompts = Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionBody(SamplingBody, FormatFields):
    """The whole body."""

    HARMLESS = frozenset({"user", "add_special_tokens", "best_of"})
    prompt: str | Prompts | Ids | IdPrompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    add_special_tokens: bool | None = None
