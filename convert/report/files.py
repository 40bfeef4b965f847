"""The files of a report: quality.json, quality.html and a draft of the model card."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lowbit.convert.measure.record import QualityReport
from lowbit.convert.measure.speed import known_speed, read_speed
from lowbit.convert.pipeline.owned import is_untouched_draft, marked
from lowbit.convert.report.card import render_card
from lowbit.convert.report.html import render_html
from lowbit.convert.report.source_card import SourceCard, read_source_card
from lowbit.convert.report.space import where_bytes_went
from lowbit.convert.report.verdict import judge, stated_verdict
from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.file_names import DRAFT, HTML_FILE, QUALITY_FILE, README, SOURCE_README
from lowbit.formats.files.atomic import check_place, disk_errors, replace_files
from lowbit.formats.kept_vocabulary import read_kept_vocabulary
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.printable import printable
from lowbit.formats.tasks import TASKS_FILE, TaskReport, merged, read_tasks, write_tasks

MAX_REPORT_BYTES = 4_000_000  # more than the three files of the largest models' reports take


def check_reports(folder: Path, place: Path | None = None, with_tasks: bool = False) -> None:
    """Refuse, before anything is measured, what `write_reports` would fail on.

    Args:
        with_tasks: results of tasks will be written too.

    Raises:
        LowbitError: the folder's tasks.json cannot be read, or a file cannot be written.
    """
    read_tasks(folder)
    place = _place(folder, place)
    card = _card_file(place)
    with _for_now(place):
        tasks = [TASKS_FILE] if with_tasks else []
        for name in (QUALITY_FILE, HTML_FILE, *tasks, *([] if card is None else [card])):
            check_place(place / name, MAX_REPORT_BYTES)


def left_out(folder: Path, place: Path | None = None) -> list[str]:
    """Sentences on what `write_reports` would leave out."""
    notes = []
    if _card_file(_place(folder, place)) is None:
        notes.append(f"no card was written: {README} and {DRAFT} are both somebody's own")
    try:
        read_speed(folder)
    except LowbitError as error:
        hint = f" ({error.hint})" if error.hint else ""
        notes.append(f"the report names no speed: {error}{hint}")
    return notes


def save_tasks(folder: Path, results: TaskReport, place: Path | None = None) -> None:
    """Add results to tasks.json, where `write_reports` finds them; arguments as there.

    Raises:
        LowbitError: as `write_reports`.
    """
    place = _place(folder, place)
    with disk_errors(path=place):
        place.mkdir(parents=True, exist_ok=True)
    write_tasks(place, merged(read_tasks(place), results))


def known_tasks(packed: PackedCheckpoint, place: Path | None = None) -> TaskReport | None:
    """Results of this conversion in the tasks.json at `place`, else in the packed folder's.

    Raises:
        CheckpointError, FormatError: one that cannot be read.
    """
    folder = packed.checkpoint.folder
    for where in (_place(folder, place), folder):
        tasks = read_tasks(where)
        if tasks is not None and tasks.manifest_sha256 == packed.manifest_sha256:
            return tasks
    return None


def write_reports(
    packed: PackedCheckpoint, report: QualityReport, place: Path | None = None
) -> list[Path]:
    """Write quality.json, quality.html and a draft of the model card; the files, in that order.

    The card is README.md, unless there is one already that this function did not write or that
    somebody has edited since: then it is MODEL_CARD.md. If somebody edited that too, no card is
    written.

    Args:
        place: folder for the files, created where it does not exist; the packed one when None.

    Raises:
        LowbitError: `place` is another packed checkpoint, or a file cannot be written; no file is
            written then.
    """
    folder = packed.checkpoint.folder
    name = printable(folder.resolve().name)
    place = _place(folder, place)
    size_shares = where_bytes_went(packed, report.sizes.folder_bytes)
    kept = read_kept_vocabulary(folder)
    page = render_html(
        report, packed.manifest, name, size_shares, report.tasks, known_speed(folder), kept
    )
    figures = report.to_bytes(stated_verdict(judge(report)))
    contents = {place / QUALITY_FILE: figures, place / HTML_FILE: page.encode()}
    card = _card_file(place)
    if card is not None:
        text = render_card(packed, report, report.tasks, source_card(folder), name)
        contents[place / card] = marked(text)
    with disk_errors(path=place):
        place.mkdir(parents=True, exist_ok=True)
    # quality.json last: its presence means that all files are there
    replace_files(dict(reversed(contents.items())))
    return list(contents)


def _place(folder: Path, place: Path | None) -> Path:
    """The folder for the files; refused if it is another checkpoint's."""
    if place is None or place.resolve() == folder.resolve():
        return folder
    if (place / MANIFEST_FILE).exists():
        raise ResourceError(
            f"`{place}` is another packed checkpoint, which the report is not about",
            hint="name a folder without weights",
        )
    return place


@contextmanager
def _for_now(place: Path) -> Iterator[None]:
    """Create a folder for the block, and remove the folders that were created after it."""
    created = [path for path in (place, *place.parents) if not path.exists()]
    try:
        with disk_errors(path=place):
            place.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in created:
            with suppress(OSError):  # it was not created, or is in use by now
                path.rmdir()


def _card_file(place: Path) -> str | None:
    """Name of the first card file that nobody edited; None where both are edited."""
    for name in (README, DRAFT):
        path = place / name
        if not path.exists() or is_untouched_draft(path):
            return name
    return None


def source_card(folder: Path) -> SourceCard:
    """Metadata of the original's card, which a conversion copies as SOURCE_README.md.

    An original whose vocabulary was cut is nowhere on the Hub: the whole one is the base model.
    """
    original = folder / SOURCE_README
    if not original.exists() and not is_untouched_draft(folder / README):
        original = folder / README
    card = read_source_card(original)
    kept = read_kept_vocabulary(folder)
    return card if kept is None else replace(card, base_model=kept.repo)
