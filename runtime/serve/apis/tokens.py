"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest

from lowbit.formats.text.settings import read_settings
from lowbit.formats.text.worker import Ask
from lowbit.runtime.serve.apis.chat import PromptFields, prompt_of
from lowbit.runtime.serve.apis.chat_messages import Messages, contents_of
from lowbit.runtime.serve.apis.common import token_text
from lowbit.runtime.serve.apis.docs import documented
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import NEUTRAL, ModelBody
from lowbit.runtime.serve.request.contents import Content
from lowbit.runtime.serve.request.prepare import encode, prepared, read_request
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.serve.service import record_of, service_of
from lowbit.runtime.serve.settings import MOST_IDS


class TokenizeBody(PromptFields, ModelBody):
    """A text, or messages that the chat template makes one."""

    NEUTRAL = NEUTRAL
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self

    def contents(self) -> list[Content]:
        """See `ModelBody.contents`."""
        return contents_of(self.messages or ())


TokenId = Annotated[int, Field(ge=0)]


class DetokenizeBody(ModelBody):
    """Token ids."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_IDS)]


router = APIRouter()


@router.post("/tokenize", **documented(TokenizeBody, "tokens"))
async def tokenize(http: HttpRequest) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    service, body = await read_request(http, TokenizeBody)
    left_out: list[str] = []
    ids = await prepared(http, body, partial(_encode, service.model, body, left_out))
    record_of(http).leave_out(left_out)
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.model.context,
        "tokens": ids,
    }
    if body.return_token_strs:
        found["token_strs"] = [token_text(service.model.tokenizer, id) for id in ids]
    return found


async def _encode(
    model: ServedModel, body: TokenizeBody, left_out: list[str], ask: Ask
) -> Sequence[int]:
    if body.messages is not None:
        asked = prompt_of(model, body, body.messages)
        left_out += asked.left_out
        return (await encode(model, asked, left_out, ask)).prompt
    framed = body.add_special_tokens is not False
    return model.tokenizer.encode(body.prompt or "", framed=framed, context=model.context)


@router.post("/detokenize", **documented(DetokenizeBody, "tokens"))
async def detokenize(http: HttpRequest) -> dict[str, Any]:
    """The text of token ids, names of special tokens included."""
    service, body = await read_request(http, DetokenizeBody)
    tokenizer = service.model.tokenizer
    if max(body.tokens, default=0) >= tokenizer.vocabulary:
        raise invalid(f"token ids must be between 0 and {tokenizer.vocabulary - 1}", "tokens")
    text = await service.in_thread(http, lambda: tokenizer.text.decode(body.tokens))
    return {"prompt": text}


@router.get("/tokenizer_info", tags=["tokens"], response_model=None)
async def tokenizer_info(http: HttpRequest) -> dict[str, Any]:
    """Special tokens and the chat template, for clients that render prompts themselves."""
    model = service_of(http).model
    tokens = read_settings(model.folder).special_tokens
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": None if model.template is None else model.template.source,
        "model_max_length": model.context,
        **{name: tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")},
    }
