"""`lowbit-convert push`."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options, publishing_options
from lowbit.formats.errors import PublishError
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option, model_name
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from lowbit.convert.publish.push import Published
    from lowbit.convert.publish.upload import Statement
    from lowbit.formats.packed import PackedCheckpoint


@click.command(
    short_help="Publish a packed checkpoint on the Hub.",
    epilog="""\b
    Example:
      lowbit-convert push qwen3-8b-int4 me/qwen3-8b-int4 --private
    """,
)
@options.folder
@click.argument("repo", metavar="REPO", callback=model_name)
@publishing_options.private
@click.option("--revision", metavar="BRANCH", help="Where to; created where it is missing.")
@publishing_options.statement
@click.option(
    "--allow-local-paths",
    is_flag=True,
    help="Publish files of the original that name a folder of this machine, too.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the card, the files and their sizes; needs no token, and asks no server.",
)
@json_option
@reported
def push(
    folder: Path,
    repo: str,
    private: bool | None,
    revision: str | None,
    stated: "Statement",
    allow_local_paths: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish the packed checkpoint DIR as REPO, OWNER/NAME, on the Hub.

    Verifies DIR, sends the weights, then card, manifest, reports and config in one last commit, and
    compares every hash on the Hub with DIR's. Interrupted, the same command continues.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import published as render_published
    from lowbit.convert.publish.push import check_name, open_hub
    from lowbit.convert.publish.upload import plan_upload
    from lowbit.formats.packed import open_packed

    packed = open_packed(folder)  # before the network is asked
    if dry_run:
        check_name(repo)
        with progress_bars(quiet=as_json) as progress:
            upload = plan_upload(packed, repo, progress, stated)
        if as_json:
            print_json(render_published.dry_run_json(upload, private, revision))
        else:
            render_published.dry_run(upload, private, revision)
        return
    api = open_hub(repo)
    published = publish_folder(
        api, packed, repo, private, revision, as_json, stated, allow_local_paths
    )
    if as_json:
        print_json(asdict(published))
    else:
        render_published.published(published)


def publish_folder(
    api: "HfApi",
    packed: "PackedCheckpoint",
    repo: str,
    private: bool | None,
    revision: str | None,
    quiet: bool,
    stated: "Statement",
    allow_local_paths: bool = False,
) -> "Published":
    """Verify a packed folder and send it, showing how far it is where somebody watches.

    The other arguments are those of `plan_upload` and `publish`.

    Raises:
        PublishError: a file names a folder of this machine, and may not.
        LowbitError: as `plan_upload` and `publish`.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.publish.push import publish
    from lowbit.convert.publish.upload import plan_upload

    command = _command(packed.checkpoint.folder, repo, private, revision, stated)
    with progress_bars(quiet) as progress:
        upload = plan_upload(packed, repo, progress, stated)
    if upload.local_paths and not allow_local_paths:
        raise PublishError(
            f"nothing was sent: {'; '.join(upload.local_paths)}",
            hint=f"`{command} --allow-local-paths` publishes it all the same",
        )
    if allow_local_paths:
        command = f"{command} --allow-local-paths"
    if not quiet:
        for text in upload.notes:
            note(f"! {text}")
    try:
        bars = sys.stderr.isatty() and not quiet
        return publish(api, upload, private, revision, bars)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"`{command}` continues") from None


def _command(
    folder: Path, repo: str, private: bool | None, revision: str | None, stated: "Statement"
) -> str:
    """The push that continues an interrupted one, as a line for a shell."""
    options = {
        "--revision": revision,
        "--base-model": stated.base_model,
        "--license": stated.license,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    if private is not None:
        given.insert(0, "--private" if private else "--public")
    return shlex.join(["lowbit-convert", "push", str(folder), repo, *given])
