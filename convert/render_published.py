"""What was published, for the terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from lowbit.convert.publish.push import Published
from lowbit.convert.report.words import size
from lowbit.convert.terminal import stderr


def published(done: Published) -> None:
    """Say what is on the Hub and where."""
    console = stderr()
    files = len(done.sent) + len(done.present)
    there = f", {len(done.present)} of them there already" if done.present else ""
    console.print(
        f"[bold green]✓[/] {files} files, {size(done.size_bytes)}{there}: "
        "every hash on the Hub as here"
    )
    if done.left_out:
        console.print(f"[dim]not published: {escape(', '.join(done.left_out))}[/]")
    private = " (private)" if done.private else ""
    console.print(f"{escape(done.url)}{private}", soft_wrap=True)


def published_json(done: Published) -> dict[str, Any]:
    """The object of `push --json`."""
    return asdict(done)
