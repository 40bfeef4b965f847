"""Bodies as clients send them: slow, or packed."""

import asyncio
import gzip
import json
import random
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request import body_bytes
from lowbit.runtime.serve.request.body_bytes import packing_of, unpacked
from lowbit.runtime.serve.service import PendingBodies
from lowbit.runtime.serve.settings import MOST_BODY_BYTES, SHORT_BODY_BYTES
from tests.runtime.serve.conftest import NAME, Running

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize")
MOST = 1 << 20


def test_a_body_that_comes_byte_by_byte_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_bytes, "BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(body_bytes, "LEAST_BODY_RATE", 1 << 30)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = HttpRequest({"type": "http", "headers": []}, receive)
    with pytest.raises(ApiError, match="does not come") as error:
        asyncio.run(body_bytes.read_parts(request, PendingBodies(1), 1 << 20))
    assert error.value.status == 408


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


WAYS: list[tuple[str, Any]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZip", gzip.compress),
    ("identity, gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("identity", bytes),
    ("", bytes),
]


@pytest.mark.parametrize(  # each packing with one path, each path with two packings
    ("path", "name", "pack"),
    [(PATHS[at % len(PATHS)], *way) for at, way in enumerate(WAYS)],
)
def test_a_packed_body_has_the_answer_of_the_plain_one(
    server: Running, path: str, name: str, pack: Any
) -> None:
    for padding in (0, SHORT_BODY_BYTES, 1 << 20):
        fields: dict[str, Any] = {"model": NAME}
        if path in ("/v1/completions", "/tokenize"):
            fields["prompt"] = "Once upon a time"
        else:
            fields["messages"] = [{"role": "user", "content": "Hi"}]
        if path != "/tokenize":
            fields |= {"max_tokens": 3, "temperature": 0}
        raw = json.dumps(fields).encode() + b" " * padding
        plain = httpx2.post(server.url + path, content=raw)
        found = httpx2.post(
            server.url + path, content=pack(raw), headers={"content-encoding": name}
        )
        assert (plain.status_code, found.status_code) == (200, 200), found.text
        changing = {"id": "", "created": 0, "usage": None}
        assert found.json() | changing == plain.json() | changing


@pytest.mark.parametrize("path", PATHS)
def test_other_ways_are_refused_by_name(server: Running, path: str) -> None:
    for name in ("br", "zstd", "compress", "gzip, gzip", "deflate,br", "x" * 999):
        found = httpx2.post(server.url + path, content=b"{}", headers={"content-encoding": name})
        assert found.status_code == 415
        assert found.headers["accept-encoding"] == "gzip, deflate"
        error = found.json()["error"]
        assert name.split(",")[-1].strip()[:200] in error["message"]
        assert len(found.text) < 500
        assert error["type"] == "invalid_request_error"


def test_a_bomb_is_refused_before_it_takes_memory(server: Running) -> None:
    size = 64 * MOST
    for packing, bomb in (
        ("gzip", gzip.compress(bytes(size))),
        ("deflate", raw_deflate(bytes(size))),
    ):
        assert len(bomb) < size // 900
        tracemalloc.start()
        try:
            with pytest.raises(ApiError) as error:
                unpacked([bomb], packing, MOST)  # type: ignore[arg-type]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert error.value.status == 413
        assert peak < 4 * MOST
    bomb = gzip.compress(b"{" + b" " * MOST_BODY_BYTES)
    found = httpx2.post(server.url + PATHS[0], content=bomb, headers={"content-encoding": "gzip"})
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")


def test_the_limit_is_exact() -> None:
    for size in (0, 1, 65535, 65536, 65537, MOST - 1, MOST):
        data = random.Random(size).randbytes(size)
        packed = gzip.compress(data)
        assert unpacked([packed], "gzip", size) == data
        assert unpacked([packed[:1], b"", packed[1:]], "gzip", MOST) == data
        assert (
            unpacked([b"", *(bytes([each]) for each in zlib.compress(data[:99]))], "deflate", 99)
            == data[:99]
        )
        if size:
            with pytest.raises(ApiError, match="more than"):
                unpacked([packed], "gzip", size - 1)


def test_gzip_may_follow_gzip() -> None:
    """As pigz and logs have it; of very many the time is limited."""
    packed = gzip.compress(b"{}")
    assert unpacked([packed * 3], "gzip", MOST) == b"{}" * 3
    assert unpacked([packed, packed], "gzip", MOST) == b"{}" * 2
    assert unpacked([packed * body_bytes.MOST_STREAMS], "gzip", MOST)
    with pytest.raises(ApiError, match="more follows its end") as error:
        unpacked([packed * (body_bytes.MOST_STREAMS + 1)], "gzip", MOST)
    assert error.value.status == 400


def test_zeros_pad_gzip() -> None:
    """As tools that write whole blocks have it, and Python's module takes it."""
    packed = gzip.compress(b"{}")
    for count in (1, 511, 65535, 200_000):
        zeros = bytes(count)
        for data in (packed + zeros, packed + zeros + packed, packed * 2 + zeros):
            for cut in (0, len(packed), len(data) - 1):
                assert unpacked([data[:cut], data[cut:]], "gzip", MOST) == gzip.decompress(data)
        for garbage in (b"\1", b"{}", packed[:9]):
            with pytest.raises(ApiError, match="not valid gzip"):
                unpacked([packed + zeros + garbage], "gzip", MOST)
    for pack in (zlib.compress, raw_deflate):
        with pytest.raises(ApiError, match="more follows its end"):
            unpacked([pack(b"{}") + b"\0"], "deflate", MOST)


def test_damaged_bodies_are_refused() -> None:
    packed = gzip.compress(b"a long enough text " * 9)
    odd = [
        *(packed[:cut] for cut in range(len(packed))),
        packed[:-8] + bytes(8),  # another checksum
        packed + b"x",
        b"{}",
        packed[2:],
    ]
    for each in odd:
        with pytest.raises(ApiError, match="not valid gzip") as error:
            unpacked([each], "gzip", MOST)
        assert error.value.status == 400
    deflated = zlib.compress(b"{}")
    # the second asks for a dictionary
    for each in (deflated + b"x", b"\x78\xbb\x00\x00\x00\x01", b"", b"\xff" * 9, deflated[:-1]):
        with pytest.raises(ApiError, match="not valid deflate"):
            unpacked([each], "deflate", MOST)


def test_any_bytes_are_unpacked_or_refused() -> None:
    draw = random.Random(7)
    for _ in range(2000):
        packed = bytearray(gzip.compress(draw.randbytes(draw.randrange(40))))
        for _ in range(draw.randrange(3)):
            packed[draw.randrange(len(packed))] = draw.randrange(256)
        with suppress(ApiError):
            assert len(unpacked([bytes(packed)], "gzip", 64)) <= 64


def test_several_headers_are_one_list() -> None:
    def named(*values: str) -> Headers:
        return Headers(raw=[(b"content-encoding", each.encode()) for each in values])

    assert packing_of(named()) is None
    assert packing_of(named("identity", " GZIP ")) == "gzip"
    with pytest.raises(ApiError, match="gzip, deflate`"):
        packing_of(named("gzip", "deflate"))
