"""Images of earlier turns that cannot be read, over all three APIs: a line stands for them."""

from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.images import picture as limits
from lowbit.runtime.serve.apis.chat import ChatBody
from lowbit.runtime.serve.request.contents import Content, media_of
from lowbit.runtime.serve.request.images import UNREADABLE, read_images
from lowbit.runtime.serve.request.parts import MediaPart
from tests.runtime.images.pictures import picture, saved
from tests.runtime.serve.conftest import LEFT_OUT, Running, prompt_of, turns
from tests.runtime.serve.test_bad_images import BAD, encoded, part_of
from tests.runtime.serve.test_images import (
    CHAT,
    FIELD,
    MESSAGES,
    PNG,
    RESPONSES,
    ask,
    image,
    prompt_tokens,
    text,
    user,
)

CUT = encoded(PNG[: len(PNG) // 2])
DAMAGED = "[image left out: the PNG image is damaged, cut short, or has no pixels]"
PAD = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("name", "path"),
    [  # each image of one API; make test-commands has the others
        pytest.param(name, path, marks=() if (n + m) % 3 == 0 else pytest.mark.commands)
        for n, name in enumerate(BAD)
        for m, path in enumerate(FIELD)
    ],
)
def test_bad_images_of_earlier_turns_become_a_line(
    seeing: Running, caplog: pytest.LogCaptureFixture, path: str, name: str
) -> None:
    url, words = BAD[name]
    before = user(text(path, "See "), part_of(path, url), text(path, "and "), image(path))
    messages = [before, *turns(("assistant", "A."), ("user", "?"))]
    prompt, found = prompt_of(seeing, caplog, path, **{FIELD[path]: messages})
    assert found.headers[LEFT_OUT] == UNREADABLE
    [line] = [each for each in caplog.messages if each.startswith(f"POST {path} ")]
    assert f"left out {UNREADABLE}" in line
    start = "<|im_start|>user\nSee \n[image left out: "
    assert prompt.startswith(start)
    reason, _, rest = prompt.removeprefix(start).partition("]\nand ")
    assert any(each in reason for each in words.split("|")), reason
    assert "<|im_start|>" not in reason
    assert rest.startswith("<|vision_start|>")


@pytest.mark.parametrize("path", FIELD)
def test_the_line_is_the_same_in_every_turn(
    seeing: Running, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """So the cache has all behind it, whatever turns came since."""
    shown = user(image(path, CUT), text(path, "Tell me. " * 60))
    messages: list[Any] = [shown, *turns(("assistant", "A."), ("user", "And?"))]
    first, _ = prompt_of(seeing, caplog, path, **{FIELD[path]: messages})
    assert first.startswith(f"<|im_start|>user\n{DAMAGED}\nTell me.")
    messages += turns(("assistant", "B."), ("user", "So?"))
    later, found = prompt_of(seeing, caplog, path, **{FIELD[path]: messages})
    behind = first.index("And?")
    assert later[:behind] == first[:behind]
    usage = found.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details["cached_tokens"] if details else usage["cache_read_input_tokens"]
    assert cached >= 128


def test_a_reason_says_nothing_that_may_change(seeing: Running) -> None:
    """Neither the decoder's own words nor pixels that other images leave."""
    reader = seeing.model.prompts.reader()
    with pytest.raises(RequestError, match=r"has no pixels: .*truncated") as damaged:
        reader.read(PNG[: len(PNG) // 2])
    assert f"[image left out: {damaged.value.reason}]" == DAMAGED  # type: ignore[attr-defined]
    reader.pixels = limits.MOST_PROMPT_PIXELS
    with pytest.raises(RequestError, match="may have 0 more") as crowded:
        reader.read(saved(picture(41, 51, 3)))
    reason = "the new images of the prompt have too many pixels"
    assert crowded.value.reason == reason  # type: ignore[attr-defined]


CALLS: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: (
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "function": {"name": "shot", "arguments": "{}"}},
                {"id": "2", "function": {"name": "shot", "arguments": "{}"}},
            ],
        },
    ),
    RESPONSES: tuple(
        {"type": "function_call", "call_id": id, "name": "shot", "arguments": "{}"} for id in "12"
    ),
    MESSAGES: (
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": id, "name": "shot", "input": {}} for id in "12"],
        },
    ),
}


def results(path: str, *outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools as each API has them."""
    ids = [str(number) for number in range(1, len(outputs) + 1)]
    both = list(zip(ids, outputs, strict=True))
    if path == CHAT:
        return [{"role": "tool", "tool_call_id": id, "content": each} for id, each in both]
    if path == RESPONSES:
        kind = "function_call_output"
        return [{"type": kind, "call_id": id, "output": each} for id, each in both]
    return [user(*({"type": "tool_result", "tool_use_id": a, "content": b} for a, b in both))]


@pytest.mark.parametrize("path", FIELD)
def test_results_of_tools_that_nobody_has_answered_are_new(seeing: Running, path: str) -> None:
    """Each of those that come together."""
    before = [*turns(("user", "Go")), *CALLS[path]]
    shown = results(path, [text(path, "a"), image(path, CUT)], [text(path, "b"), image(path)])
    found = ask(seeing, path, *before, *shown)
    place = "messages[2].content[0].content" if path == MESSAGES else None
    place = place or {CHAT: "messages[2].content", RESPONSES: "input[3].output"}[path]
    assert found.status_code == 400, found.text
    assert f"`{place}[1]`: the PNG image is damaged" in found.text


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize("later", ["answered", "called", "spoken", "shown"])
def test_results_of_tools_are_old_once_somebody_goes_on(
    seeing: Running, caplog: pytest.LogCaptureFixture, path: str, later: str
) -> None:
    """Else an agent that gets a 400 for a screenshot could never say anything again."""
    shown = results(path, [image(path, CUT)], [text(path, "b")])
    rest = {
        "answered": turns(("assistant", "A."), ("user", "And?")),
        "called": [*CALLS[path], *results(path, [text(path, "c")], [image(path)])],
        "spoken": turns(("user", "Go on")),
        "shown": [user(image(path))],
    }[later]
    messages = [*turns(("user", "Go")), *CALLS[path], *shown, *rest]
    prompt, found = prompt_of(seeing, caplog, path, **{FIELD[path]: messages})
    assert f"<tool_response>\n{DAMAGED}\n</tool_response>" in prompt
    assert found.headers[LEFT_OUT] == UNREADABLE


def test_words_behind_a_result_go_on_in_one_message_too(
    seeing: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of messages send what a person says with the results that came before it."""
    [shown] = results(MESSAGES, [image(MESSAGES, CUT)], [text(MESSAGES, "b")])
    before = [*turns(("user", "Go")), *CALLS[MESSAGES]]
    for words in ("Go on", " \n"):
        content = [*shown["content"], text(MESSAGES, words)]
        found = ask(seeing, MESSAGES, *before, user(*content))
        assert found.status_code == (200 if words == "Go on" else 400), found.text
    bad = user(*shown["content"], image(MESSAGES, CUT))
    found = ask(seeing, MESSAGES, *before, bad)
    assert "`messages[2].content[2]`: the PNG image is damaged" in found.text


@pytest.mark.parametrize("path", FIELD)
def test_an_answer_that_is_begun_leaves_the_newest_turn_new(seeing: Running, path: str) -> None:
    shown = user(text(path, "See"), image(path, CUT))
    found = ask(seeing, path, shown, *turns(("assistant", "It")))
    assert found.status_code == 400
    assert f"`{FIELD[path]}[0].content[1]`: the PNG image is damaged" in found.text


@pytest.mark.parametrize("path", FIELD)
def test_a_person_who_goes_on_is_answered(seeing: Running, path: str) -> None:
    """After a 400, without any answer between."""
    shown = user(text(path, "See"), image(path, CUT))
    assert ask(seeing, path, shown).status_code == 400
    found = ask(seeing, path, shown, *turns(("user", "Never mind")))
    assert found.status_code == 200, found.text
    assert found.headers[LEFT_OUT] == UNREADABLE


@pytest.mark.parametrize("path", FIELD)
def test_the_first_of_the_newest_turn_is_named(seeing: Running, path: str) -> None:
    old = [user(image(path, CUT)), *turns(("assistant", "A."))]
    found = ask(seeing, path, *old, user(image(path), image(path, "data:,"), image(path, CUT)))
    assert found.status_code == 400
    assert f"`{FIELD[path]}[2].content[1]`: " in found.text


def test_the_oldest_are_left_out_where_new_ones_have_too_many_pixels(
    seeing: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn has them all, as those that have been read do not count."""
    monkeypatch.setattr(limits, "MOST_PROMPT_PIXELS", 3 * 70 * 40)
    urls = [encoded(saved(picture(70, 40, 90 + seed))) for seed in range(4)]
    messages = [user(text(CHAT, f"{n}: "), image(CHAT, url)) for n, url in enumerate(urls)]
    reason = "[image left out: the new images of the prompt have too many pixels]"
    prompt, found = prompt_of(seeing, caplog, CHAT, messages=messages)
    assert prompt.count(reason) == 1
    assert f"0: \n{reason}" in prompt
    assert prompt.count("<|vision_start|>") == 3
    assert found.headers[LEFT_OUT] == UNREADABLE
    prompt, found = prompt_of(seeing, caplog, CHAT, messages=messages)
    assert prompt.count("<|vision_start|>") == 4
    assert LEFT_OUT not in found.headers


def test_the_context_alone_limits_pictures(seeing: Running) -> None:
    """Their number does not."""
    tiny = [user(image(CHAT, encoded(saved(picture(9, 8, seed))))) for seed in range(110)]
    assert prompt_tokens(ask(seeing, CHAT, *tiny)) > 110


@pytest.mark.parametrize("kind", ["good", "bad"])
def test_base64_is_not_kept(seeing: Running, kind: str) -> None:
    url = CUT if kind == "bad" else encoded(PNG)
    messages = [user(image(CHAT, url)), *turns(("user", "?"))]
    body = ChatBody.read({"model": "tiny", "messages": messages})
    read_images(body.contents(), seeing.service.model.prompts)
    content = body.messages[0].content
    assert isinstance(content, list)
    part = content[0]
    assert isinstance(part, MediaPart)
    assert (part.picture is None) == (kind == "bad")
    assert part.image_url is None


def test_counts_and_tokens_have_the_line(seeing: Running) -> None:
    messages = [user(image(MESSAGES, CUT)), *turns(("assistant", "A."), ("user", "?"))]
    body: dict[str, Any] = {"model": "tiny", "messages": messages}
    counted = httpx2.post(f"{seeing.url}/v1/messages/count_tokens", json=body, timeout=60)
    assert counted.headers[LEFT_OUT] == UNREADABLE
    expected = prompt_tokens(ask(seeing, MESSAGES, *messages))
    assert counted.json()["input_tokens"] == expected
    found = httpx2.post(f"{seeing.url}/tokenize", json={"messages": messages}, timeout=60)
    assert found.headers[LEFT_OUT] == UNREADABLE
    assert found.json()["count"] == expected


def test_callers_of_the_library_get_errors(seeing: Running) -> None:
    bad = {"type": "image", "image": PNG[: len(PNG) // 2]}
    words = {"type": "text", "text": "See "}
    messages: Any = [user(words, bad), *turns(("assistant", "A."), ("user", "?"))]
    with pytest.raises(RequestError, match="message 1: part 2: the PNG image is damaged"):
        seeing.model.generate(messages, max_new_tokens=1)


def test_parts_without_contents_are_none() -> None:
    assert media_of([]) == []
    assert media_of([Content(None, "input[0]"), Content("Hi", "input[1]")]) == []
