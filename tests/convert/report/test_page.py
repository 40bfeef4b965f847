"""Text of pages that no browser may break over lines, although it ends lines at hyphens."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from lowbit.convert.measure.record import Flip
from lowbit.convert.report.html import render_html
from lowbit.convert.report.variants import variants_page
from tests.convert.report.samples import make_report
from tests.convert.report.test_variants import ONE, changed

COMMAND = "lowbit-convert SRC out --device cuda --calib-samples 64 --bits '*.down_proj=8'"
BROKEN = re.compile(r"--[a-z]|lowbit-(?:run|convert)")


class Loose(HTMLParser):
    """Text of a page outside of elements that are not broken; and the text inside those."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.loose, self.whole = "", list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if {tag for tag, _ in self.open} & {"style", "svg", "title"}:
            return
        if self.open and self.open[-1] == ("span", "w"):
            self.whole.append(data)
        else:
            self.loose += data


def test_options_and_commands_are_never_broken() -> None:
    report = replace(make_report(kl_mean=0.2, top1_agreement=0.8), command=COMMAND)
    pages = (
        variants_page([changed(ONE, command=COMMAND)]),
        render_html(report, None, "out"),
        render_html(make_report(measured=False), None, "out"),
    )
    for page in pages:
        found = Loose(page)
        assert BROKEN.search(found.loose) is None, found.loose
        assert found.whole
    assert {"lowbit-convert", "--device", "--calib-samples", "--bits"} == set(Loose(pages[0]).whole)
    assert "--group-size" in Loose(pages[1]).whole  # among the options to try


def test_nothing_else_is_changed() -> None:
    """Neither words of other kinds, nor markup that a text seems to hold."""
    before = "a --bb<script>--xx</script> well-known --" + "long-" * 30 + "option ---rule x--y -q"
    flip = Flip("text", before, "the", "the", "a", 0.5, 0.1, 1.0)
    found = Loose(render_html(make_report(flips=(flip,)), None, "<i>--nn</i>"))
    assert "".join(found.loose.split()).find("<script></script>well-known--long-") > 0
    assert [word for word in found.whole if word in ("--bb", "--xx", "--nn")] == [
        *("--nn", "--bb", "--xx")
    ]
    assert "---rule x--y -q" in found.loose
