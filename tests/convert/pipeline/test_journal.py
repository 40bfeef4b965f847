"""Lines of a journal that no conversion wrote, with checksums that hold."""

import zlib
from pathlib import Path

import pytest

from lowbit.convert.pipeline.journal import JOURNAL_FILE, open_journal

FORGED = (
    b"",
    b"[]",
    b"null",
    b"3",
    b"{",
    b"[" * 100_000,
    b'"plan"',
    b'{"files": 3}',
    b'{"files": [1]}',
    b'{"step": 1}',
    b'{"step": 1, "source_sha256": "", "tensors": []}',
    b'{"step": 1, "source_sha256": "", "tensors": 3, "sums": null}',
    b'{"step": 1, "source_sha256": "", "tensors": [{}], "sums": null}',
    b'{"step": 1, "source_sha256": "", "tensors": [], "sums": {"x": 1}}',
    b'{"step": "1", "source_sha256": "", "tensors": [], "sums": null}',
)
DONE = b'{"step": 1, "source_sha256": "", "tensors": [], "sums": null}'


def line(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


@pytest.mark.parametrize("forged", FORGED, ids=lambda text: text[:30].decode())
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_forged_line_ends_the_journal(tmp_path: Path, forged: bytes, first: bool) -> None:
    begun = b"" if first else line(b'{"plan": "digest", "files": []}')
    (tmp_path / JOURNAL_FILE).write_bytes(begun + line(forged))
    with open_journal(tmp_path, "digest", overwrite=False, files=["a"], hint="x") as journal:
        assert not journal.finished
    whole = (tmp_path / JOURNAL_FILE).read_bytes()
    assert line(forged) not in whole
    assert whole.startswith(b"%08x" % zlib.crc32(whole.splitlines()[0][9:]))


def test_a_finished_step_is_read(tmp_path: Path) -> None:
    begun = line(b'{"plan": "digest", "files": ["a"]}')
    (tmp_path / JOURNAL_FILE).write_bytes(begun + line(DONE))
    with open_journal(tmp_path, "digest", overwrite=False, files=["a"], hint="x") as journal:
        assert [step.step for step in journal.finished] == [1]
    assert (tmp_path / JOURNAL_FILE).read_bytes() == begun + line(DONE)
