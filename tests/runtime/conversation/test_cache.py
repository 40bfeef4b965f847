"""Turns of a chat stay in the model's cache after every command that leaves them."""

from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.conversation.chat import AnswerSettings, Chat, LoadedModel, used_tokens
from lowbit.runtime.conversation.commands import Slash
from lowbit.runtime.conversation.respond import respond
from lowbit.runtime.conversation.turns import Conversation
from lowbit.runtime.engine.image_input import EncodedPrompt
from tests.lanes import in_commands
from tests.runtime.conversation.conftest import Shown
from tests.short_models import Shorten


def new_chat(folder: Path, context: int = 512, seed: int | None = None) -> Chat:
    model = lowbit.load(folder, device="cpu", context=context)
    hot = AnswerSettings({"temperature": 0.9, "top_k": 30, "seed": seed}, max_new_tokens=24)
    talk = Conversation("You tell stories to children.")
    return Chat(LoadedModel(model), folder.name, hot, talk)


def say(chat: Chat, *entries: Slash | str) -> tuple[Chat, Shown]:
    shown = Shown()
    for entry in entries:
        chat = respond(chat, entry, shown.view()).chat
    return chat, shown


def test_undo_and_retry_reuse_the_turns_before(shorten: Shorten) -> None:
    chat, first = say(new_chat(shorten("tiny-qwen3")), "Tell me a story.", "Go on.", "And then?")
    prompts = [made.timings.prompt_tokens for made in first.finished]
    chat, retried = say(chat, Slash("retry"), Slash("retry"))
    chat, undone = say(chat, Slash("undo"), "What did the dog do?")
    for made in (*retried.finished, *undone.finished):
        assert prompts[1] <= made.timings.reused_tokens < made.timings.prompt_tokens
    assert len({made.seed for made in retried.finished}) == 2
    assert len(chat.conversation.turns) == 3


def test_a_prompt_becomes_tokens_once(shorten: Shorten, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = lowbit.Model.encode_prompt
    lengths: list[int] = []

    def counted(*arguments: Any, **options: Any) -> EncodedPrompt:
        made = encode(*arguments, **options)
        lengths.append(len(made.ids))
        return made

    monkeypatch.setattr(lowbit.Model, "encode_prompt", counted)
    chat = new_chat(shorten("tiny-qwen3"))
    for entry in ("Tell me a story.", "Go on.", Slash("retry"), "And then?"):
        chat, shown = say(chat, entry)
        made = shown.finished[-1]
        assert used_tokens(chat) == made.timings.prompt_tokens + len(made.token_ids)
        assert lengths == [made.timings.prompt_tokens]
        lengths.clear()


def test_a_repeated_question_takes_the_steps_of_last_time(shorten: Shorten) -> None:
    chat, _ = say(
        new_chat(shorten("tiny-qwen3")), "Tell me a story.", "Go on.", Slash("set", "seed 3")
    )
    chat, same = say(chat, Slash("retry"), Slash("retry"), Slash("retry"))
    assert len({made.token_ids for made in same.finished}) == 1
    assert len({made.timings.reused_tokens for made in same.finished}) == 1
    assert same.finished[0].timings.reused_tokens > 0


def test_scoring_between_two_retries_loses_nothing(shorten: Shorten) -> None:
    chat, shown = say(
        new_chat(shorten("tiny-qwen3")), "Tell me a story.", "Go on.", Slash("set", "seed 3")
    )
    chat, before = say(chat, Slash("retry"))
    assert isinstance(chat.model, LoadedModel)
    chat.model.model.logits(shown.finished[-1].prompt_token_ids)
    chat.model.model.logits(shown.finished[0].prompt_token_ids[::-1])
    _, after = say(chat, Slash("retry"))
    one, other = before.finished[0], after.finished[0]
    assert other.timings.reused_tokens == one.timings.reused_tokens > 0
    assert other.token_ids == one.token_ids


@in_commands("tiny-qwen3")
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_turns_after_a_drop_reuse_what_is_left(shorten: Shorten, name: str) -> None:
    chat = new_chat(
        shorten(name), context=256, seed=3
    )  # an answer may be other tokens when it is read again
    reused = []
    dropped = 0
    for number in range(11):
        chat, shown = say(chat, f"Tell me story number {number}, please.")
        made = shown.finished[-1]
        if chat.conversation.dropped == dropped and number:
            reused.append(made.timings.reused_tokens > made.timings.prompt_tokens // 3)
        dropped = chat.conversation.dropped
    assert dropped > 2
    assert len(reused) >= 5  # most questions dropped nothing
    assert all(reused)
