"""Bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from lowbit.runtime.serve.limits import MOST_IDS
from lowbit.runtime.serve.schemas.chat import Messages
from lowbit.runtime.serve.schemas.common import Body
from lowbit.runtime.serve.schemas.neutral import NEUTRAL
from lowbit.runtime.serve.schemas.tools import ChatTools


class TokenizeBody(Body):
    """A text, or messages that the chat template makes one."""

    NEUTRAL = NEUTRAL | {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ChatTools | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self


TokenId = Annotated[int, Field(ge=0)]


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_IDS)]
