"""/v1/completions, /tokenize and /detokenize."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.runtime.serve.conftest import NAME, Running
from tests.runtime.serve.sdks import openai_client

TEXTS = ("Once upon a time, there was a little girl named Lily.", " She loved to play outside")


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai_client(server) as found:
        yield found


def complete(client: Any, prompt: Any, **changes: Any) -> Any:
    fields = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12, **changes}
    return client.completions.create(**fields)


def test_text_and_ids_continue_alike(server: Running, client: Any) -> None:
    model = server.model
    sampling = replace(model.defaults, temperature=0.0)
    alone = [
        model.generate(text, raw=True, sampling=sampling, max_new_tokens=12).text for text in TEXTS
    ]
    ids = [model.encode(text, raw=True) for text in TEXTS]
    assert complete(client, TEXTS[0]).choices[0].text == alone[0]
    assert complete(client, ids[0]).choices[0].text == alone[0]
    both = complete(client, list(TEXTS), n=2)
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in complete(client, ids).choices] == alone
    streamed = ["", ""]
    for chunk in complete(client, ids, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_echo_scores_the_prompt(server: Running, client: Any) -> None:
    ids = server.model.encode(TEXTS[0], raw=True)
    scores = server.model.score(ids, 2)
    found = complete(client, ids, echo=True, logprobs=2, max_tokens=1).choices[0]
    assert found.text.startswith(TEXTS[0])
    assert "".join(found.logprobs.tokens) == found.text
    assert found.logprobs.token_logprobs[:-1] == [s.chosen if s else None for s in scores]
    assert found.logprobs.text_offset[1] == len(found.logprobs.tokens[0])
    only = complete(client, ids, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert only.text == TEXTS[0]
    assert only.logprobs.token_logprobs == found.logprobs.token_logprobs[:-1]


@pytest.mark.parametrize("most", [0, 5])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_streamed_echo_sends_the_prompt_first(
    server: Running, client: Any, most: int, logprobs: int | None
) -> None:
    ids = [server.model.encode(text, raw=True) for text in TEXTS]
    fields: dict[str, Any] = {"echo": True, "logprobs": logprobs, "max_tokens": most, "n": 2}
    whole = complete(client, ids, **fields).choices
    chunks = [chunk.choices[0] for chunk in complete(client, ids, stream=True, **fields)]
    for index, choice in enumerate(whole):
        parts = [chunk for chunk in chunks if chunk.index == index]
        assert parts[0].text == TEXTS[index // 2]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        if logprobs is None:
            assert not any(part.logprobs for part in parts)
            continue
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = [
                value for part in parts if part.logprobs for value in getattr(part.logprobs, name)
            ]
            assert told == getattr(choice.logprobs, name)


def test_tokens_and_back(server: Running) -> None:
    with httpx2.Client(base_url=server.url) as client:
        found = client.post("/tokenize", json={"prompt": TEXTS[0]}).json()
        assert found["tokens"] == server.model.encode(TEXTS[0], raw=True)
        assert found["count"] == len(found["tokens"])
        back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
        assert back == {"prompt": TEXTS[0]}
        turns = [{"role": "user", "content": "Hi"}]
        chat = client.post("/tokenize", json={"messages": turns, "return_token_strs": True}).json()
        assert chat["tokens"] == server.model.encode("Hi")
        assert chat["token_strs"][0] == "<|im_start|>"
        assert "chat_template" in client.get("/tokenizer_info").json()
        assert client.post("/detokenize", json={"tokens": [2**63]}).status_code == 400
