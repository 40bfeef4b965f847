"""Chat templates against transformers' own rendering."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HubTokenizer

from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.runtime.text.chat import Message, knows_argument, render_prompt
from tests.lanes import in_commands

# Uses what Hub templates use: whitespace control, namespaces, slices, tojson, tests, raise.
TEMPLATE = """
{%- if tools is not none or documents is not none %}{{ raise_exception('no tools') }}{% endif %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{% for message in messages %}
    {% if message.role == 'assistant' and '</think>' in message.content %}
{{ message.role }}: {{ message.content.split('</think>')[-1].lstrip('\\n') }}{{ eos_token }}
    {% elif message.role == 'tool' %}
{{ {'text': message.content, 'ä<>&': [1, none]} | tojson }}
    {% elif message.role != 'system' %}
{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
    {% elif not loop.first %}
{{ raise_exception('a system message must come first') }}
    {% endif %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}
assistant:
    {%- if enable_thinking is defined and enable_thinking is false %} <think></think>{% endif %}
{%- endif %}
{{ ns.last }}"""

USER: Message = {"role": "user", "content": " Hi <b>& 'ä' "}
CONVERSATIONS: list[list[Message]] = [
    [USER],
    [{"role": "system", "content": "Be\nbrief"}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, USER],
    [USER, {"role": "tool", "content": 'say "x" ü'}, USER],
    [USER, {"role": "user", "content": "stop"}, USER],
]


@in_commands("messages[03]-True", "messages[0134]-False", "messages[124]-None", "messages2-True")
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_matches_transformers(
    messages: list[Message], thinking: bool | None, byte_tokenizer: HubTokenizer
) -> None:
    import transformers

    hub = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    expected = hub.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert (
        ChatTemplate(TEMPLATE, {"eos_token": "<|im_end|>"}).render(messages, thinking) == expected
    )


def test_templates_are_found_in_either_place(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config: dict[str, Any] = {"eos_token": {"content": "E"}, "bos_token": None, "pad_token": "P"}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert load_chat_template(tmp_path) is None
    path.write_text(json.dumps(config | {"chat_template": "old"}))
    assert load_chat_template(tmp_path) == ChatTemplate("old", {"eos_token": "E", "pad_token": "P"})
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.source == "d"
    (tmp_path / "chat_template.jinja").write_text("new")
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.source == "new"
    (tmp_path / "chat_template.jinja").unlink()
    path.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="chat_template is not a string"):
        load_chat_template(tmp_path)


def test_a_refusal_of_the_template_is_a_request_error() -> None:
    template = ChatTemplate(TEMPLATE, {"eos_token": ""})
    with pytest.raises(RequestError, match="a system message must come first"):
        template.render([USER, {"role": "system", "content": "late"}])


def test_a_broken_template_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="not valid jinja2"):
        ChatTemplate("{% if %}", {}).render([USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 5 }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses"):
        ChatTemplate(attack, {}).render([USER])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "the conversation is empty"),
        (["hi"], "message 1 is not an object"),
        ([USER, {"role": "robot", "content": "x"}], "message 2: role `robot` is not known"),
        ([{"role": "user"}], "message 1: `content` must be text, got None"),
        ([{"role": "user", "content": 5}], "message 1: `content` must be text, got 5"),
    ],
)
def test_bad_messages_are_named(messages: list[Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        render_prompt(ChatTemplate("", {}), messages)


def test_a_template_without_the_thinking_switch_is_named() -> None:
    assert ChatTemplate("x", {}).render([USER]) == "x"
    with pytest.raises(RequestError, match="does not know `enable_thinking`"):
        ChatTemplate("x", {}).render([USER], thinking=False)


def test_arguments_are_words_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may bring a million of them: the template is searched once."""
    template = ChatTemplate("{% if mood_now %}{{ wörd }}{% endif %}", {})
    assert knows_argument(template, "mood_now")
    assert knows_argument(template, "wörd")
    monkeypatch.delattr(re, "findall")
    for name in ("mood", "now", "mood_now ", ".*", "", "x" * 100_000):
        assert not knows_argument(template, name)
