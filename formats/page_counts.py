"""Sizes of pages and numbers of them; they need no torch."""

PAGE = 64  # tokens
SCRATCH = 0  # the page that tokens of no sequence are written to; it belongs to nobody
EXTRA = 2  # pages beyond those for tokens: SCRATCH, and one for the copy of a page that goes on


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)
