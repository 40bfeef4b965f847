"""Results of a push, and of one that sends nothing, for the terminal and as JSON."""

from typing import Any

from lowbit.convert.cli.tables.lines import aside, ok
from lowbit.convert.publish.push import Published
from lowbit.convert.publish.upload import UploadPlan
from lowbit.convert.report.formatting import size
from lowbit.formats.shell.tables import plain_table, results, styled


def published(done: Published) -> None:
    """Say what is on the Hub and where."""
    files = len(done.sent) + len(done.present)
    there = f", {len(done.present)} of them there already" if done.present else ""
    ok(f"{files} files, {size(done.size_bytes)}{there}: every hash on the Hub as here")
    if done.left_out:
        aside(f"not published: {', '.join(done.left_out)}")
    private = " (private)" if done.private else ""
    results().print(f"{done.url}{private}", soft_wrap=True)


def url_of(upload: UploadPlan) -> str:
    """Address of the repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{upload.repo}"


def dry_run(upload: UploadPlan, private: bool | None, revision: str | None) -> None:
    """Print the card, the files and what would be created, on stdout."""
    console = results()
    for line in upload.card.splitlines():
        console.print(styled(line), soft_wrap=True)
    table = plain_table("", ("file",), ("size",))
    for item in upload.items:
        table.add_row(item.name, size(item.size))
    table.add_section()
    table.add_row(f"{len(upload.items)} files", size(upload.size_bytes))
    console.print(table)
    weights = sum(item.is_weight for item in upload.items)
    branch = "its default branch" if revision is None else f"branch `{revision}`"
    for line in (
        f"would go to {url_of(upload)}, {branch}; created {_visibility(private)} if it does not "
        "exist",
        f"weights first, in {weights} file{'s' if weights > 1 else ''}, then the other "
        f"{len(upload.items) - weights} in one commit",
        *([f"not published: {', '.join(upload.left_out)}"] if upload.left_out else []),
        *(f"! {note}" for note in upload.notes),
        "nothing was sent",
    ):
        console.print(styled(line), soft_wrap=True)


def _visibility(private: bool | None) -> str:
    if private is None:
        return "as the account is set"
    return "private" if private else "public"


def dry_run_json(upload: UploadPlan, private: bool | None, revision: str | None) -> dict[str, Any]:
    """The object of `push --dry-run --json`."""
    return {
        "dry_run": True,
        "repo": upload.repo,
        "url": url_of(upload),
        "private": private,
        "revision": revision,
        "files": [
            {"name": item.name, "size_bytes": item.size, "sha256": item.sha256}
            for item in upload.items
        ],
        "size_bytes": upload.size_bytes,
        "left_out": list(upload.left_out),
        "notes": list(upload.notes),
        "card": upload.card,
    }
