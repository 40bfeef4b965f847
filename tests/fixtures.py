"""Fixtures of all tests: `conftest.py` has them read by processes that run tests."""

import hashlib
import os
import ssl
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lowbit.formats.layout import rtn
from lowbit.formats.text import tokenizer
from lowbit.formats.text.job_queue import JobQueue
from lowbit.formats.text.template import ChatTemplate
from lowbit.formats.text.tokenizer import TextTokenizer
from tests.hub_server import HubServer
from tests.known_scales import Scales
from tests.short_models import SHORT_VOCABULARY, Shorten, shortened

SEARCH_SCALES = rtn.search_scales
LONG = 20_000  # characters that it takes some time to encode


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def _states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names for folders; pytest would look through all its folders to number each."""
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def _state(_states: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands remember folders in a place of the test's own, not in the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(_states)))


@pytest.fixture(scope="session", autouse=True)
def _no_process_ahead() -> Iterator[None]:
    """A template's process starts with the first rendering; most models are loaded without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "prepare", lambda template: None)
        patch.setattr(JobQueue, "prepare", lambda queue, job: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """No test cuts the power: what is written is read back from memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_certificates() -> Iterator[None]:
    """No test speaks TLS, and every client of HTTP would read them all, 40 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _scales_once() -> Iterator[None]:
    """The same weights have the same scales, which hundreds of tests would search for again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtn, "search_scales", Scales().of)
        yield


@pytest.fixture
def scales_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are searched for each time, where a test looks at what that depends on."""
    monkeypatch.setattr(rtn, "search_scales", SEARCH_SCALES)


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_once() -> Iterator[None]:
    """The library reads the same content once: the tokenizer it makes is never changed."""
    parse, known = tokenizer._parse, dict[bytes, Tokenizer]()

    def parsed(data: bytes, path: Path) -> Tokenizer:
        key = hashlib.sha256(data).digest()
        if key not in known:
            known[key] = parse(data, path)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_parse", parsed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _texts_once() -> Iterator[None]:
    """A tokenizer encodes a long text once, as the bundled ones, which every plan counts anew."""
    encode, known = TextTokenizer._encode, dict[tuple[object, ...], list[list[int]]]()

    def encoded(
        self: TextTokenizer, texts: list[str], framed: bool, mark: str = ""
    ) -> list[list[int]]:
        if self.worker is not None or sum(map(len, texts)) < LONG:
            return encode(self, texts, framed, mark)
        key = self.hub, tuple(texts), framed, mark  # that hub is `_tokenizers_once`'s
        if key not in known:
            known[key] = encode(self, texts, framed, mark)
        return [list(ids) for ids in known[key]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTokenizer, "_encode", encoded)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shorten(tmp_path_factory: pytest.TempPathFactory) -> Shorten:
    """`shorten(name, tokens)` is the folder of a bundled model with two layers and 1,024 tokens."""
    folder = tmp_path_factory.mktemp("short")

    @cache
    def short(name: str, tokens: int = SHORT_VOCABULARY) -> Path:
        return shortened(name, folder / str(tokens) / name, tokens)

    return short


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A loopback model hub which huggingface_hub talks to, with an empty cache and no token."""
    from huggingface_hub import close_session, constants

    server = HubServer(tmp_path / "hub-objects")
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # a transport that the loopback hub does not speak
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # it holds the proxies of its time
    yield server
    close_session()
    server.stop()
