"""`data:` URLs as clients write them, and as they break them."""

import base64
import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import RequestError
from lowbit.runtime.images import data_url as module
from lowbit.runtime.images.data_url import bytes_of_base64, bytes_of_data_url

CONTENT = bytes(range(256)) + b"\xfb\xff\xfe?"
TEXT = base64.b64encode(CONTENT).decode()  # has +, / and padding


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"  data:image/png;base64,{TEXT}\n",
        f"DATA:image/png;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        f"data:image/png;name=a.png;base64,{TEXT}",
        f"data:image/png; base64 , {TEXT}",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        "data:image/png;base64," + "\\r\\n".join(TEXT[i : i + 76] for i in range(0, 999, 76)),
        "data:image/png;base64," + TEXT.rstrip("="),
        f"data:image/png;base64,{TEXT}==",
        "data:image/png;base64," + TEXT.replace("+", "-").replace("/", "_"),
        "data:image/png;base64," + TEXT.replace("+", "%2B").replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in CONTENT),
    ],
)
def test_every_way_to_write_it_gives_the_bytes(url: str) -> None:
    assert TEXT.count("=") == 1
    assert bytes_of_data_url(url) == CONTENT


@given(st.binary(min_size=1, max_size=99))
def test_base64_of_any_bytes(content: bytes) -> None:
    assert bytes_of_base64(base64.b64encode(content).decode()) == content
    assert bytes_of_base64(base64.urlsafe_b64encode(content).decode().rstrip("=")) == content


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "must begin with `data:`"),
        ("file:///etc/passwd", "must begin with `data:`"),
        ("", "must begin with `data:`"),
        (TEXT, "must begin with `data:`"),
        ("data:image/png;base64", "no comma"),
        ("data:" + "x" * 10_000 + ",", "no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64, ==", "is empty"),
        ("data:,", "is empty"),
        ("data:image/png;base64,QUJD!UJD", 'has "!", which base64 lacks, at character 5'),
        ("data:image/png;base64,QU\\tJD", "which base64 lacks, at character 3"),
        ("data:image/png;base64,QUé=", "which base64 lacks, at character 3"),
        ("data:image/png;base64,QU\ud800D", "which base64 lacks, at character 3"),
        ("data:image/png;base64,QU%\ud800D", "which base64 lacks, at character 3"),
        ("data:image/png;base64,QQ==QQ==", "padding before its end, at character 3"),
        ("data:image/png;base64,QUJDR", "5 characters, which is one too many or it was cut short"),
        (f"data:image/png;base64,data:image/png;base64,{TEXT}", 'has ":", which base64 lacks'),
    ],
)
def test_no_sensible_reading_is_an_error_that_names_it(url: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        bytes_of_data_url(url)


def test_long_ones_are_refused_and_not_quoted() -> None:
    for url in (f"data:;base64,{TEXT}", "data:," + "x" * 260):
        with pytest.raises(RequestError, match=r"has 26\d bytes, expected at most 100") as caught:
            bytes_of_data_url(url, most_bytes=100)
        assert len(str(caught.value)) < 100
    with pytest.raises(RequestError) as caught:
        bytes_of_data_url("https://" + "x" * 1_000_000)
    assert len(str(caught.value)) < 200
    assert bytes_of_data_url(f"data:;base64,{TEXT}", most_bytes=len(CONTENT)) == CONTENT


def test_escapes_in_great_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes many times its bytes; those that base64 needs do not count."""
    monkeypatch.setattr(module, "MOST_ESCAPES", 5)
    for url in ("data:image/png,%41%42%43%44%45", "data:;base64,%51%55%4A%44"):
        assert bytes_of_data_url(url)
        with pytest.raises(RequestError, match=r"written with \d+ percent signs") as e:
            bytes_of_data_url(f"{url}%41%41%41%41")
        assert "base64" in str(e.value.hint)
    quoted = TEXT.replace("+", "%2b").replace("/", "%2F").replace("=", "%3D") + "%0D%0A" * 3
    assert quoted.count("%") > 5
    assert bytes_of_base64(quoted) == CONTENT


def test_blanks_of_any_kind_are_left_out() -> None:
    blanks = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    for blank in blanks:
        assert bytes_of_base64(f"{TEXT[:5]}{blank}{TEXT[5:]}") == CONTENT, f"{blank!r}"
    assert bytes_of_base64("".join(map("".join, zip(TEXT, blanks * 99, strict=False)))) == CONTENT


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000"])
def test_many_pieces_take_no_more_memory_than_one(blank: str) -> None:
    """Pieces as objects took 20 times the text: a body of 45 MB took 1.1 GB for a second."""
    text = f"AA{blank}" * 100_000
    size = len(text.encode("utf-16-le" if blank > "\xff" else "latin-1"))
    tracemalloc.start()
    try:
        assert bytes_of_base64(text) == bytes(150_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * size


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for url in (text, f"data:image/png;base64,{text}", f"data:{text}"):
        with contextlib.suppress(RequestError):
            assert bytes_of_data_url(url)
