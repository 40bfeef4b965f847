"""Slash commands: what they read, change and refuse."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import RequestError
from lowbit.runtime.conversation.chat import Chat
from lowbit.runtime.conversation.commands import (
    ALIASES,
    COMMANDS,
    Outcome,
    Slash,
    read_entry,
    read_piped,
    run_command,
)
from lowbit.runtime.conversation.respond import respond
from lowbit.runtime.conversation.turns import Conversation, Turn
from tests.runtime.conversation.conftest import NewChat, Shown

TWO = (Turn("How old?", "Ten"), Turn("Why?", "Because"))


def run(chat: Chat, text: str) -> Outcome:
    entry = read_entry(text)
    assert isinstance(entry, Slash)
    return run_command(chat, entry)


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("/help", Slash("help")),
        ("/HELP", Slash("help")),
        ("/?", Slash("?")),
        ("/save! a b.json", Slash("save!", "a b.json")),
        ("/system Be\nbrief ", Slash("system", "Be\nbrief")),
        ("/nonsense", Slash("nonsense")),
        ("/", Slash("")),
        ("//help", "/help"),
        ("//nonsense x", "/nonsense x"),
        (" /help", " /help"),
        ("hello /help", "hello /help"),
        ("/etc/hosts has what?", "/etc/hosts has what?"),
        ("// a comment\nint x;", "// a comment\nint x;"),
        ("/* a comment */", "/* a comment */"),
        ("///", "///"),
        ("/5 of it", "/5 of it"),
    ],
)
def test_commands_are_told_from_messages(text: str, entry: Slash | str) -> None:
    assert read_entry(text) == entry


def test_piped_words_that_are_no_commands_are_messages() -> None:
    for text in ("/no_think Why?", "/think Why?", "/think ON", "/nonsense", "/", "/hlp", "/etc/x"):
        assert read_piped(text) == text
    for text in ("/think", "/think on", "/think default", "/save! x", "/?", "/quit", "/set", "Hi"):
        assert read_piped(text) == read_entry(text)
    assert read_piped("//save x") == "/save x"


@pytest.mark.parametrize("name", [*COMMANDS, *ALIASES])
def test_only_files_are_out_of_reach_of_piped_text(new_chat: NewChat, name: str) -> None:
    chat = replace(new_chat()[0], conversation=Conversation(turns=TWO))
    if name in ("save", "save!", "load", "image"):
        with pytest.raises(RequestError, match=f"/{name} works in a terminal only"):
            run_command(chat, Slash(name), files=False)
    else:
        run_command(chat, Slash(name), files=False)


@given(st.text())
def test_a_message_is_what_was_typed_but_for_the_second_slash(text: str) -> None:
    entry = read_entry(text)
    assert isinstance(entry, Slash) or entry == text or "/" + entry == text
    assert not isinstance(entry, Slash) or text.startswith("/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/hlp", "no command `/hlp`; did you mean /help?"),
        ("/retyr", "did you mean /retry?"),
        ("/stat", "did you mean /stats?"),
        ("/xyzzy", "no command `/xyzzy`"),
        ("/", "no command `/`"),
        ("/undo 3", "/undo takes no argument, got `3`"),
        ("/think maybe", "/think takes on, off, default, got `maybe`"),
        ("/set warmth 3", "no sampling parameter `warmth`"),
        ("/set temprature 3", "did you mean temperature?"),
        ("/set temperature hot", "`temperature` must be a number, got `hot`"),
        ("/set temperature nan", "`temperature` must be a number from 0 to 1000, got NaN"),
        ("/set temperature -1", "`temperature` must be a number from 0 to 1000, got -1.0"),
        ("/set top_k 1.5", "`top_k` must be a whole number"),
        ("/set seed -1", "`seed` must be an integer from 0 to 9223372036854775807, got -1"),
        ("/set top_p", "`top_p` must be a number, got ``"),
        ("/save", "no file is named"),
        ("/load", "no file is named"),
        ("/retry", "no question yet"),
        ("/undo", "no question that could be taken back"),
    ],
)
def test_errors_name_what_is_wrong(new_chat: NewChat, text: str, expected: str) -> None:
    chat, model = new_chat()
    with pytest.raises(RequestError) as caught:
        run(chat, text)
    assert expected in str(caught.value)
    assert not model.asked


@given(st.sampled_from([*COMMANDS, *ALIASES]), st.text(max_size=30))
def test_any_argument_ends_in_a_result_or_an_error(
    new_chat: NewChat, name: str, argument: str
) -> None:
    if name.startswith("save"):
        return  # which would write files of any name
    chat = replace(new_chat()[0], conversation=Conversation(turns=TWO))
    with suppress(RequestError):
        assert run_command(chat, Slash(name, argument.strip())).chat.name == chat.name


def test_help_has_a_line_for_every_command(new_chat: NewChat) -> None:
    notes = run(new_chat()[0], "/help").notes
    for name in COMMANDS:
        assert sum(f"/{name} " in line[: len(name) + 2] for line in notes) == 1
    assert max(len(line) for line in notes if "   " in line) < 80
    for name in ALIASES:
        run_command(replace(new_chat()[0], conversation=Conversation(turns=TWO)), Slash(name))


def test_system_is_shown_set_and_cleared(new_chat: NewChat) -> None:
    chat, _ = new_chat()
    assert run(chat, "/system").notes == ("there is no system message",)
    outcome = run(chat, "/system Be brief.\nAlways.")
    assert outcome.chat.conversation.system == "Be brief.\nAlways."
    assert "from the next question on" in outcome.notes[0]
    assert run(outcome.chat, "/system").notes == ("Be brief.\nAlways.",)
    assert run(outcome.chat, "/reset").chat.conversation == Conversation("Be brief.\nAlways.")
    assert run(outcome.chat, "/system off").chat.conversation.system is None


def test_thinking_is_switched_where_the_template_can(new_chat: NewChat) -> None:
    chat, model = new_chat()
    for word, value in {"on": True, "off": False, "default": None}.items():
        chat = run(chat, f"/think {word}").chat
        assert chat.settings.thinking is value
        assert run(chat, "/think").notes == (f"thinking: {word}",)
    model.switch = False
    with pytest.raises(RequestError, match="cannot be switched"):
        run(chat, "/think on")
    assert run(chat, "/think default").chat.settings.thinking is None


def test_sampling_is_set(new_chat: NewChat) -> None:
    chat, _ = new_chat()
    chat = run(chat, "/set temperature 0.7").chat
    chat = run(chat, "/set top-k=20").chat
    chat = run(chat, "/set seed 5").chat
    assert (chat.sampling.temperature, chat.sampling.top_k, chat.sampling.seed) == (0.7, 20, 5)
    assert run(chat, "/set").notes == ("sampling: temperature 0.7, top_k 20, seed 5",)
    assert run(chat, "/set seed off").chat.sampling.seed is None


def test_retry_says_when_nothing_can_change(new_chat: NewChat) -> None:
    chat = replace(new_chat()[0], conversation=Conversation(turns=TWO))
    assert run(chat, "/retry") == Outcome(chat, retried=Conversation(turns=TWO[:1]))
    assert "temperature is 0" in run(run(chat, "/set temperature 0").chat, "/retry").notes[0]
    assert "seed is fixed" in run(run(chat, "/set seed 1").chat, "/retry").notes[0]
    asked = replace(chat, conversation=chat.conversation.asked("And?"))
    assert run(asked, "/retry").retried == Conversation(turns=TWO)


def test_undo_takes_turns_back_one_by_one(new_chat: NewChat) -> None:
    chat = replace(new_chat()[0], conversation=Conversation("s", TWO, unanswered="And?"))
    taken: list[str] = []
    for _ in range(3):
        outcome = run(chat, "/undo")
        chat = outcome.chat
        taken += outcome.notes
    assert taken == ["taken back: And?", "taken back: Why?", "taken back: How old?"]
    assert chat.conversation == Conversation("s")


def test_save_and_load_remember_the_file(new_chat: NewChat, tmp_path: Path) -> None:
    chat, _ = new_chat()
    chat = replace(chat, conversation=Conversation("s", TWO, dropped=1))
    outcome = run(chat, f"/save {tmp_path / 'my talk.json'}")
    assert outcome.notes == (f"saved 2 turns to `{tmp_path / 'my talk.json'}`",)
    run(run(outcome.chat, "/undo").chat, "/save")
    loaded = run(replace(chat, name="other"), f'/load "{tmp_path / "my talk.json"}"')
    assert loaded.chat.conversation == Conversation("s", TWO[:1])
    assert loaded.notes == (
        f"loaded 1 turn of `{tmp_path / 'my talk.json'}`",
        "they are answers of another model, `some/model`",
        "last question: How old?",
    )
    chat = replace(loaded.chat, conversation=loaded.chat.conversation.asked("Open?"))
    run(chat, "/save")
    assert run(chat, "/load").notes[-1] == "it has no answer yet: /retry asks it"


def test_stats_say_what_is_in_use(new_chat: NewChat) -> None:
    chat, model = new_chat()
    assert run(chat, "/stats").notes[0] == "context: 0 of 200 tokens (0%), 0 turns"
    chat = replace(chat, conversation=Conversation("s", TWO, dropped=1))
    used = len(model.encode(chat.conversation.seen()).ids)
    first = f"context: {used} of 200 tokens ({used / 200:.0%}), 2 turns, 1 of them dropped"
    assert run(chat, "/stats").notes[0] == first
    assert run(chat, "/exit").done


def test_stats_of_a_full_context(new_chat: NewChat, shown: Shown) -> None:
    chat, _ = new_chat(["x" * 198])
    chat = respond(chat, "Hi", shown.view()).chat  # the last token of an answer needs no place
    assert len(shown.finished[0].prompt_token_ids) + len(shown.finished[0].token_ids) > 200
    notes = run(chat, "/stats").notes
    assert notes[0] == "context: 200 of 200 tokens (100%), 1 turn"
    assert not any("seed" in note for note in notes)  # nobody has set one
    assert "sampling: temperature 0.5, seed 5" in run(run(chat, "/set seed 5").chat, "/stats").notes
