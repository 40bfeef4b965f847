"""Text from files made safe to print: control characters shown as escapes."""

import unicodedata

# Other, control and format: escape sequences, line ends, and marks that reorder the text around
# them. Zero-width joiners stay, without which emoji and Indic scripts fall apart.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = {"\u200c", "\u200d"}


def printable(text: str) -> str:
    r"""Replace every control character by its escape, `\x1b` for instance, so text is one line.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    if unicodedata.category(character) not in _ESCAPED:
        return character
    return character.encode("unicode_escape").decode()
