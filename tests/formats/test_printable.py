"""Escapes of control characters, against the categories of Unicode."""

import sys
import unicodedata
from itertools import chain
from xml.etree.ElementTree import fromstring
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.printable import PROSE, printable

REORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CASES = [
    ("\x1b[2J", "\\x1b[2J"),
    ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    ("\x9b31m", "\\x9b31m"),
    ("back\x08\x7f\r", "back\\x08\\x7f\\r"),
    ("a\u202eb", "a\\u202eb"),
    ("line\u2028end\u2029", "line\\u2028end\\u2029"),
    ("half \ud800", "half \\ud800"),
    ("\ufeff\ufffe", "\\ufeff\\ufffe"),
    ("\u0645\u06cc\u200c\u0634\u0648\u062f", "\u0645\u06cc\u200c\u0634\u0648\u062f"),
    ("👩\u200d👧", "👩\u200d👧"),
]
KEPT = [
    "a\tb\n",
    "soft\u00adhyphen",
    "\u05d0!\u200f",
    "\u0601\u0661",
    "🏴\U000e0067\U000e0062\U000e007f",
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_escapes_are_shown(text: str, expected: str) -> None:
    assert printable(text) == printable(text, keep=PROSE) == expected


@pytest.mark.parametrize("text", KEPT)
def test_running_text_keeps_its_marks(text: str) -> None:
    assert printable(text, keep=PROSE) == text


def test_every_character_of_unicode_is_safe_for_terminals_and_xml() -> None:
    # Planes 2 and 3 have ideographs, 4 to 13 nothing, 15 and 16 are of private use throughout.
    planes = (range(0x20000), range(0x20000, 0x40000, 17), range(0xE0000, 0xF0100))
    everything = "".join(map(chr, (*chain(*planes), sys.maxunicode)))
    for keep in ("", "\n", PROSE):
        shown = printable(everything, keep)
        assert not set(shown) & set(REORDERING)
        bad = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
        assert bad == set(keep) & {"\n", "\t"}
    # Expat refuses characters that XML forbids.
    assert fromstring(f"<a>{escape(printable(everything))}</a>").text == printable(everything)


@given(st.text(), st.sampled_from(["", "\n", PROSE]))
def test_printable_text_stays_and_the_rest_encodes(text: str, keep: str) -> None:
    shown = printable(text, keep)
    shown.encode()
    assert printable(shown, keep) == shown
    assert ("\n" in shown) <= ("\n" in keep)
    if text.isprintable():
        assert shown == text
