"""Markdown of the page, in node: what it shows, and texts made to keep it busy."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.page.conftest import Node

LONGEST = 8000  # characters of a paragraph that marks are looked for in

LINK = {"rel": "noopener noreferrer"}

Render = Callable[..., dict[str, Any]]


@pytest.fixture
def render(node: Node) -> Render:
    """`render({name: text}, "count")`: nodes of every text, as trees or counted."""

    def run(texts: dict[str, str], *what: str) -> dict[str, Any]:
        found: dict[str, Any] = node("render.mjs", texts, *what)
        return found

    return run


SHOWN: dict[str, list[Any]] = {
    "**bold *both* `a*b`**": [["strong", "bold ", ["em", "both"], " ", ["code", "a*b"]]],
    "***both***": [["strong", ["em", "both"]]],
    "__a__": [["strong", "a"]],
    "~~a~~": [["del", "a"]],
    "_a b_": [["em", "a b"]],
    "_a_b": ["_a_b"],
    "snake_case_name": ["snake_case_name"],
    "2 * 3 * 4": ["2 * 3 * 4"],
    r"\*a\*": ["*", "a", "*"],
    "`` a`b ``": [["code", "a`b"]],
    "```a``": ["```a``"],
    "**a": ["**a"],
    "[a](b": ["[a](b"],
    "[a\nb](http://c": ["[a\nb](", ["a", LINK | {"href": "http://c"}, "http://c"]],
    "h http:// ://": ["h http:// ://"],
}


def test_marks(render: Render) -> None:
    found = render({text: text for text in SHOWN})
    assert {text: tree[0][1:] for text, tree in found.items()} == SHOWN


HOSTILE = (
    "[a](javascript:x)",
    "[a](JavaScript:x)",
    "[a](data:text/html,<b>)",
    "[a]( java\nscript:x)",
    "[a](//evil.example)",
    "![a](vbscript:x)",
    "<img src=x onerror=x>",
    "<script>x</script>",
    "**<b>**",
    "| <i> |\n|-|\n| <u> |",
    "[<b>](javascript:x 'http://a')",
    "[http://a](javascript:x)",
)
LINKS = {
    "[a](https://b/c 'd')": "https://b/c",
    "[a](<https://b>)": "https://b",
    "[](https://b)": "https://b",
    "[a](MAILTO:b@c)": "MAILTO:b@c",
    "![a](http://b)": "http://b",
    "see https://b/c_d_e.": "https://b/c_d_e",
    '<https://b?q="><b>': "https://b?q=",
}
TAGS = {
    *("p", "strong", "em", "del", "code", "a", "ul", "ol", "li", "blockquote", "pre", "hr", "div"),
    *("table", "thead", "tbody", "tr", "th", "td", "span", "button", "h3", "h4", "h5", "h6"),
}


def nodes(tree: Any) -> list[Any]:
    """All nodes of a tree, without its texts."""
    inner = [tree] if tree and isinstance(tree[0], str) else []
    children = tree[1:] if inner else tree
    return inner + [one for child in children if isinstance(child, list) for one in nodes(child)]


def test_no_text_becomes_html_or_a_script(render: Render) -> None:
    joined = " ".join([*HOSTILE, *LINKS])
    found = render({text: text for text in [*HOSTILE, *LINKS, joined]})
    for text in HOSTILE:
        assert [node for node in nodes(found[text]) if node[0] == "a"] == [], text
    for text, href in LINKS.items():
        (link,) = (node for node in nodes(found[text]) if node[0] == "a")
        assert link[1] == LINK | {"href": href}
    assert {node[0] for tree in found.values() for node in nodes(tree)} <= TAGS


def paragraphs(text: str, count: int) -> str:
    """Paragraphs of a repeated text, each as long as marks are looked for."""
    return "\n\n".join([(text * LONGEST)[:LONGEST]] * count)


MARKS = (
    *("[", "![", "[a](b ", "[a](<", "[a](  ", "*", "**a ", "_a _", "__a ", "~~a ", "***a"),
    *("`a", "`a``b```c", "http://", "http://.", "\\", "*a_b`c[d](e~~f**g"),
)
MANY = 50_000
LONG = {
    "cells": "|" * MANY,
    "cells of a table": "a|b\n-|-\n" + "|" * MANY,
    "columns": "a|" * MANY + "\n" + "-|" * MANY,
    "no columns": "a|\n" + "-|" * MANY + "x",
    "dashes": "a|\n" + "-" * MANY + "x",
    "quotes": ">" * MANY,
    "quotes with blanks": "> " * MANY,
    "lines of quotes": (">" * 50 + "\n") * 3000,
    "items inside items": "- " * MANY,
    "items": "- a\n" * MANY,
    "headings of a quote": "> # a\n" * MANY,
    "headings of an item": "- a\n" + "  # b\n" * MANY,
    "rules": "---\n" * MANY,
    "a rule that is none": "- " * MANY + "x",
    "a fence that is none": "~" * MANY + "x" * MANY + "`",
    "backticks": "`" * MANY,
    "a heading with blanks": "# " + " " * MANY + "x" * MANY + "\u2028",
    "blanks": " " * MANY + "x",
    "blank lines": "- a\n" + "\n" * MANY,
}


def test_no_text_keeps_the_page_busy(render: Render) -> None:
    """The work grows with the text: squared, a minute would not do."""
    texts = {text: paragraphs(text, 20) for text in MARKS} | LONG | {"[](": paragraphs("[](", 100)}
    found = render(texts, "count")
    assert all(count <= 3 * len(texts[name]) for name, count in found.items())
    assert found["cells of a table"] > MANY
    assert found["items"] > MANY
    assert found["headings of a quote"] > MANY
