"""A cut vocabulary on the page of a report."""

from lowbit.convert.report.formatting import MISSING
from lowbit.convert.report.html import render_html
from lowbit.formats.kept_vocabulary import KeptVocabulary, TextLength
from tests.convert.report.pages import Page
from tests.convert.report.samples import make_report


def test_a_cut_vocabulary_is_on_the_page() -> None:
    lengths = (
        TextLength("prose <b>", 1000, 250, 300, 1.25, 1.5),
        TextLength("code", 1000, 400, 401, None, None),
    )
    kept = KeptVocabulary(
        *("0.1.0", "Qwen/Qwen3-0.6B", "c0ffee", "", 151936, 151669, 65536),
        *("own.txt", "", 1000, 0.987, 0.95, lengths, ()),
    )
    report = make_report(())
    page = Page(render_html(report, None, "m", kept=kept))
    assert "65,536 of 151,669 tokens of Qwen/Qwen3-0.6B are kept" in page.text
    assert page.rows["vocabulary"][1:] == [
        ["prose <b>", "0.2500", "0.3000", "1.2500", "1.5000"],
        ["code", "0.4000", "0.4010", MISSING, MISSING],
    ]
    assert "vocabulary" not in Page(render_html(report, None, "m")).rows
