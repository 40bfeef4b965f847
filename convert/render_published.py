"""What was published, for the terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from lowbit.convert.publish.push import Published
from lowbit.convert.report.words import size
from lowbit.formats.shell.tables import results, styled


def published(done: Published) -> None:
    """Say what is on the Hub and where."""
    console = results()
    files = len(done.sent) + len(done.present)
    there = f", {len(done.present)} of them there already" if done.present else ""
    console.print(
        styled(
            ("✓", "bold green"),
            f" {files} files, {size(done.size_bytes)}{there}: every hash on the Hub as here",
        )
    )
    if done.left_out:
        console.print(styled((f"not published: {', '.join(done.left_out)}", "dim")))
    private = " (private)" if done.private else ""
    console.print(f"{done.url}{private}", soft_wrap=True)


def published_json(done: Published) -> dict[str, Any]:
    """The object of `push --json`."""
    return asdict(done)
