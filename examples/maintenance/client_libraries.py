"""Plain, streamed, tools, cut calls, JSON, images and async, by client libraries as they come.

Run: python examples/maintenance/client_libraries.py URL, in an environment of its own with
`pydantic-ai-slim[openai,anthropic] langchain-openai langchain-anthropic litellm`.
The server is one of `lowbit-run serve MODEL`, whose template is best Qwen3.5's, since it is the
strictest; images are shown to a model that takes them. Every line of the output is a use of a
library and what came of it; a failure ends in 1.
"""

import asyncio
import base64
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import httpx
import litellm
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

LIBRARIES = ("pydantic-ai-slim", "langchain-openai", "langchain-anthropic", "litellm")
Use = tuple[str, Callable[[], Any]]
KEY = "none"
IMAGE = "an image"  # the use that only a model with a vision tower is asked for
FEW, CUT, MANY = 24, 40, 300  # tokens
PLAIN = {"extra_body": {"enable_thinking": False}}
PICTURE = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{PICTURE}"


class Cat(BaseModel, extra="forbid"):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(BaseModel, extra="forbid"):
    kind: Literal["dog"]
    good: bool


class Report(BaseModel, extra="forbid"):
    rank: Literal[1, 2]
    pet: Cat | Dog = Field(discriminator="kind")


class Flat(BaseModel, extra="forbid"):
    rank: Literal[1, 2]  # LiteLLM breaks references in what it sends to Anthropic's API


class Loose(Report):
    tags: set[Literal["a", "b"]] = Field(max_length=2)  # uniqueItems


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"fine in {city}"


def pydantic_ai(url: str, name: str) -> Iterator[Use]:
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    anthropic = AnthropicProvider(base_url=url, api_key=KEY)
    kinds: dict[str, Any] = {
        "chats": OpenAIChatModel(name, provider=openai),
        "responses": OpenAIResponsesModel(name, provider=openai),
        "messages": AnthropicModel(name, provider=anthropic),
    }
    for kind, model in kinds.items():
        few: Any = {"max_tokens": FEW, "temperature": 0.0, **PLAIN}
        both: Any = {"system_prompt": "You are brief.", "instructions": "Answer."}
        agent: Any = Agent(model, **both, model_settings=few)
        tools: Any = Agent(model, **both, tools=[weather], model_settings=few)

        async def streamed(agent: Any = agent) -> list[str]:
            async with agent.run_stream("Hi") as answer:
                return [text async for text in answer.stream_text(delta=True)]

        def history(agent: Any = agent) -> Any:
            answer = agent.run_sync("Hi")
            for _ in range(3):
                answer = agent.run_sync("And?", message_history=answer.all_messages())
            return answer.output

        seen = BinaryContent(base64.b64decode(PICTURE), media_type="image/png")
        yield f"{kind}, plain", partial(agent.run_sync, "Hi")
        yield f"{kind}, {IMAGE}", partial(agent.run_sync, ["What is this?", seen])
        yield f"{kind}, async", partial(agent.run, "Hi")
        yield f"{kind}, streamed", streamed
        yield f"{kind}, history", history
        yield f"{kind}, tools", partial(tools.run_sync, "Weather?")
        for form in (ToolOutput(Loose), NativeOutput(Report)):
            if isinstance(form, NativeOutput) and kind == "messages":
                continue  # the library has it for models that it knows alone
            made: Any = Agent(model, output_type=form, model_settings={**few, "max_tokens": MANY})
            what = f"{kind}, {type(form).__name__}"
            yield what, partial(made.run_sync, "Rank.")


def langchain(url: str, name: str) -> Iterator[Use]:
    common: Any = {"model": name, "api_key": KEY, "max_tokens": FEW, "temperature": 0}
    openai: Any = {**common, "base_url": f"{url}/v1", **PLAIN}
    kinds: dict[str, Any] = {
        "chats": ChatOpenAI(**openai),
        "responses": ChatOpenAI(**openai, use_responses_api=True),
        "messages": ChatAnthropic(**common, base_url=url, thinking={"type": "disabled"}),
    }
    start: list[Any] = [SystemMessage("Be brief."), HumanMessage("Hi")]
    for kind, model in kinds.items():
        long = model.model_copy(update={"max_tokens": MANY})
        cut = model.model_copy(update={"max_tokens": CUT})

        def streamed(model: Any) -> list[Any]:
            return list(model.stream(start))

        def history(model: Any = model) -> Any:
            turns = list(start)
            for _ in range(3):
                turns += [model.invoke(turns), SystemMessage("Go on."), HumanMessage("And?")]
            return model.invoke(turns).content

        def tools(model: Any, whole: Any) -> Any:
            """A call, or one that is cut, streamed, and sent back with its result."""
            pieces = whole.bind_tools([weather], tool_choice="any").stream(start)
            answer = next(pieces)
            for piece in pieces:
                answer += piece
            calls = [*answer.tool_calls, *answer.invalid_tool_calls]
            results = [ToolMessage("fine", tool_call_id=call["id"]) for call in calls]
            turns = [*start, answer, *results, HumanMessage("And?")]
            return calls, model.bind_tools([weather]).invoke(turns).content

        seen: Any = {"type": "image", "base64": PICTURE, "mime_type": "image/png"}
        shown = HumanMessage(content_blocks=[{"type": "text", "text": "What is this?"}, seen])
        yield f"{kind}, plain", partial(model.invoke, start)
        yield f"{kind}, {IMAGE}", partial(model.invoke, [shown])
        yield f"{kind}, async", partial(model.ainvoke, start)
        yield f"{kind}, streamed", partial(streamed, model)
        if kind != "messages":  # the library refuses a second system message itself
            yield f"{kind}, history", history
        yield f"{kind}, tools", partial(tools, model, long)
        yield f"{kind}, a cut call", partial(tools, model, cut)
        for method in ("json_schema", "function_calling"):
            made = long.with_structured_output(Report, method=method)
            yield f"{kind}, {method}", partial(made.invoke, start)


def lite_llm(url: str, name: str) -> Iterator[Use]:
    start = [
        *({"role": "system", "content": text} for text in ("Be brief.", "Be kind.")),
        {"role": "user", "content": "Hi"},
    ]
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for kind in ("hosted_vllm", "openai", "anthropic"):
        base = url if kind == "anthropic" else f"{url}/v1"
        common: Any = {"model": f"{kind}/{name}", "api_base": base, "api_key": KEY}
        # The library sends `extra_body` itself to Anthropic's API.
        common |= {"enable_thinking": False} if kind == "anthropic" else PLAIN

        def answer(turns: list[Any], common: Any = common, **more: Any) -> Any:
            found: Any = litellm.completion(messages=turns, **{"max_tokens": FEW, **common, **more})
            return found.choices[0].message

        def history(answer: Any = answer) -> Any:
            turns = list(start)
            for _ in range(3):
                turns += [answer(turns).model_dump(), {"role": "user", "content": "And?"}]
            return answer(turns).content

        def tools(answer: Any = answer) -> Any:
            turn = answer(start, tools=[tool], tool_choice="required", max_tokens=MANY)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "fine"}
                for call in turn.tool_calls
            ]
            return answer([*start, turn.model_dump(), *results], tools=[tool]).content

        def streamed(common: Any = common) -> Any:
            return list(litellm.completion(messages=start, stream=True, max_tokens=FEW, **common))

        def responses(common: Any = common) -> Any:
            return litellm.responses(input="Hi", max_output_tokens=FEW, **common)

        def asynchronous(common: Any = common) -> Any:
            return litellm.acompletion(messages=start, max_tokens=FEW, **common)

        def structured(answer: Any = answer) -> Any:
            found = answer(start, response_format=Flat, max_tokens=MANY)
            return Flat.model_validate_json(found.content)

        seen = {"type": "image_url", "image_url": {"url": URL}}
        shown = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, seen]}
        yield f"{kind}, plain", partial(answer, start)
        yield f"{kind}, {IMAGE}", partial(answer, [shown])
        yield f"{kind}, async", asynchronous
        yield f"{kind}, streamed", streamed
        yield f"{kind}, history", history
        yield f"{kind}, tools", tools
        yield f"{kind}, structured", structured
        yield f"{kind}, responses", responses


def main(url: str) -> None:
    """Use every library on the server at `url`."""
    os.environ |= {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}
    litellm.suppress_debug_info = True
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    name, sees = model["id"], "image" in model["architecture"]["input_modalities"]
    print(*(f"{library} {version(library)}" for library in LIBRARIES), sep=", ")
    loop, failed = asyncio.new_event_loop(), 0
    for library in (pydantic_ai, langchain, lite_llm):
        for what, use in library(url, name):
            if what.endswith(IMAGE) and not sees:
                continue
            try:
                found = use()
                if asyncio.iscoroutine(found):
                    found = loop.run_until_complete(found)
                print(f"{library.__name__}, {what}: {str(found)[:80]!r}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{library.__name__}, {what}: FAILED, {error!r:.300}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1])
