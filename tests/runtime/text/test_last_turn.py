"""Prompts that end inside their last message, against transformers' own rendering."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.formats.text.worker import blocking
from lowbit.runtime.text.answer import AnswerSplitter, OutputStart, Piece
from lowbit.runtime.text.chat import render_prompt
from lowbit.runtime.text.last_turn import render_open, rest_start
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.text.templates import BUNDLED, NAMES, call, hub_prompt, template_of

USER = {"role": "user", "content": "Hi"}
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>\n{% endfor %}"
KEEPS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
SOURCES = [*(template_of(name).source for name in NAMES.values()), TRIMS, KEEPS]
TEXTS = [
    *("Sure, ", "Sure", "  a\n\nb\n\n", "{", "ü😀 ", "<|im_end|>", "CONTINUE_FINAL_MESSAGE_TAG"),
    *("<think>\nhm\n</think>\n\nYes", "Hi", "-" * 999),
]


@cache
def template_from(source: str) -> ChatTemplate:
    """The template of a source: one process renders it in all tests."""
    return ChatTemplate(source, {})


def last(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content, **fields}]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("text", TEXTS)
def test_prompts_are_those_of_transformers(source: str, text: str) -> None:
    for messages in (last(text), last(text, reasoning_content="why "), [USER, *last(text)]):
        expected = hub_prompt(source, messages, continue_final_message=True)
        assert render_prompt(template_from(source), messages, end="last").text == expected


def test_the_last_text_beside_an_image_is_continued() -> None:
    """Some templates write a blank before each part, as that of the bundled model with a tower."""
    image = {"type": "image", "image": "x"}
    bundled = BUNDLED.parent / "tiny-qwen3.5-vision" / "chat_template.jinja"
    for source in (bundled.read_text(), template_of("qwen3.5").source):
        template = template_from(source)
        render = partial(template.render_later, answer=False)
        for text in ("It is", "It is \n"):
            messages = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
            expected = hub_prompt(source, messages, continue_final_message=True)
            assert blocking(render_open)(render, messages, "\ufdd0") == expected
        # an image at the end stays
        shown = [{"role": "user", "content": [messages[0]["content"][1], image]}]
        assert "<|image_pad|>" in blocking(render_open)(render, shown, "\ufdd0")


def test_an_answer_without_text_is_continued_behind_the_lines_of_the_template() -> None:
    """Transformers takes them along with the text that the template trims."""
    for name in NAMES.values():
        for content in ("<think>\nhm\n</think>\n\n", "<think>\nhm\n</think>"):
            prompt = render_prompt(template_of(name), last(content), end="last").text
            assert prompt.endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\n")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_of_any_role_is_continued(role: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Yes."}, {"role": role, "content": "It is "}]
    for source in (template_of("qwen3").source, KEEPS):
        expected = hub_prompt(source, messages, continue_final_message=True)
        assert render_prompt(template_from(source), messages, end="last").text == expected
    prompt = render_prompt(template_from(AS_JSON), [USER], end="last")
    assert prompt.text == '{"role": "user", "content": "Hi'


@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("thought", ["It is", "It is late.\nSo ", " so\n\n", "\n"])
def test_open_reasoning_is_continued_inside_its_block(name: str, thought: str) -> None:
    template = template_of(name)
    for opened in (f"<think>{thought}", f"<think>\n{thought}", f"\n<think>\n{thought}"):
        for thinking in (None, True, False):
            found = render_prompt(template, last(opened), thinking, end="last").text
            assert found.count("<think>") == 1
            if thought.strip():
                expected = hub_prompt(
                    template.source,
                    last("", reasoning_content=thought),
                    continue_final_message="reasoning_content",
                )
                assert found == expected
            else:
                assert found.endswith("<|im_start|>assistant\n<think>\n")
    # without a place for reasoning the text is the content that it is
    assert render_prompt(template_from(KEEPS), last("<think>a"), end="last").text.endswith(
        "assistant: <think>a"
    )


def test_the_prompt_may_end_behind_the_last_message() -> None:
    for source in SOURCES:
        for messages in ([USER], last("Yes.")):
            expected = hub_prompt(source, messages, add_generation_prompt=False)
            assert render_prompt(template_from(source), messages, end="none").text == expected


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="calls of tools"):
        render_prompt(template_of("qwen3"), last("a", tool_calls=[call("f")]), end="last")
    for source in ("x", "{{ messages[-1].content[:3] }}", "{{ messages[0].content }}"):
        with pytest.raises(RequestError, match="does not write the last message to its end"):
            render_prompt(template_from(source), last("Sure."), end="last")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(BUNDLED))


def pieces(tokenizer: Tokenizer, begin: OutputStart, text: str) -> list[Piece]:
    splitter = AnswerSplitter(tokenizer, begin)
    events = [each for id in tokenizer.encode(text) for each in splitter.push(id)]
    return [each for each in (*events, *splitter.finish()) if isinstance(each, Piece)]


@pytest.mark.parametrize(
    ("content", "start"),
    [
        ("Sure", "rest"),
        ("<think>\nhm\n</think>\n\nYes", "rest"),
        ("<think>\nhm\n</think>", "rest"),
        ("<think>\n", "reasoning"),
        ("<think>\nhm", "rest of reasoning"),
        ("Sure. <think> hm", "rest of reasoning"),
    ],
)
@pytest.mark.parametrize("name", NAMES.values())
def test_the_output_begins_where_the_message_ends(
    tokenizer: Tokenizer, name: str, content: str, start: OutputStart
) -> None:
    text = render_prompt(template_of(name), last(content), end="last")
    assert rest_start(tokenizer.encode(text), tokenizer) == start


def test_the_rest_of_a_text_keeps_its_blank_beginning(tokenizer: Tokenizer) -> None:
    def joined(begin: OutputStart, text: str) -> tuple[str, str]:
        found = pieces(tokenizer, begin, text)
        thought = "".join(each.text for each in found if each.reasoning)
        return thought, "".join(each.text for each in found if not each.reasoning)

    assert joined("rest", " and so on") == ("", " and so on")

    assert joined("rest of reasoning", " and so\n</think>\n\nYes") == (" and so", "Yes")
    assert joined("reasoning", "\n and so\n</think>\n\nYes") == ("and so", "Yes")
