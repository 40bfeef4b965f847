"""The chat templates of Qwen3 and Qwen3.5, here and in transformers."""

from functools import cache
from pathlib import Path
from typing import Any

from lowbit.formats.text.template import ChatTemplate

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "data" / "chat_templates"
NAMES = {"json": "qwen3", "xml": "qwen3.5"}  # by the form of calls that they teach
BUNDLED = ROOT / "examples" / "models" / "tiny-qwen3"


@cache
def template_of(name: str) -> ChatTemplate:
    """The template as lowbit has it."""
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), {})


@cache
def _hub() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BUNDLED)


def rendered_by_transformers(name: str, messages: Any, **options: Any) -> str:
    """The prompt that transformers makes."""
    return hub_prompt(template_of(name).source, messages, **options)


def hub_prompt(source: str, messages: Any, **options: Any) -> str:
    """The prompt that transformers makes by any template."""
    text: str = _hub().apply_chat_template(
        messages, chat_template=source, tokenize=False, **options
    )
    return text


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function, described by the properties of its arguments, as a request lists it."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"calls {name} <&>", "parameters": schema}
    return {"type": "function", "function": function}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call as transformers takes it: with an object as arguments."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
