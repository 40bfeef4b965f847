"""Fetching of images from hosts on this machine: what is followed, limited and refused."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve import server
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request import fetch as module
from lowbit.runtime.serve.request.contents import Content, media_of
from lowbit.runtime.serve.request.fetch import NOT_FETCHED, Budget, ImageFetcher
from lowbit.runtime.serve.request.hosts import allowed_hosts
from lowbit.runtime.serve.request.parts import MediaPart
from lowbit.runtime.serve.request.places import Asker, Places
from tests.runtime.serve.request.image_host import (
    LEAP_S,
    ImageHost,
    eventually,
    image_host,
    reply,
    run_with_leaps,
)

FILE = b"\x89PNG and so on"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as found:
        yield found


def fetcher(host: ImageHost, *names: str, time_s: float = 10.0) -> ImageFetcher:
    """Addresses of a host that is named by its address, and of others."""
    return ImageFetcher(allowed_hosts([f"127.0.0.1:{host.port}", *names]), time_s)


def fetched(host: ImageHost, path: str, *names: str, **more: Any) -> bytes:
    return asyncio.run(fetcher(host, *names, **more).fetch(host.url(path)))


def refused(host: ImageHost, path: str, words: str, *names: str, **more: Any) -> None:
    with pytest.raises(RequestError, match=words):
        fetched(host, path, *names, **more)


def test_a_file_is_fetched_whatever_its_type_is_called(host: ImageHost) -> None:
    host.replies["/a.png?x=1"] = reply(FILE)
    assert fetched(host, "/a.png?x=1#part") == FILE
    [head] = host.asked
    lines = head.strip().split("\r\n")
    assert lines[0] == "GET /a.png?x=1 HTTP/1.1"
    assert f"Host: 127.0.0.1:{host.port}" in lines
    assert "Accept-Encoding: identity" in lines
    assert not any(line.lower().startswith(("cookie", "authorization")) for line in lines)


@pytest.mark.parametrize(
    "sent",
    [
        reply(FILE, content_length=""),
        reply(b"5\r\n\x89PNG \r\n8\r\nand so on\r\n0\r\n\r\n".replace(b"8\r", b"9\r", 1)).replace(
            b"Content-Length: 29", b"Transfer-Encoding: chunked"
        ),
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + reply(FILE),
        reply(FILE, content_encoding="identity"),
        b"HTTP/1.0 200 OK\r\n\r\n" + FILE,
    ],
    ids=["to the end", "chunked", "after an interim reply", "identity", "1.0"],
)
def test_replies_of_every_form(host: ImageHost, sent: bytes) -> None:
    host.replies["/"] = sent
    assert fetched(host, "/") == FILE


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (reply(FILE, "404 Not Found"), "status 404, expected 200"),
        (reply(FILE, "206 Partial Content"), "status 206"),
        (reply(FILE, "302 Found"), "status 302"),
        (reply(b""), "sent nothing"),
        (reply(FILE)[:-3], "broke off"),
        (b"", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-", "broke off"),
        (b"5\r\n".join([reply(FILE, content_length="", transfer_encoding="chunked")]), "HTTP"),
        (b"220 mail.test ESMTP\r\n", "does not speak HTTP"),
        (reply(FILE, content_encoding="gzip"), "compresses"),
        (b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc", "not speak HTTP"),
        (CHUNKED + b"1\r\na\r\n" * 70_000, "over 65536 pieces"),
        (CHUNKED + b"1\r\na\r\n0\r\n" + b"a:b\r\n" * 70_000, "over 65536 pieces"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 17), "headers of over 65536 bytes"),
        (reply(FILE, content_length="-1"), "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc" + reply(FILE), "more than one|HTTP"),
    ],
)
def test_replies_that_are_no_file(host: ImageHost, sent: bytes, words: str) -> None:
    host.replies["/"] = sent
    refused(host, "/", words)


def test_redirects_are_followed_within_allowed_hosts(host: ImageHost) -> None:
    host.replies["/a"] = reply(b"moved", "301 Moved", location="/b/")
    host.replies["/b/"] = reply(b"moved", "307 Moved", location="c?d")
    host.replies["/b/c?d"] = reply(FILE)
    assert fetched(host, "/a") == FILE
    assert host.paths == ["/a", "/b/", "/b/c?d"]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://127.0.0.1:1/", "may not fetch images from"),
        ("http://169.254.169.254/latest", "may not fetch images from"),
        ("//localhost/x", "may not fetch images from"),
        ("file:///etc/passwd", "must be http or https"),
        ("gopher://127.0.0.1/", "must be http or https"),
        ("http://[::1", "leads to no address"),
        ("http://user@127.0.0.1/", "must be http or https"),
        ("data:image/png;base64,AAAA", "must be http or https"),
    ],
)
def test_redirects_to_elsewhere_are_refused(host: ImageHost, location: str, words: str) -> None:
    host.replies["/a"] = reply(b"", "302 Found", location=location)
    refused(host, "/a", words)
    assert host.paths == ["/a"]


def test_redirects_end(host: ImageHost) -> None:
    host.replies["/a"] = reply(b"", "302 Found", location="/a")
    refused(host, "/a", "leads on over 5 times")
    assert len(host.asked) == 6


def resolved(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    """Names stand for these addresses; the list gets the names that were asked for."""
    asked: list[str] = []

    def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        return list(found)

    monkeypatch.setattr(module, "resolve", resolve)
    return asked


def test_a_name_of_an_inner_address_is_refused(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another of its addresses is public, and where every host may be asked."""
    for found in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.1"], ["fe80::1%eth0"]):
        asked = resolved(monkeypatch, *found)
        for names in (["images.test"], ["*"]):
            one = ImageFetcher(allowed_hosts(names))
            with pytest.raises(RequestError, match="has an address that is not public"):
                asyncio.run(one.fetch("http://images.test/a"))
        assert asked == ["images.test"] * 2
    assert not host.asked


def test_a_name_is_resolved_once(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the address that was checked, whatever the name stands for later."""
    asked = resolved(monkeypatch, "127.0.0.1")
    host.replies["/a"] = reply(FILE)
    names = (f"images.test:{host.port}", "127.0.0.1")
    one = ImageFetcher(allowed_hosts(names))
    assert asyncio.run(one.fetch(host.url("/a", "images.test"))) == FILE
    assert asked == ["images.test"]
    assert f"Host: images.test:{host.port}" in host.asked[0]


def test_other_spellings_of_an_address_are_no_way_around(host: ImageHost) -> None:
    """`localhost`, 127.1 and 2130706433 are names that stand for an inner address."""
    host.replies["/"] = reply(FILE)
    for name in ("localhost", "127.1", "2130706433", "0x7f000001", "0"):
        one = ImageFetcher(allowed_hosts([f"{name}:{host.port}"]))
        with pytest.raises(RequestError, match=r"not public|not known|no host"):
            asyncio.run(one.fetch(host.url("/", name)))
    assert not host.asked


def test_no_literal_is_a_way_around(host: ImageHost) -> None:
    """Every host may be asked but those of this machine and its networks."""
    every = ImageFetcher(allowed_hosts(["*"]))
    for name in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "0.0.0.0", "[::]"):
        with pytest.raises(RequestError, match="not public"):
            asyncio.run(every.fetch(f"http://{name}/"))


def test_unknown_names_and_closed_ports(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    one = ImageFetcher(allowed_hosts([f"127.0.0.1:{port}"]))
    with pytest.raises(RequestError, match="cannot be reached"):
        asyncio.run(one.fetch(f"http://127.0.0.1:{port}/"))

    def unknown(*_: object, **given: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RequestError, match=r'host "images\.test" is not known'):
        asyncio.run(ImageFetcher(allowed_hosts(["*"])).fetch("http://images.test/"))


def test_a_slow_host_is_given_up(host: ImageHost) -> None:
    host.replies["/slow"] = None
    refused(host, "/slow", "took longer than 0.2 s", time_s=0.2)


def test_sizes_are_limited(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", len(FILE))
    host.replies["/a"] = reply(FILE)
    assert fetched(host, "/a") == FILE
    for sent in (reply(FILE + b"."), reply(FILE + b".", content_length="")):
        host.replies["/b"] = sent
        refused(host, "/b", f"over {len(FILE)} bytes")
    whole = len(host.replies["/a"] or b"")
    assert asyncio.run(fetcher(host).fetch(host.url("/a"), Budget(whole))) == FILE
    with pytest.raises(RequestError, match="bytes in all"):
        asyncio.run(fetcher(host).fetch(host.url("/a"), Budget(whole - 1)))


def test_trailers_without_end_are_given_up(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget.__init__, "__defaults__", (50_000,))
    chunked = reply(b"1\r\na\r\n0\r\n", content_length="", transfer_encoding="chunked")
    host.replies["/a"] = chunked + b"".join(b"X-%d: y\r\n" % n for n in range(10_000))
    refused(host, "/a", "bytes in all")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, with its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    path = tmp_path / "both.pem"
    made = [*("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")]
    made += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    done = subprocess.run(
        [openssl, *made, "-keyout", "-", "-out", "-"], capture_output=True, check=True
    )
    path.write_bytes(done.stdout)
    return path


def test_certificates_are_checked(certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate)
    with image_host(server) as host:
        host.replies["/a"] = reply(FILE)
        host.replies["/b"] = reply(b"", "302 Found", location=host.url("/a"))
        url = host.url("/a", scheme="https")
        with pytest.raises(RequestError, match="certificate of the image's host is not trusted"):
            asyncio.run(fetcher(host).fetch(url))
        assert not host.asked
        one = fetcher(host)
        super(ssl.SSLContext, one.tls).load_verify_locations(
            certificate
        )  # the tests' own loads none
        assert asyncio.run(one.fetch(url)) == FILE
        with pytest.raises(RequestError, match="from https to http"):
            asyncio.run(one.fetch(host.url("/b", scheme="https")))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_large_files_come_whole(certificate: Path, loop: str) -> None:
    """The server runs on uvloop, which loses the rest of a paused stream where TLS just breaks."""
    run = asyncio.run if loop == "asyncio" else pytest.importorskip("uvloop").run
    server, file = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), b"x" * 3_000_000
    server.load_cert_chain(certificate)
    for tls, scheme in ((None, "http"), (server, "https")):
        with image_host(tls) as host:
            host.replies["/a"] = reply(file)
            one = fetcher(host)
            super(ssl.SSLContext, one.tls).load_verify_locations(certificate)
            assert run(one.fetch(host.url("/a", scheme=scheme))) == file
            host.replies["/a"] = reply(file, content_length="3000001")
            with pytest.raises(RequestError, match="broke off"):
                run(one.fetch(host.url("/a", scheme=scheme)))


def test_tls_with_a_host_that_has_none(host: ImageHost) -> None:
    with pytest.raises(RequestError, match="cannot be reached, or broke off"):
        asyncio.run(fetcher(host).fetch(host.url("/a", scheme="https")))


def test_a_fetch_holds_up_nothing(host: ImageHost) -> None:
    """The event loop runs on while a host keeps it waiting."""
    host.replies["/slow"] = None

    async def both() -> int:
        turns = 0
        task = asyncio.create_task(fetcher(host).fetch(host.url("/slow")))

        def enough() -> bool:
            nonlocal turns
            turns += 1
            return bool(host.asked) and turns > 5

        await eventually(enough)
        task.cancel()
        await asyncio.wait([task])
        return turns

    assert asyncio.run(both()) >= 5


def test_no_place_is_kept_behind_a_fetch(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.replies |= {"/a": reply(b"", "302 Found", location="/b"), "/b": reply(FILE)}
    host.replies |= {"/slow": None, "/page": reply(FILE, "404 Not Found")}
    one = fetcher(host)

    async def fetch(path: str) -> bytes | RequestError:
        try:
            return await one.fetch(host.url(path))
        except RequestError as error:
            return error

    assert asyncio.run(fetch("/a")) == FILE
    for path in ("/slow", "/page"):
        assert isinstance(run_with_leaps(host, fetch(path)), RequestError)
    assert not one.places._hosts
    assert not one.places._clients


def test_a_wait_for_a_place_is_no_time_of_the_host(host: ImageHost) -> None:
    host.replies |= {"/a": reply(b"", "302 Found", location="/b"), "/b": reply(FILE)}
    passed = [0.0]

    class Slow(Places):
        async def take(self, asker: Asker, host: str = "") -> None:
            await super().take(asker, host)
            passed[0] += 100.0

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + passed[0]  # type: ignore[method-assign]
        names = allowed_hosts([f"127.0.0.1:{host.port}"])
        return await ImageFetcher(names, 5.0, places=Slow()).fetch(host.url("/a"))

    assert asyncio.run(run()) == FILE


def test_a_name_that_is_looked_up_for_ever_keeps_its_place_alone(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can end the system's thread: it counts until then, and nobody waits for it."""
    may, before = threading.Event(), set(threading.enumerate())
    host.replies["/a"] = reply(FILE)

    def resolve(name: str, port: int) -> list[str]:
        if name != "127.0.0.1":
            assert may.wait(30)
        return ["127.0.0.1"]

    def ended() -> bool:
        """As a server sees it that has these threads alone."""
        waiting = [each for each in threading.enumerate() if each not in before]
        assert waiting
        with monkeypatch.context() as patched:
            patched.setattr(threading, "enumerate", lambda: waiting)
            return server.end_threads()

    monkeypatch.setattr(module, "resolve", resolve)
    hasty = fetcher(host, f"slow.test:{host.port}", time_s=0.1)
    one = ImageFetcher(hasty.allowed, places=hasty.places)

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"longer than 0\.1 s"):
                await hasty.fetch(host.url("/a", "slow.test"))
        assert one.places._hosts == {"slow.test": 2}
        assert ended()  # which waits for no look-up
        assert await one.fetch(host.url("/a")) == FILE
        may.set()
        await eventually(lambda: not one.places._hosts)

    asyncio.run(run())


@pytest.fixture
def other() -> Iterator[ImageHost]:
    with image_host(address="127.0.0.2") as found:
        yield found


def parts_of(*urls: str, number: int = 0) -> list[Content]:
    parts = [MediaPart.model_validate({"type": "image_url", "image_url": each}) for each in urls]
    return [Content(parts, f"messages[{number}].content")]


def fetched_parts(contents: list[Content]) -> list[object]:
    return [each.part.fetched for each in media_of(contents)]


def test_slow_hosts_leave_places_to_others(host: ImageHost, other: ImageHost) -> None:
    """One client asks a host that trickles for more than all places; others go on."""
    host.replies["/slow"] = None
    other.replies["/a"] = reply(FILE)
    names = (f"127.0.0.1:{host.port}", f"127.0.0.2:{other.port}")
    one = ImageFetcher(allowed_hosts(names), 30.0, 30.0, Places(most=6, of_client=4, of_host=2))
    slow = [f"{host.url('/slow')}?{number}" for number in range(9)]
    host.replies |= {f"/slow?{number}": None for number in range(9)}

    async def run() -> None:
        held = [asyncio.create_task(one.fetch_all(parts_of(*slow), "bad")) for _ in range(3)]
        await eventually(lambda: len(host.asked) >= 2)
        for client in ("good", "bad"):  # the same client, too, at another host
            contents = parts_of(other.url("/a"))
            await one.fetch_all(contents, client)
            assert fetched_parts(contents) == [FILE]
        assert len(host.asked) == 2
        for each in held:
            each.cancel()
        await asyncio.wait(held)
        assert not one.places._waiting
        assert not one.places._hosts

    asyncio.run(run())


def test_the_images_of_a_request_have_a_limit_of_time_in_all(host: ImageHost) -> None:
    """Also those that have not had a place."""
    host.replies |= {"/a": reply(FILE), "/slow": None}
    contents = parts_of(host.url("/a"), host.url("/slow"), host.url("/slow?2"))
    one = ImageFetcher(fetcher(host).allowed, 2 * LEAP_S, LEAP_S / 2, Places(most=1))

    async def run() -> None:
        with pytest.raises(ApiError, match="longer than 10 s in all") as e:
            await one.fetch_all(contents, "one")
        assert e.value.param == "messages[0].content[1]"
        await eventually(lambda: not one.places._hosts)

    run_with_leaps(host, run())
    assert fetched_parts(contents) == [FILE, None, None]


def test_old_images_leave_time_and_bytes_to_new_ones(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are fetched first; old ones that are too late or too much are missing."""
    host.replies |= {"/slow": None, "/a": reply(FILE), "/b": reply(FILE), "/old": reply(FILE)}
    allowed = allowed_hosts([f"127.0.0.1:{host.port}"])
    new = parts_of(host.url("/a"), host.url("/b"), number=2)

    async def run(one: ImageFetcher, *old: str) -> list[object]:
        contents = [*parts_of(*map(host.url, old)), *new]
        await one.fetch_all(contents, "one")
        await eventually(lambda: not one.places._hosts)
        return fetched_parts(contents)

    first, *rest = run_with_leaps(host, run(ImageFetcher(allowed, 30.0, LEAP_S / 2), "/slow"))
    assert str(first) == NOT_FETCHED
    assert rest == [FILE, FILE]
    monkeypatch.setattr(Budget.__init__, "__defaults__", (2 * len(reply(FILE)) + 5,))
    monkeypatch.setattr(module, "TOGETHER", 1)
    host.asked.clear()
    *old, _, _ = asyncio.run(run(ImageFetcher(allowed, 30.0, 30.0), *["/old"] * 2, "/old?2", "/a"))
    assert [str(each) for each in old[:3]] == [NOT_FETCHED] * 3
    assert old[3] == FILE  # a new one has the same address
    assert host.paths == ["/a", "/b", "/old?2"]  # nobody is asked once the bytes are used up


def test_later_turns_do_not_wait_for_a_host_that_was_slow(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take as long each, although the answer needs no image of an earlier turn."""
    host.replies["/slow"] = None
    one = fetcher(host)
    later = parts_of(number=1)

    async def run() -> None:
        for _ in range(3):
            contents = [*parts_of(host.url("/slow")), *later]
            await one.fetch_all(contents)
            assert [str(each) for each in fetched_parts(contents)] == [NOT_FETCHED]
        assert host.paths == ["/slow"]
        with pytest.raises(ApiError, match="took longer"):
            await one.fetch_all(parts_of(host.url("/slow")))  # that of the newest turn is needed
        monkeypatch.setattr(module, "SLOW_S", -1.0)
        with pytest.raises(ApiError, match="took longer"):
            await one.fetch_all(parts_of(host.url("/slow")))
        host.replies["/slow"] = reply(FILE)
        await one.fetch_all(contents := [*parts_of(host.url("/slow")), *later])
        assert fetched_parts(contents) == [FILE]

    run_with_leaps(host, run())
