"""The oldest messages of a conversation go where all are more than the context holds."""

import json
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import TooLongError
from lowbit.formats.text.job_queue import JobQueue
from lowbit.formats.text.worker import blocking
from lowbit.runtime.engine.image_input import EncodedPrompt
from lowbit.runtime.serve.request.truncation import shortened
from lowbit.runtime.serve.service import THREADS
from tests.runtime.serve.conftest import (
    LEFT_OUT,
    NAME,
    Running,
    post,
    prompt_of,
    raw_request,
    until,
)
from tests.runtime.serve.sdks import openai_client

PATH = "/v1/responses"
Turns = Sequence[Mapping[str, Any]]


class Encoder:
    """A token for four characters of a message's content."""

    runs = 0

    async def __call__(self, messages: Turns) -> EncodedPrompt:
        self.runs += 1
        ids = [7 for each in messages for _ in range(len(each["content"]) // 4)]
        if len(ids) > 10_000:
            raise TooLongError("much too long")
        return EncodedPrompt(ids)


def kept(messages: Turns, context: int, answer: int | None = 1) -> list[Any]:
    """Names of the messages that stay, which are those that the last fitting prompt has."""
    encoder, seen = Encoder(), {}

    async def noting(some: Turns) -> EncodedPrompt:
        found = await encoder(some)
        seen[id(found)] = [each["name"] for each in some]
        return found

    found, gone = blocking(shortened)(noting, messages, context, answer)
    names: list[Any] = seen[id(found)]
    assert len(names) + gone == len(messages)
    assert encoder.runs < 16
    return names


def said(role: str, name: object, size: int = 100, **fields: Any) -> dict[str, Any]:
    return {"role": role, "name": name, "content": "text" * size, **fields}


def called(name: object, *ids: str, size: int = 100) -> dict[str, Any]:
    function = {"name": "f", "arguments": {}}
    calls = [{"id": id, "type": "function", "function": function} for id in ids]
    return said("assistant", name, size, tool_calls=calls)


def result(name: object, id: str, size: int = 100) -> dict[str, Any]:
    return said("tool", name, size, tool_call_id=id)


def test_all_stay_where_they_and_an_answer_fit() -> None:
    messages = [said("user", number) for number in range(5)]
    for answer, context in ((1, 501), (100, 600), (9999, 667), (None, 572)):
        assert kept(messages, context, answer) == [0, 1, 2, 3, 4]
        assert len(kept(messages, context - 2, answer)) < 5


def test_the_oldest_go_first_and_leave_room_for_the_answer() -> None:
    messages = [said("user", number) for number in range(20)]
    for answer, room in ((None, 800 - 100), (50, 750), (9999, 600)):
        names = kept(messages, 800, answer)
        assert names == list(range(20))[-len(names) :]
        assert len(names) <= room / 100
        assert len(names) > 1


def test_instructions_and_the_newest_words_stay() -> None:
    messages = [
        *(said("system", "a"), said("user", 0), said("system", "b"), said("user", "task")),
        *(said("assistant", number) for number in range(20)),
    ]
    names = kept(messages, 800)
    assert names[:3] == ["a", "b", "task"]
    assert names[3:] == list(range(20))[-len(names) + 3 :]
    assert len(names) > 4


def test_calls_go_with_their_results() -> None:
    messages = [said("user", "task")]
    for number in range(9):
        ids = [f"{number}a", f"{number}b"]
        messages.append(called((number, "call"), *ids))
        messages += [result((number, id), id) for id in ids]
    names = kept(messages, 1300)
    rest = names[1:]
    first = rest[0][0]
    assert rest == [
        (number, part)
        for number in range(first, 9)
        for part in ("call", f"{number}a", f"{number}b")
    ]
    # the newest result keeps its call, however long both are
    last = [said("user", 0), called("call", "z", size=300), result("result", "z", 300)]
    assert kept([said("user", number) for number in range(9)] + last, 800)[-2:] == [
        "call",
        "result",
    ]
    # a result that comes late belongs to the same call
    late = [
        *(said("user", 0), called("call", "z"), said("user", 1), result("late", "z")),
        *(said("user", number) for number in range(2, 9)),
    ]
    for context in range(200, 1100, 50):
        names = kept(late, context)
        assert ("call" in names) == ("late" in names)


def test_the_next_turns_mostly_begin_alike() -> None:
    """So that they find their beginning in the cache."""
    messages = [said("user", number, 50) for number in range(40)]
    firsts = []
    for number in range(40, 140):
        messages.append(said("user", number, 50))
        firsts.append(kept(messages, 1000, 1)[0])
    assert firsts == sorted(firsts)
    assert len(set(firsts)) < 35  # one for each stretch of 1000 bytes, of which four turns are one


def test_what_has_to_stay_must_fit() -> None:
    for messages in (
        [said("user", 0), said("user", 1, 2000)],
        [said("system", 0, 2000), said("user", 1)],
        [said("user", 0, 600), said("assistant", 1, 600)],
        [said("user", 0), said("user", 1, 20_000)],
        [said("assistant", 0, 2000)],
    ):
        with pytest.raises(TooLongError, match="too long without all"):
            kept(messages, 1000)
    # without the usual room for an answer, if need be
    assert kept([said("user", 0), said("user", 1, 990)], 1000, 500) == [1]


def test_any_conversation_is_cut_to_a_fitting_one_that_keeps_its_rules() -> None:
    draw = random.Random(5)
    for _ in range(300):
        messages: list[dict[str, Any]] = []
        ids: list[str] = []
        for number in range(draw.randrange(1, 30)):
            role = draw.choice(["user", "user", "assistant", "system", "tool", "call"])
            size = draw.choice([0, 10, 100, 400])
            if role == "call":
                ids.append(draw.choice(["", f"{number}", "same"]))
                messages.append(called(number, ids[-1], size=size))
            elif role == "tool":
                id = draw.choice([*ids, "unknown"])
                messages.append(result(number, id, size))
            else:
                messages.append(said(role, number, size))
        try:
            names = kept(messages, 1000, draw.choice([None, 10]))
        except TooLongError:
            continue
        assert sum(len(messages[name]["content"]) for name in names) <= 4000
        assert names == sorted(names)
        assert names[-1] == len(messages) - 1
        system = [n for n, each in enumerate(messages) if each["role"] == "system"]
        assert set(system) <= set(names)


WORDS = "The cat ran to the dog and the dog ran to the cat. "


def items(count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "developer", "content": "Be kind."}]
    for number in range(count):
        found.append({"role": "user", "content": f"Story {number}: {WORDS * 4}"})
        arguments = json.dumps({"number": number})
        call = {"type": "function_call", "call_id": f"c{number}", "name": "look"}
        found.append({**call, "arguments": arguments})
        output = {"type": "function_call_output", "call_id": f"c{number}"}
        found.append({**output, "output": f"Seen {number}."})
        found.append({"role": "assistant", "content": f"End {number}."})
    return [*found, {"role": "user", "content": "The last question"}]


def test_a_long_session_is_answered(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"instructions": "Obey.", "input": items(60)}
    refused = post(agents, PATH, **fields)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    prompt, found = prompt_of(agents, caplog, PATH, truncation="auto", **fields)
    assert found.json()["truncation"] == "auto"
    name, words = found.headers[LEFT_OUT].split(", ")[-1].split(" ", 1)
    assert words == "oldest messages"
    assert "Obey." in prompt
    assert "Be kind." in prompt
    assert prompt.count("The last question") == 1
    assert "Story 0:" not in prompt
    assert "Story 59:" in prompt
    for number in range(60):
        call = f"<parameter=number>\n{number}\n</parameter>" in prompt
        assert call == (f"Seen {number}." in prompt)
    gone = [60 - prompt.count(word) for word in ("Story ", "Seen ", "Seen ", "End ")]
    assert int(name) == sum(gone)
    usage = found.json()["usage"]["input_tokens"]
    context = agents.service.model.context
    assert context // 2 < usage <= context
    fields |= {"model": NAME, "truncation": "auto", "max_output_tokens": 4}
    counted = httpx2.post(f"{agents.url}{PATH}/input_tokens", json=fields).json()
    assert counted["input_tokens"] == usage


def test_what_messages_that_go_would_leave_out_is_not_named(agents: Running) -> None:
    long = [{"role": "user", "content": WORDS * 400}]
    late = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert post(agents, PATH, input=[*late, *late]).headers[LEFT_OUT] == "place of system messages"
    found = post(agents, PATH, input=[*long, *late], truncation="auto")
    assert found.headers[LEFT_OUT] == "1 oldest messages"


def test_a_prompt_carries_the_names_of_what_it_leaves_out(agents: Running) -> None:
    encode = agents.model.prompts.encode_prompt
    late = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}]
    assert encode([*late, late[0]]).left_out == ("place of system messages",)
    assert encode([*late[::-1], late[0]]).left_out == encode("Hi").left_out == ()


def test_short_ones_are_left_alone(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    usual, _ = prompt_of(agents, caplog, PATH, input=items(2))
    for truncation in ("auto", "disabled", None):
        prompt, found = prompt_of(agents, caplog, PATH, input=items(2), truncation=truncation)
        assert prompt == usual
        assert "oldest" not in found.headers.get(LEFT_OUT, "")
        assert found.json()["truncation"] == (truncation or "disabled")
    assert post(agents, PATH, input="Hi", truncation="middle").status_code == 400


def test_the_client_gets_an_error_where_the_newest_message_is_too_long(agents: Running) -> None:
    from openai import BadRequestError

    with openai_client(agents) as client:
        for given in ("x " * 9000, [{"role": "user", "content": "Hi"}] * 3 + items(0)[-1:]):
            fields: dict[str, Any] = {"model": NAME, "input": given, "truncation": "auto"}
            if isinstance(given, list):
                fields["instructions"] = WORDS * 900
            with pytest.raises(BadRequestError, match="too long without all") as error:
                client.responses.create(**fields)
            assert error.value.code == "context_length_exceeded"


def test_clients_that_leave_hold_up_nobody(
    agents: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try under way is the last of its request, and no request begins behind it."""
    asked, may, real = threading.Semaphore(0), threading.Event(), JobQueue.ask_from_thread
    jobs: list[Mapping[str, Any]] = []

    async def slow(queue: JobQueue, job: Mapping[str, Any]) -> Any:
        jobs.append(job)
        asked.release()
        assert may.wait(60)
        return await real(queue, job)

    monkeypatch.setattr(JobQueue, "ask_from_thread", slow)
    body = {"model": NAME, "input": items(60), "truncation": "auto"}
    leaving = [raw_request(agents, body, PATH) for _ in range(THREADS + 3)]
    try:
        for _ in range(THREADS):
            assert asked.acquire(timeout=60)
        until(lambda: agents.service.active == len(leaving))
        for each in leaving:
            each.close()
        until(lambda: agents.service.active == 0)
    finally:
        may.set()
    assert post(agents, PATH, input=items(10)).status_code == 200
    assert len(jobs) == THREADS + 1
