"""Reasoning told apart from the answer in templates as published, and stop strings in any split."""

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

import lowbit.runtime as lowbit
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.answer import AnswerSplitter, Content, OutputStart, Piece
from lowbit.runtime.text.chat import output_start
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ tail }}{% endif %}"
)
# What ends the prompt: the output begins inside a block, or opens one, or never does.
OPENED = (
    "{% set tail = '<think>\n\n</think>\n\n' if enable_thinking is defined and "
    "enable_thinking is false else '<think>\n' %}" + TURNS
)
OPENED_ON_REQUEST = (
    "{% set tail = '<think>\n' if enable_thinking is defined and "
    "enable_thinking is true else '<think>\n\n</think>\n\n' %}" + TURNS
)
LEFT_TO_THE_MODEL = (
    "{% set tail = '<think>\n\n</think>\n\n' if enable_thinking is defined and "
    "enable_thinking is false else '' %}" + TURNS
)


@pytest.fixture
def tokenizer(byte_tokenizer: HubTokenizer, tmp_path: Path) -> Tokenizer:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def split(tokenizer: Tokenizer, text: str, begin: OutputStart, *stops: str) -> tuple[str, str]:
    """Reasoning and answer of a text, token by token."""
    splitter = AnswerSplitter(tokenizer, begin, stops)
    events = []
    for id in tokenizer.encode(text):
        events += splitter.push(id)
        if splitter.stopped:
            break
    events += splitter.finish()
    parts = [piece for piece in events if isinstance(piece, Piece)]
    assert len(parts) == len(events)
    assert all(piece.text for piece in parts)
    kinds = [piece.reasoning for piece in parts]
    assert kinds == sorted(kinds, reverse=True)  # reasoning first, then the answer
    reasoning = "".join(piece.text for piece in parts if piece.reasoning)
    return reasoning, "".join(piece.text for piece in parts if not piece.reasoning)


@pytest.mark.parametrize("begin", ["raw", "answer", "reasoning", "rest of reasoning"])
@pytest.mark.parametrize("text", ["", " é\n", "<think>\na b \n</think>\n\n ü😀 c ", "a</think> b"])
def test_an_answer_without_stops_is_that_with_one_that_never_comes(
    text: str, begin: OutputStart, tokenizer: Tokenizer
) -> None:
    assert split(tokenizer, text, begin) == split(tokenizer, text, begin, "never")


@pytest.mark.parametrize(
    ("text", "begin", "expected"),
    [
        ("so\n it is\n</think>\n\nYes.\n", "reasoning", ("so\n it is", "Yes.\n")),
        ("<think>\nhm\n</think>\n\nYes.", "answer", ("hm", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", "answer", ("", "Yes.")),
        ("\n\n</think>\n\nYes.", "reasoning", ("", "Yes.")),
        ("Yes.", "answer", ("", "Yes.")),
        (" Yes. <think>no</think>", "answer", ("", " Yes. <think>no</think>")),
        ("never ends \n", "reasoning", ("never ends", "")),
        ("<think>\nx\n</think>\n\ny", "raw", ("", "<think>\nx\n</think>\n\ny")),
        ("a</think>b</think>c", "reasoning", ("a", "b</think>c")),
        ("", "reasoning", ("", "")),
        ("ä 😀 \n\n ü</think> 😀", "reasoning", ("ä 😀 \n\n ü", "😀")),
    ],
)
def test_parts_of_an_output(
    tokenizer: Tokenizer, text: str, begin: OutputStart, expected: tuple[str, str]
) -> None:
    assert split(tokenizer, text, begin) == expected


@cache
def bundled() -> Tokenizer:
    return load_tokenizer(Path(__file__).parents[3] / "examples/models/tiny-qwen3")


texts = st.text(
    st.characters(codec="utf-8", exclude_characters="<"), max_size=20
)  # no tag of a special token


@given(thought=texts, answer=texts)
@example(thought="\U0002f800", answer="")
def test_any_text_comes_through(thought: str, answer: str) -> None:
    tokenizer = bundled()
    thought = unicodedata.normalize("NFC", thought.strip())  # as the tokenizer does
    text = f"{thought}</think>{answer}"
    assert split(tokenizer, text, "reasoning")[0] == thought


def test_stop_strings_end_the_answer_only(tokenizer: Tokenizer) -> None:
    text = "one\nEND two\n</think>\n\nthree\nEND four"
    assert split(tokenizer, text, "reasoning", "\nEND") == ("one\nEND two", "three")
    # a stop that the blank lines between the two parts would match
    assert split(tokenizer, "one</think>\n\ntwo", "reasoning", "\n\n") == ("one", "two")


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        (OPENED, ("reasoning", "reasoning", "answer")),
        (OPENED_ON_REQUEST, ("answer", "reasoning", "answer")),
        (LEFT_TO_THE_MODEL, ("answer", "answer", "answer")),
    ],
)
def test_the_default_is_the_template_s(
    tokenizer: Tokenizer, source: str, begins: tuple[OutputStart, ...]
) -> None:
    template = ChatTemplate(source, {})
    for thinking, begin in zip((None, True, False), begins, strict=True):
        text = template.render([{"role": "user", "content": "<think>"}], thinking)
        assert output_start(tokenizer.encode(text), tokenizer) == begin


Make = Callable[..., "PackedModel"]
Say = Callable[[Sequence[int]], None]
Saying = Callable[[lowbit.Model, str], None]


@pytest.fixture
def thinker(make_qwen3_5: Make) -> lowbit.Model:
    """A hybrid model whose template opens the block, and that says what it is told to say."""
    folder = make_qwen3_5().folder
    (folder / "chat_template.jinja").write_text(OPENED)
    return lowbit.load(folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def saying(say: Say) -> Saying:
    """Make the model choose the tokens of a text, then the end of its turn."""

    def start(model: lowbit.Model, text: str) -> None:
        say([*model.tokenizer.encode(text), *model.tokenizer.encode("<|im_end|>")])

    return start


def test_a_generation_holds_both_parts(thinker: lowbit.Model, saying: Saying) -> None:
    saying(thinker, "Well, END\n</think>\n\nHi there")
    stream = thinker.stream("Hello", stop=["END"])
    assert "".join(stream) == "Hi there"
    made = stream.generation
    assert (made.reasoning, made.text) == ("Well, END", "Hi there")
    assert made.finish_reason == "stop"
    assert thinker.tokenizer.decode(made.token_ids) == "Well, END\n</think>\n\nHi there"
    saying(thinker, "Hi")
    assert thinker.generate("Hello", thinking=False).text == "Hi"
    saying(thinker, "x</think>y")
    assert thinker.generate("<think>", raw=True).text == "x</think>y"


def test_the_next_turn_reuses_what_the_template_keeps(
    thinker: lowbit.Model, saying: Saying, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Hello, how are you? " * 4
    messages: list[lowbit.Message] = [{"role": "user", "content": question}]
    saying(thinker, "hm\n</think>\n\nHi")
    first = thinker.generate(messages)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": "And?"})
    saying(thinker, "ok</think>Yes")
    second = thinker.generate(messages)
    # the turns before the first answer; its reasoning is not part of the second prompt
    turn = thinker.tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>")
    assert second.timings.reused_tokens == len(turn)
    monkeypatch.undo()
    fresh = lowbit.load(thinker.folder, device="cpu", dtype=torch.float32)
    prompt = list(second.prompt_token_ids)
    assert list(thinker.engine.generate(prompt, lowbit.SamplingParams(), 8)) == list(
        fresh.engine.generate(prompt, lowbit.SamplingParams(), 8)
    )


def test_the_terminal_shows_the_reasoning_apart(make_qwen3_5: Make, saying: Saying) -> None:
    from click.testing import CliRunner

    from lowbit.runtime.cli.main import main

    folder = make_qwen3_5().folder
    (folder / "chat_template.jinja").write_text(OPENED)
    model = lowbit.load(folder, device="cpu")
    arguments = ["generate", str(folder), "Hello", "--device", "cpu"]
    saying(model, "let me [b]see[/b]\n</think>\n\nHi [i]you[/i]")
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == "Hi [i]you[/i]\n"
    assert shown.stderr.startswith("thinking: let me [b]see[/b]\n\n")
    saying(model, "let me see\n</think>\n\nHi")
    printed = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert (printed["reasoning"], printed["text"]) == ("let me see", "Hi")
    saying(model, "Hi")
    shown = CliRunner().invoke(main, [*arguments, "--no-think"])
    assert shown.stdout == "Hi\n"
    assert "thinking" not in shown.stderr


def passed(pieces: Iterable[str], *stops: str) -> list[str]:
    text = Content(stops)
    return [*map(text.push, pieces), text.finish()]


def first_cut(text: str, stops: list[str]) -> str:
    """The text before whichever string is complete first, found prefix by prefix."""
    for length in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:length].find(stop)) >= 0]
        if found:
            return text[: min(found)]
    return text


@given(
    pieces=st.lists(st.text(alphabet="abE\nN", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="abEN\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    text = Content(tuple(stops))
    shown = "".join(map(text.push, pieces)) + text.finish()
    whole = "".join(pieces)
    assert shown == first_cut(whole, stops)
    assert (text.found is not None) == (shown != whole)
    if text.found is not None:
        assert text.found in stops
        assert whole.startswith(shown + text.found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\nEND two", ["o", "n", "e", *[""] * 9]),
        ("one\nENTER", ["o", "n", "e", "", "", "", "\nENT", "E", "R", ""]),
        ("one\nEN", ["o", "n", "e", "", "", "", "\nEN"]),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(text: str, expected: list[str]) -> None:
    assert passed(text, "\nEND") == expected
