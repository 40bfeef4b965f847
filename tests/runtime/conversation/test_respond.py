"""Steps of a chat with a scripted model: answers, errors, Ctrl-C, a full context."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError, RequestError, ResourceError
from lowbit.runtime.conversation.chat import AnswerSettings, Chat, used_tokens
from lowbit.runtime.conversation.commands import Slash
from lowbit.runtime.conversation.respond import View, respond
from lowbit.runtime.conversation.turns import Conversation, Turn
from lowbit.runtime.text.answer import Piece
from tests.runtime.conversation.conftest import Answer, NewChat, Shown

RETRY, UNDO = Slash("retry"), Slash("undo")


def step(chat: Chat, view: View, *entries: Slash | str) -> Chat:
    for entry in entries:
        chat = respond(chat, entry, view).chat
    return chat


def test_an_answer_becomes_a_turn_without_its_reasoning(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat(["~let me see", "Ten"])
    settings = AnswerSettings(thinking=True, stop=("x",))
    chat = replace(chat, conversation=Conversation("s"), settings=settings)
    chat = step(chat, shown.view(), "How old?")
    assert chat.conversation == Conversation("s", (Turn("How old?", "Ten"),))
    assert model.asked == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "How old?"}]
    ]
    assert model.settings == settings
    assert shown.text == "let me seeTen\n"
    assert [chat.last] == shown.finished


def test_retry_and_undo(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat(["Ten"], ["Because"], ["So"])
    chat = step(chat, shown.view(), "How old?", "Why?", RETRY)
    assert model.asked[1] == model.asked[2]
    assert chat.conversation.turns == (Turn("How old?", "Ten"), Turn("Why?", "So"))
    chat = step(chat, shown.view(), UNDO, RETRY)
    assert chat.conversation.turns == (Turn("How old?", "fine"),)
    assert model.asked[3] == model.asked[0]


FAILURES: list[Answer] = [
    [CheckpointError("logits are NaN")],
    ["half", CheckpointError("logits are NaN")],
    [torch.OutOfMemoryError("full")],
    ["~thinking", torch.OutOfMemoryError("full")],
]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_an_error_keeps_the_question_and_ends_nothing(
    new_chat: NewChat, shown: Shown, failure: Answer
) -> None:
    chat, _ = new_chat(failure, ["Ten"], failure)
    chat = step(chat, shown.view(), "How old?")
    assert chat.conversation == Conversation(unanswered="How old?")
    assert len(shown.errors) == 1
    assert "/retry asks again" in shown.notes[-1]
    chat = step(chat, shown.view(), RETRY)
    assert chat.conversation == Conversation(turns=(Turn("How old?", "Ten"),))
    chat = step(chat, shown.view(), RETRY)  # fails again: the answer stays
    assert chat.conversation == Conversation(turns=(Turn("How old?", "Ten"),))
    assert "the earlier one stays" in shown.notes[-1]


def test_ctrl_c_before_the_answer_leaves_the_question_open(new_chat: NewChat, shown: Shown) -> None:
    chat, _ = new_chat([KeyboardInterrupt()], ["~hm", KeyboardInterrupt()], [""], ["Ten"])
    for _ in range(3):
        chat = step(chat, shown.view(), "How old?")
        assert chat.conversation == Conversation(unanswered="How old?")
        assert "/retry" in shown.notes[-1]
    assert step(chat, shown.view(), UNDO).conversation == Conversation()
    assert step(chat, shown.view(), RETRY).conversation.turns == (Turn("How old?", "Ten"),)


class Presser(Shown):
    """Somebody who presses Ctrl-C when the first text has come."""

    def show(self, piece: Piece) -> None:
        super().show(piece)
        if self.text == "one ":
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_between_two_tokens_keeps_what_was_written(new_chat: NewChat) -> None:
    before = signal.getsignal(signal.SIGINT)
    shown = Presser()
    chat, _ = new_chat(["one ", "two"])
    chat = step(chat, shown.view(), "Count")
    assert chat.conversation == Conversation(turns=(Turn("Count", "one "),))
    assert shown.text == "one \n"
    assert "what was written is kept" in shown.notes[-1]
    assert step(chat, shown.view(), UNDO).conversation == Conversation()
    assert step(chat, shown.view(), RETRY).conversation.turns == (Turn("Count", "fine"),)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_chat_that_nobody_types(new_chat: NewChat) -> None:
    chat, _ = new_chat(["one ", "two"])
    with pytest.raises(KeyboardInterrupt):
        step(chat, Presser().view(interactive=False), "Count")


def test_a_full_context_drops_the_oldest_turns_and_says_so(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat(context=400)
    chat = replace(chat, conversation=Conversation("system"))
    for number in range(60):
        chat = step(chat, shown.view(), f"question {number:2}")
        assert model.asked[-1][0]["content"] == "system"
        assert model.asked[-1][-1]["content"] == f"question {number:2}"
        assert len(model.encode(model.asked[-1]).ids) <= 300
    assert [len(chat.conversation.turns), shown.errors] == [60, []]
    assert shown.notes[0].startswith("dropped the ")
    dropped = sum(int(note.split()[2]) for note in shown.notes)
    assert dropped == chat.conversation.dropped > 40
    assert len(shown.notes) < 10  # room for several turns is made at once


def test_a_turn_encodes_its_prompt_once(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat()
    entries: list[Slash | str] = ["How old?", "Why?", RETRY, "And?"]
    for number, entry in enumerate(entries, start=1):
        chat = step(chat, shown.view(), entry)
        used = used_tokens(chat)
        assert len(model.encoded) == number, entry
        last = shown.finished[-1]
        assert used == len(last.prompt_token_ids) + len(last.token_ids)
    chat = step(chat, shown.view(), UNDO)
    assert used_tokens(chat) == len(model.encode(chat.conversation.seen()).ids)


def test_an_answer_after_a_drop_begins_with_a_prompt_that_was_counted(
    new_chat: NewChat, shown: Shown
) -> None:
    chat, model = new_chat(context=400)
    turns = tuple(Turn(f"question {number}", "fine") for number in range(30))
    chat = step(replace(chat, conversation=Conversation(turns=turns)), shown.view(), "Why?")
    prompts = [messages for messages, _ in model.encoded]
    assert len(prompts) > 2
    assert all(prompts.count(messages) == 1 for messages in prompts)
    assert model.asked == [[*chat.conversation.prompt("x")[:-3], prompts[0][-1]]]


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_an_error_is_in_the_outcome(
    new_chat: NewChat, shown: Shown, failure: Answer, interactive: bool
) -> None:
    chat, _ = new_chat(failure)
    outcome = respond(chat, "Why?", shown.view(interactive))
    assert type(outcome.error) in (CheckpointError, ResourceError)
    assert shown.text.endswith("\n")  # the view was ended
    assert isinstance(respond(chat, UNDO, shown.view(interactive)).error, RequestError)
    assert respond(chat, "Why?", shown.view(interactive)).error is None


def test_a_bug_is_no_failed_answer(new_chat: NewChat, shown: Shown) -> None:
    chat, _ = new_chat([RuntimeError("shapes differ")])
    with pytest.raises(RuntimeError, match="shapes differ"):
        respond(chat, "Why?", shown.view())


def test_a_question_that_does_not_fit_is_an_error(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat(context=100)
    chat = step(chat, shown.view(), "short", "long " * 40)
    assert "the prompt has 202 tokens" in shown.errors[0]
    assert chat.conversation.turns == (Turn("short", "fine"),)
    assert chat.conversation.dropped == 0
    step(chat, shown.view(), "again")
    assert len(model.asked[-1]) == 3


def test_answers_that_were_cut_say_why(new_chat: NewChat, shown: Shown) -> None:
    chat, model = new_chat(["much text"])
    stream = model.stream

    def cut(*args: object, **options: object) -> object:
        made = stream(*args, **options)  # type: ignore[arg-type]
        return replace(made, generation=replace(made.generation, finish_reason="length"))

    model.stream = cut  # type: ignore[method-assign, assignment]
    step(chat, shown.view(), "Talk")
    assert shown.notes == [
        "cut: the context of 200 tokens is full; the next question drops the oldest turns, "
        "/undo takes this one back, /reset starts over"
    ]
    short = replace(chat, settings=replace(chat.settings, max_new_tokens=4))
    step(short, shown.view(), "Talk")
    assert shown.notes[1:] == ["cut after 4 tokens, by --max-new-tokens"]


ENTRIES = st.one_of(
    st.text("ab ", min_size=1, max_size=40),
    st.sampled_from([RETRY, UNDO, Slash("reset"), Slash("nonsense"), Slash("stats")]),
    st.builds(Slash, st.just("system"), st.sampled_from(["", "off", "Be brief"])),
)
ANSWERS = st.lists(
    st.text("xy", max_size=20)
    | st.builds(KeyboardInterrupt)
    | st.builds(CheckpointError, st.just("broken")),
    max_size=3,
)


@given(st.lists(st.tuples(ENTRIES, ANSWERS), max_size=12), st.integers(20, 120))
def test_any_sequence_keeps_the_conversation_whole(
    new_chat: NewChat, steps: list[tuple[Slash | str, Answer]], context: int
) -> None:
    chat, model = new_chat(context=context)
    shown = Shown()
    for entry, answer in steps:
        before, asked = chat.conversation, len(model.asked)
        model.answers = [answer]
        chat = step(chat, shown.view(), entry)
        after = chat.conversation
        if isinstance(entry, str):
            said = (*before.turns, Turn(entry, after.turns[-1].answer)) if after.turns else ()
            assert (after.turns, after.unanswered) in ((said, None), (before.turns, entry))
        for messages in model.asked[asked:]:
            assert len(model.encode(messages).ids) <= context
            roles = [message["role"] for message in messages if message["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(turn.question and turn.answer for turn in after.turns)
