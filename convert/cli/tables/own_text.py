"""Result of `calib-text`, in the terminal and as a JSON object."""

import shlex
from typing import Any

from lowbit.convert.pipeline.own_text import OwnText
from lowbit.formats.shell.output import note
from lowbit.formats.shell.tables import results, styled


def own_text(done: OwnText, source: str, revision: str | None) -> None:
    """Show the file, answers, tokens and time, and the command that calibrates on it."""
    cut = len(done.answers) - done.ended
    results().print(
        styled(
            ("✓", "bold green"),
            f" {done.file} written in {done.seconds:.1f} s: {len(done.answers):,} answers of "
            f"{done.tokens:,} tokens ({cut:,} were cut), then the bundled text",
        )
    )
    chosen = [] if revision is None else ["--revision", revision]
    command = ["lowbit-convert", source, "OUT", "--calib", str(done.file), *chosen]
    note(f"next: {shlex.join(command)}", fold=False)


def own_text_json(done: OwnText) -> dict[str, Any]:
    """Figures of `own_text` as the object of `--json`."""
    return {
        "file": str(done.file),
        "answers": len(done.answers),
        "ended": done.ended,
        "tokens": done.tokens,
        "batch": done.batch,
        "seconds": done.seconds,
    }
