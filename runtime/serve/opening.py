"""The way from a conversation's request to answers on their way, the same in every API."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fastapi import Request

from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.body import read_body
from lowbit.runtime.serve.conversation import Conversation
from lowbit.runtime.serve.job import Ask
from lowbit.runtime.serve.prepare import Wanted, asks_of
from lowbit.runtime.serve.record import record_of
from lowbit.runtime.serve.schemas.chat import ChatBody
from lowbit.runtime.serve.schemas.messages import MessagesBody
from lowbit.runtime.serve.schemas.responses import ResponsesBody
from lowbit.runtime.serve.service import Service, service_of

Schema = TypeVar("Schema", ChatBody, MessagesBody, ResponsesBody)


@dataclass(frozen=True, slots=True)
class Opened(Generic[Schema]):
    """A request whose answers have been asked for.

    Attributes:
        service: that makes them.
        body: of the request.
        ask: for the first answer.
        answers: to come.
    """

    service: Service
    body: Schema
    ask: Ask
    answers: Answers

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ask.tokens.request.prompt)


async def open_conversation(
    request: Request,
    schema: type[Schema],
    conversation_of: Callable[[Model, Schema], Conversation],
    wanted_of: Callable[[Schema], Wanted],
    count_of: Callable[[Schema], int] = lambda body: 1,
) -> Opened[Schema]:
    """Read a body, prepare its prompt apart from the event loop, and ask for the answers.

    Args:
        request: whose body has not been read.
        schema: of the body.
        conversation_of: gives the conversation of a body.
        wanted_of: gives its wishes for the answers.
        count_of: gives the number of answers.

    Raises:
        ApiError: a request that cannot be served, or not now.
    """
    service = service_of(request)
    body = await read_body(request, schema, service.executor, service.crowd)
    service.check_model(body.model)
    record = record_of(request)
    record.ignored, record.stream = body.ignored(), bool(body.stream)
    service.check_open(count_of(body))
    model, settings = service.model, service.settings

    conversation = await service.in_thread(lambda: conversation_of(model, body))

    def prepare() -> list[Ask]:
        wanted = replace(wanted_of(body), stream=bool(body.stream))
        return asks_of(model, settings, conversation, wanted)

    asks = await service.in_thread(prepare, conversation.limited)
    record.prompt_tokens = len(asks[0].tokens.request.prompt)
    return Opened(service, body, asks[0], service.begin(request, asks, record))
