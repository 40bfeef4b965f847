"""A prompt that ends inside its last message, which the model goes on to write.

It is what transformers renders with `continue_final_message`. A message that opens a block of
reasoning and does not close it is continued inside the block; templates would write it behind an
empty one.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import REASONING
from lowbit.runtime.text.answer import CLOSE, OPEN, OutputStart
from lowbit.runtime.text.tokenizer import Tokenizer

# End of a prompt. next: it asks for the assistant's next turn; last: it ends inside the last
# message; none: it ends behind the last message, and leaves to the model whose turn follows.
PromptEnd = Literal["next", "last", "none"]
Render = Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]]


async def render_open(render: Render, messages: Sequence[Mapping[str, Any]], end: str) -> str:
    """The text of a conversation up to the end of its last message.

    Blank text at that end is left out where the template trims messages.

    Args:
        render: the chat template.
        messages: plain messages, see `plain_message`.
        end: a character that nothing else in the text has.

    Raises:
        RequestError: the last message has calls, or the template does not write all of it.
    """
    *before, last = messages
    if last.get("tool_calls"):
        raise RequestError("the last message has calls of tools, and only text is continued")
    for opened, said in _opened(last, f"{end} "):
        text = await render([*before, opened])
        text = text.replace(json.dumps(end)[1:-1], end)  # a template may write JSON in ASCII
        kept, found, rest = text.rpartition(end)
        if found:
            trimmed = not rest.startswith(" ")
            # Blank lines before an answer that has no text yet are the template's
            return kept.rstrip() if trimmed and said.rpartition(CLOSE)[2].strip() else kept
    raise RequestError("the chat template does not write the last message to its end")


def _opened(last: Mapping[str, Any], end: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Ways to end the last message, and the text before that end; the first that works counts."""
    content = last["content"]
    if isinstance(content, list):
        # Templates may write something around each part
        *parts, part = content
        said = part["text"] if part["type"] == "text" else ""
        kept = parts if said else content
        yield {**last, "content": [*kept, {"type": "text", "text": said + end}]}, said
        return
    before, opening, thought = content.partition(OPEN)
    begins = opening and not before.strip() and CLOSE not in thought
    if begins and last["role"] == "assistant" and not any(last.get(key) for key in REASONING):
        yield {**last, "content": "", REASONING[0]: thought + end}, thought
    yield {**last, "content": content + end}, content


def rest_start(prompt: Sequence[int], tokenizer: Tokenizer) -> OutputStart:
    """Start of the output that continues the last message of a prompt."""
    opening, closing = tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)
    blank = True
    for id in reversed(prompt):
        if id == opening:
            return "reasoning" if blank else "rest of reasoning"
        if id == closing or id in tokenizer.special_ids:
            break
        blank = blank and not tokenizer.token_bytes(id).strip()
    return "rest"
