"""Pages and tables of reports, parsed for tests."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A page whose tags are balanced.

    Attributes:
        tags: all start tags, in order.
        attributes: all attributes, in order.
        words: the text as it stands; `text` has its white space joined.
        closed: the text inside <details>.
        rows: cells of the rows of tables, by the id of the section.
        facts: text of each <dd> by its <dt>; the last one of a name.
        items: text of each <li>, by the class or id of the section.
    """

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str]]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.closed = ""
        self.rows: dict[str, list[list[str]]] = {}
        self.facts: dict[str, str] = {}
        self.items: dict[str, list[str]] = {}
        self._term = ""
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(self.words.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        self.attributes += found.items()
        if tag not in self.VOID:
            self.open.append((tag, found))
        if tag == "tr":
            self.rows.setdefault(self._section(), []).append([])
        if tag in ("td", "th"):
            self.rows[self._section()][-1].append("")
        if tag == "li":
            self.items.setdefault(self._section(), []).append("")
        if tag == "dt":
            self._term = ""
        if tag == "dd":
            self.facts[self._term] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = {tag for tag, _ in self.open}
        if "style" in inside:
            return
        self.words += f"{data} "
        if "details" in inside:
            self.closed += data
        if inside & {"td", "th"}:
            row = self.rows[self._section()][-1]
            row[-1] = _joined(row[-1], data)
        if "li" in inside:
            items = self.items[self._section()]
            items[-1] = _joined(items[-1], data)
        if "dt" in inside:
            self._term = _joined(self._term, data)
        if "dd" in inside:
            self.facts[self._term] = _joined(self.facts[self._term], data)

    def _section(self) -> str:
        """Id of the section that is open, or the first of its classes."""
        names = (
            found.get("id") or found.get("class", "").partition(" ")[0]
            for tag, found in reversed(self.open)
            if tag == "section"
        )
        return next(names, "")


def _joined(before: str, data: str) -> str:
    return " ".join(f"{before} {data}".split())


def numbers(text: str) -> list[float]:
    """The figures in a text, in order; thousands have commas."""
    found = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


def table(markdown: str) -> list[list[str]]:
    """Cells of all the tables in Markdown, rules aside."""
    lines = (line for line in markdown.splitlines() if line.startswith("|"))
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [row for row in rows if not set("".join(row)) <= set("-:")]
