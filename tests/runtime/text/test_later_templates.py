"""Templates as Qwen3.6 and Qwen3.8 changed them: earlier reasoning is kept, effort is a value.

Qwen3.5's with what the releases changed, in our own words: Qwen3.6 keeps the reasoning of earlier
turns where `preserve_thinking` says so, Qwen3.8 unless it says no, and has a line for
`reasoning_effort` before everything else.
"""

from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.thinking import shows_thinking, thinking_tokens
from lowbit.runtime.text.tokenizer import load_tokenizer
from tests.runtime.text.templates import BUNDLED, hub_prompt, template_of

LAST = "{%- if loop.index0 > ns.last_query_index %}"
KEPT = {
    "3.6": "(preserve_thinking is defined and preserve_thinking is true)",
    "3.8": "preserve_thinking is undefined or preserve_thinking is true",
}
EFFORT = """{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'xhigh'] %}
    {{- raise_exception('No such effort.') }}
{%- elif reasoning_effort is defined %}
    {{- '<|im_start|>system\\nEffort: ' + reasoning_effort + '<|im_end|>\\n' }}
{%- endif %}
"""
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1", "reasoning_content": "first thought"},
    {"role": "user", "content": "Two?"},
]


def later(release: str) -> ChatTemplate:
    source = template_of("qwen3.5").source
    assert source.count(LAST) == 1
    kept = LAST.replace("loop", f"{KEPT[release]} or loop")
    return ChatTemplate((EFFORT if release == "3.8" else "") + source.replace(LAST, kept), {})


@pytest.mark.parametrize(
    ("release", "arguments", "kept"),
    [
        ("3.6", {}, False),
        ("3.6", {"preserve_thinking": True}, True),
        ("3.8", {}, True),
        ("3.8", {"preserve_thinking": False}, False),
    ],
)
def test_reasoning_of_earlier_turns(release: str, arguments: dict[str, Any], kept: bool) -> None:
    template = later(release)
    found = template.render(TALK, arguments=arguments)
    assert ("first thought" in found) == kept
    assert found == hub_prompt(template.source, TALK, add_generation_prompt=True, **arguments)


def test_effort_is_a_value_of_the_template() -> None:
    template = later("3.8")
    assert "Effort" not in template.render(TALK)
    found = template.render(TALK, arguments={"reasoning_effort": "low"})
    assert found.startswith("<|im_start|>system\nEffort: low<|im_end|>\n")
    with pytest.raises(RequestError, match="No such effort"):
        template.render(TALK, arguments={"reasoning_effort": "high"})


@pytest.mark.parametrize("release", KEPT)
def test_thinking_is_found_and_switched(release: str) -> None:
    template = later(release)
    assert shows_thinking(template)
    assert template.render(TALK).endswith("<|im_start|>assistant\n<think>\n")
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.render(TALK, thinking=False).endswith(closed)
    tokenizer = load_tokenizer(BUNDLED)
    tokens, known = (
        thinking_tokens(tokenizer, one, tokenizer.vocabulary, [])
        for one in (template, template_of("qwen3.5"))
    )
    assert (tokens is None) == (known is None)
    if tokens is not None and known is not None:
        assert (tokens.before, tokens.behind) == (known.before, known.behind)
