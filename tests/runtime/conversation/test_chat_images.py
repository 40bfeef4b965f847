"""Images in a chat: shown with the next question, kept with it, saved and asked again."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.conversation import saved as files
from lowbit.runtime.conversation.chat import AnswerSettings, Chat, LoadedModel
from lowbit.runtime.conversation.commands import Outcome, Slash, run_command
from lowbit.runtime.conversation.respond import respond
from lowbit.runtime.conversation.turns import Conversation
from tests.runtime.conversation.conftest import NewChat, Shown
from tests.runtime.images.pictures import picture, saved

PNG = saved(picture(90, 70))
URL = "data:image/*;base64," + base64.b64encode(PNG).decode()


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "a screen.png"
    path.write_bytes(PNG)
    return path


def image(chat: Chat, argument: object = "") -> Outcome:
    return run_command(chat, Slash("image", str(argument)))


def content(text: str, *urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    return [*parts, {"type": "text", "text": text}]


def test_an_image_is_shown_with_the_next_question_and_kept(
    new_chat: NewChat, shown: Shown, png: Path
) -> None:
    chat, model = new_chat()
    outcome = image(image(chat, png).chat, f'"{png}"')
    assert outcome.notes == ("the next question shows 2 images",)
    chat = respond(outcome.chat, "Which?", shown.view()).chat
    chat = respond(chat, "And now?", shown.view()).chat
    assert [each["content"] for each in model.asked[-1]] == [
        content("Which?", URL, URL),
        "fine",
        "And now?",
    ]


def test_retry_shows_the_images_again_and_undo_takes_them_back(
    new_chat: NewChat, shown: Shown, png: Path
) -> None:
    chat, model = new_chat()
    chat = respond(image(chat, png).chat, "Which?", shown.view()).chat
    chat = respond(chat, Slash("retry"), shown.view()).chat
    assert model.asked[0] == model.asked[1]
    chat = run_command(chat, Slash("undo")).chat
    assert chat.conversation == Conversation()


def test_a_question_without_answer_keeps_its_images(
    new_chat: NewChat, shown: Shown, png: Path
) -> None:
    chat, model = new_chat([RequestError("no")], ["yes"])
    chat = respond(image(chat, png).chat, "Which?", shown.view()).chat
    chat = respond(chat, Slash("retry"), shown.view()).chat
    assert model.asked[1][0]["content"] == content("Which?", URL)
    assert chat.conversation.turns[0].images == (URL,)
    assert chat.conversation.shown == ()


def test_images_are_counted_and_dropped(new_chat: NewChat, png: Path) -> None:
    chat = image(new_chat()[0], png).chat
    assert image(chat).notes == ("the next question shows 1 image",)
    assert image(chat, "off").notes == ("the next question shows no image",)
    assert image(chat, "off").chat.conversation.shown == ()


@pytest.mark.parametrize("answered", [True, False])
def test_images_are_saved_and_loaded(
    new_chat: NewChat, tmp_path: Path, png: Path, answered: bool
) -> None:
    talk = image(new_chat()[0], png).chat.conversation.asked("Which?")
    talk = talk.answered("Which?", "This.") if answered else talk
    path = tmp_path / "talk.json"
    files.save(path, talk, model="m", sampling=lowbit.SamplingParams(), thinking=None)
    assert files.load(path).conversation == talk


@pytest.mark.parametrize(
    "odd",
    [
        [],
        [{"type": "text", "text": "a"}],
        content("a", URL)[::-1],
        [*content("a", URL), "x"],
        [{"type": "image_url", "image_url": URL}, {"type": "text", "text": "a"}],
        [{"type": "image_url", "image_url": {"url": URL, "x": 1}}, {"type": "text", "text": "a"}],
    ],
)
def test_other_parts_are_no_saved_conversation(tmp_path: Path, odd: list[Any]) -> None:
    talk = Conversation().asked("a")
    path = tmp_path / "talk.json"
    files.save(path, talk, model="m", sampling=lowbit.SamplingParams(), thinking=None)
    written = json.loads(path.read_text())
    written["messages"][0]["content"] = odd
    path.write_text(json.dumps(written))
    with pytest.raises(RequestError, match="message 1: `role` and `content` must be text"):
        files.load(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"hello", "begins with the bytes 68 65"),
        (b"%PDF-1.7", "a PDF came for an image"),
        (PNG[:100], "damaged"),
        (b"", "an image is empty"),
    ],
)
def test_a_file_that_is_no_image_is_named(
    new_chat: NewChat, tmp_path: Path, data: bytes, words: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(RequestError, match=r"image `.*file`: ") as caught:
        image(new_chat()[0], path)
    assert words in str(caught.value)
    with pytest.raises(RequestError, match=r"nowhere.png` cannot be read"):
        image(new_chat()[0], tmp_path / "nowhere.png")


def test_a_loaded_model_answers_about_an_image(
    seeing_folder: Path, shown: Shown, png: Path
) -> None:
    model = lowbit.load(seeing_folder, device="cpu", context=512)
    chat = Chat(LoadedModel(model), "seeing", AnswerSettings({"temperature": 0}, 4))
    chat = respond(image(chat, png).chat, "Which?", shown.view()).chat
    assert not shown.errors
    assert chat.last is not None
    assert chat.last.prompt_token_ids.count(310) == 6


def test_a_model_without_tower_refuses_the_command(make_qwen3_5: Any, png: Path) -> None:
    folder = make_qwen3_5().folder
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    model = lowbit.load(folder, device="cpu")
    chat = Chat(LoadedModel(model), "blind", replace(AnswerSettings()))
    with pytest.raises(RequestError, match="the model takes no images"):
        image(chat, png)
