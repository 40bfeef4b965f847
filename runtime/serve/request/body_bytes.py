"""The bytes of a body: read within limits of time and size, and unpacked within the same size."""

import time
import zlib
from collections.abc import Sequence
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from lowbit.runtime.serve.errors import ApiError, ClientLeftError, cut, invalid, shutting_down
from lowbit.runtime.serve.protocol import has_whole_body
from lowbit.runtime.serve.request.explain import FEWER
from lowbit.runtime.serve.service import PendingBodies
from lowbit.runtime.serve.settings import BODY_TIMEOUT_S, LEAST_BODY_RATE

Packing = Literal["gzip", "deflate"]
PACKINGS: dict[str, Packing] = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
HEADER = "content-encoding"
GZIP, ZLIB, RAW = 31, 15, -15  # `wbits` of zlib
STEP_BYTES = 64 << 10  # unpacked at once
MOST_STREAMS = 1024  # in one body; each costs some microseconds, however short it is


def packing_of(headers: Headers) -> Packing | None:
    """The way in which the body of a request is packed; None if it is not.

    Raises:
        ApiError: 415 for a way that is not known, or several at once.
    """
    named = ",".join(headers.getlist(HEADER)).lower().split(",")
    found = [name for each in named if (name := each.strip()) not in ("", "identity")]
    if not found:
        return None
    if len(found) > 1 or found[0] not in PACKINGS:
        raise ApiError(
            415,
            f"`{HEADER}` must be gzip, deflate or identity, got `{cut(', '.join(found))}`",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "gzip, deflate", "Connection": "close"},
        )
    return PACKINGS[found[0]]


def unpacked(parts: Sequence[bytes], packing: Packing, most: int) -> bytes:
    """A body from its packed parts, of which no more than `most` bytes are ever unpacked.

    Raises:
        ApiError: 413 for a longer one, 400 for one that is damaged or cut.
    """
    first = b"".join(part[:2] for part in parts)[:2]
    bits = GZIP if packing == "gzip" else ZLIB if _begins_zlib(first) else RAW
    stream, streams = zlib.decompressobj(bits), 1
    found = bytearray()
    try:
        for part in parts:
            for place in range(0, len(part), STEP_BYTES):
                left = part[place : place + STEP_BYTES]
                while left:
                    if stream.eof:  # gzip may follow gzip, zeros between and behind them
                        left = left.lstrip(b"\0") if bits == GZIP else left
                        if not left:
                            break
                        stream, streams = zlib.decompressobj(bits), streams + 1
                        if bits != GZIP or streams > MOST_STREAMS:
                            raise zlib.error("more follows its end")
                    found += stream.decompress(left, most - len(found) + 1)
                    if len(found) > most:
                        raise too_large(most)
                    left = stream.unused_data
    except zlib.error as error:
        raise invalid(f"the body is not valid {packing}: {error}") from None
    if not stream.eof:
        raise invalid(f"the body is not valid {packing}: it is cut")
    return bytes(found)


def _begins_zlib(first: bytes) -> bool:
    """True for the header that deflate has by its standard; some clients leave it out."""
    return len(first) == 2 and first[0] & 15 == zlib.DEFLATED and int.from_bytes(first) % 31 == 0


async def read_parts(http: HttpRequest, pending: PendingBodies, most: int) -> list[bytes]:
    """The parts of the whole body; limits hold while it is read, whatever the headers say.

    Raises:
        ApiError: it is too long or too slow.
        ClientLeftError: the client left before its end.
    """
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large(most)
    if has_whole_body(http.receive):
        message = await http.receive()  # which does not wait
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        body: bytes = message["body"]
        if len(body) > most:
            raise too_large(most)
        return [body]
    parts: list[bytes] = []
    size, more, began = 0, True, time.perf_counter()
    while more:
        left = BODY_TIMEOUT_S + size / LEAST_BODY_RATE - (time.perf_counter() - began)
        try:
            async with pending.wait(min(left, BODY_TIMEOUT_S)):
                message = await http.receive()
        except TimeoutError:
            raise (shutting_down() if pending.closed else _too_slow()) from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        if size > most:
            raise too_large(most)
        parts.append(part)
    return parts


def _too_slow() -> ApiError:
    return ApiError(408, "the body of the request does not come", headers={"Connection": "close"})


def too_large(most: int) -> ApiError:
    """The error 413 for a body."""
    return ApiError(
        413,
        f"the body has more than {most} bytes; {FEWER}",
        code="request_too_large",
        headers={"Connection": "close"},
    )
