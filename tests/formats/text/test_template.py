"""Chat templates: valid ones render as in transformers, hostile ones give one message."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError
from lowbit.formats.text.template import (
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    load_chat_template,
)
from lowbit.formats.text.worker import Worker
from tests.lanes import in_commands

MODELS = Path(__file__).parents[3] / "examples" / "models"
USER = {"role": "user", "content": " Hi <b>& 'ä' 😀 "}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, None, "ü"]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be\nbrief"}, USER, {"role": "assistant", "content": "Yes"}],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA", "thinking": "hm"}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL], "name": None}, USER],
    [USER, {"role": "tool", "content": 'say "x"'}, {"role": "user", "content": "stop"}, USER],
]
EACH = "{% for m in messages %}"
HONEST = {
    "generation": EACH + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% set x = 1 %}{% endgeneration %}{{ x is defined }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "trimmed generation": EACH + "\n  {%- generation -%}\n {{ m.role }} {%- endgeneration %}\n\n"
    "{% endfor %}",
    "loop controls": EACH + "{% if m.content == 'stop' %}{% break %}{% endif %}"
    "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
    "tojson": EACH + "{{ m | tojson }}{{ m | tojson(indent=2) }}"
    "{{ m | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}{% endfor %}",
    "dates": "{{ strftime_now('%Y %B') }}",
    "namespace": "{% set ns = namespace(last='', n=0) %}" + EACH + "{% set ns.last = m.content %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "dict": "{{ dict(a=1, b=[2]) }}{{ dict.fromkeys(['x']) }}",
    "reasoning": EACH + "{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.name is defined }}"
    "{% endfor %}",
    "tokens": "{{ bos_token is defined }}{{ eos_token }}{{ pad_token }}{{ image_token }}",
    "macro": "{% macro turn(m, last=false) %}<{{ m.role }}>{{ m.content | trim }}"
    "{{ '.' if last }}{% endmacro %}" + EACH + "{{ turn(m, loop.last) }}{% endfor %}",
    "slices": "{{ messages[::-1][0].content.split('</think>')[-1].lstrip('\\n') }}"
    "{{ messages | length }}{{ messages | map(attribute='role') | join(', ') }}",
    "globals": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ range(3) | list }}"
    "{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "tools": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "blank": "\n  {% if true %}\n    a\n  {% endif %}\n{# note #}\n b",
    "empty": "",
}
SPECIAL = {"eos_token": "<|endoftext|>", "pad_token": "P", "image_token": "<img>"}


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("source", HONEST.values(), ids=HONEST.keys())
def test_a_template_renders_as_in_transformers(
    source: str, messages: list[dict[str, Any]], worker: Worker
) -> None:
    from transformers import PreTrainedTokenizerFast

    file = str(MODELS / "tiny-qwen3" / "tokenizer.json")
    hub = PreTrainedTokenizerFast(tokenizer_file=file, chat_template=source, **SPECIAL)
    template = ChatTemplate(source, SPECIAL, worker)
    for answer in (True, False):
        expected = hub.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        assert template.render(messages, answer=answer) == expected


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_bundled_template_renders_as_in_transformers(name: str, thinking: bool | None) -> None:
    from transformers import AutoTokenizer

    hub = AutoTokenizer.from_pretrained(MODELS / name)
    template = load_chat_template(MODELS / name)
    assert template is not None
    template.prepare()
    options = {} if thinking is None else {"enable_thinking": thinking}
    for messages in CONVERSATIONS:
        expected = hub.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        assert template.render(messages, thinking) == expected


# Each takes minutes or gigabytes, or raises what jinja2 does not catch.
HOSTILE = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in [0] recursive %}{{ loop([0]) }}{% endfor %}",
    "loop of set": "{% set x = namespace(s='a') %}{% for i in range(99999) %}"
    "{% set x.s = x.s + x.s %}{% endfor %}",
    "loop of lists": "{% set x = namespace(l=[1]) %}{% for i in range(99999) %}"
    "{% set x.l = x.l + x.l %}{% endfor %}",
    "star": "{{ 'a' * 10**10 }}",
    "star of a value": "{{ messages[0].content * 10**10 }}",
    "star of a list": "{{ [0] * 10**10 }}",
    "nested star": "{% set a = 'a' * 10**6 %}{% set b = a * 10**4 %}{{ b }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ messages[0].content.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "indent": "{{ ('a\n' * 10**5) | indent(10**5) }}",
    "replace": "{{ ('a' * 10**5) | replace('a', 'b' * 10**6) }}",
    "join": "{{ ('a' * 10**5) | join('b' * 10**6) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format filter": "{{ '%010000000000d' | format(1) }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "format spec": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "precision": "{{ '%.2147483647f' % 1.0 }}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "wordwrap": "{{ ('a ' * 10**7) | wordwrap(1) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "long number": "{{ (10 ** 5000) | string }}",
    "big float": "{{ 10.0 ** 400 }}",
    "range": "{{ range(10**9) | list }}",
    "batch": "{{ range(9) | batch(10**9, 0) | list }}",
    "slice": "{{ range(9) | slice(10**9) | list }}",
    "tojson": "{{ [1] | tojson(indent=10**10) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "division": "{{ 1 / 0 }}",
    "type": "{{ messages[0].content + 5 }}",
    "key": "{{ {}['x'].y }}",
    "undefined": "{{ nothing.at.all }}",
    "attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "change": "{{ messages.append(1) }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "underscore": "{% set n = namespace(_x=1) %}",
    "format escape": "{{ '{0.__class__}'.format(messages).x.y }}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "unhashable": "{{ {[]: 1} }}",
    "no JSON": "{{ nothing | tojson }}",
    "date": "{{ strftime_now(5) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends messages %}",
    "refusal": "{{ raise_exception('a' * 10**6) }}",
    "refusal without words": "{{ raise_exception(messages) }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep loops": "{% for i in [1] %}" * 300 + "{% endfor %}" * 300,
    "unclosed": "{% for",
    "unknown tag": "{% danger %}",
    "unknown filter": "{{ 1 | danger }}",
    "open generation": "{% generation %}",
    "null": "{{ 'a\0b' * 10**9 }}",
}


@in_commands("loop of lists", "loop of set")
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_one_sentence(source: str, hasty: Worker) -> None:
    template = ChatTemplate(source, {}, hasty)
    with pytest.raises((RequestError, CheckpointError)) as caught:
        template.render([USER], max_bytes=100_000)
    sentence = str(caught.value)
    assert sentence.startswith("the chat template ")
    assert "\n" not in sentence
    assert len(sentence) < 400


SIGNS = (
    *("{% if", "%}", "{{", "}}", "{% endfor %}", "|", "(", "'", "-", "~", "=", "**", " "),
    *("messages", "range", "loop", "{% set x", "namespace", "\ud800", "\0"),
)


@given(
    source=st.lists(
        st.sampled_from([*HONEST.values(), *SIGNS]),
        max_size=6,
    ).map("".join)
)
def test_any_source_renders_or_is_refused(source: str, hasty: Worker) -> None:
    template = ChatTemplate(source, {}, hasty)
    try:
        said = template.render([USER], max_bytes=9999)
    except LowbitError as error:
        said = f"refused: {error}"
    assert not said.startswith("refused") or said.startswith("refused: the chat template ")


def test_long_conversations_are_refused_before_they_are_rendered(worker: Worker) -> None:
    template = ChatTemplate("{{ messages | length }}", {}, worker)
    assert template.render([USER] * 50, max_bytes=5000) == "50"
    for messages in ([{"role": "user", "content": "a" * 5001}], [USER] * 400):
        with pytest.raises(RequestError, match=r"has \d+ bytes or more, the context holds at most"):
            template.render(messages, max_bytes=5000)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", LOOP])
def test_messages_that_are_no_json_are_refused(value: Any, worker: Worker) -> None:
    with pytest.raises(RequestError, match="the messages are not plain JSON"):
        ChatTemplate("a", {}, worker).render([{"role": "user", "content": "a", "x": value}])


@pytest.mark.parametrize(
    "template",
    [
        5,
        True,
        [5],
        ["default"],
        [{"name": "default"}],
        [{"template": "x"}],
        [{"name": ["default"], "template": "x"}],
        [{"name": "default", "template": 5}],
        {"default": []},
        "a" * (MAX_TEMPLATE_BYTES + 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_template_of_the_wrong_type_is_named(template: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="chat_template"):
        load_chat_template(tmp_path)


def test_a_template_file_must_be_text(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    for data, reason in ((b"\xff", "is not UTF-8"), (b"a" * (MAX_TEMPLATE_BYTES + 1), "at most")):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=reason):
            load_chat_template(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        load_chat_template(tmp_path)


def test_the_named_default_template_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    for template, found in (({"default": "d", "rag": "r"}, "d"), ({"rag": "r"}, None), ([], None)):
        path.write_text(json.dumps({"chat_template": template}))
        loaded = load_chat_template(tmp_path)
        assert (None if loaded is None else loaded.source) == found
