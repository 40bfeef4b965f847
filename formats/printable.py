"""Control characters as visible escapes: those that steer a terminal, reorder or hide text."""

import unicodedata

# Unicode categories: control, format (marks that reorder text or are invisible), surrogate, line
# and paragraph separator. Zero-width joiners are kept: emoji and Indic scripts need them.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"

_BREAKS = "\u00ad\u200b\u2060"  # soft hyphen, zero-width space, word joiner
_DIRECTIONS = (
    "\u061c\u200e\u200f"  # marks of Arabic and Hebrew that do not reorder their surroundings
)
_ARABIC_SIGNS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd"
_TAGS = "".join(map(chr, range(0xE0020, 0xE0080)))  # parts of flags such as Scotland's
PROSE = "\n\t" + _BREAKS + _DIRECTIONS + _ARABIC_SIGNS + _TAGS  # kept in running text


def printable(text: str, keep: str = "") -> str:
    r"""Replace every control character by its escape, `\x1b` for instance, so text is one line.

    Args:
        text: from a file, a model or a user.
        keep: characters that are not escaped: line ends, or `PROSE`.

    >>> printable("a\x1b[2J\n")
    'a\\x1b[2J\\n'
    >>> printable("a\x1b[2J\n", keep="\n")
    'a\\x1b[2J\n'
    """
    if text.isprintable():
        return text
    return "".join(_escape(character, keep) for character in text)


def _escape(character: str, keep: str) -> str:
    if character.isprintable() or character in _JOINERS or character in keep:
        return character
    if unicodedata.category(character) in _ESCAPED or _is_noncharacter(ord(character)):
        return character.encode("unicode_escape").decode()
    return character


def _is_noncharacter(code: int) -> bool:
    """Tell if a code point is a Unicode noncharacter, which XML forbids."""
    return code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
