"""`lowbit-convert push`."""

from dataclasses import asdict
from pathlib import Path

import click

from lowbit.convert.cli.options import folder_argument, private_option, statement_options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option, model_name
from lowbit.formats.shell.output import print_json


@click.command(
    short_help="Publish a packed checkpoint on the Hub.",
    epilog="""\b
    Example:
      lowbit-convert push qwen3-8b-int4 me/qwen3-8b-int4 --private
    """,
)
@folder_argument
@click.argument("repo", metavar="REPO", callback=model_name)
@private_option
@click.option("--revision", metavar="BRANCH", help="Where to; created where it is missing.")
@statement_options
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
    base_model: str | None,
    license: str | None,
    allow_local_paths: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish the packed checkpoint DIR as REPO, OWNER/NAME, on the Hub.

    Verifies DIR, sends the weights, then card, manifest, reports and config in one last commit, and
    compares every hash on the Hub with DIR's. Interrupted, the same command continues.
    """
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.publishing import publish_folder
    from lowbit.convert.cli.tables import published as render_published
    from lowbit.convert.publish.parcel import Statement, make_parcel
    from lowbit.convert.publish.push import check_name, open_hub
    from lowbit.formats.packed import open_packed

    stated = Statement(base_model, license)
    packed = open_packed(folder)  # before the network is asked
    if dry_run:
        check_name(repo)
        with progress_bars(quiet=as_json) as progress:
            parcel = make_parcel(packed, repo, progress, stated)
        if as_json:
            print_json(render_published.dry_run_json(parcel, private, revision))
        else:
            render_published.dry_run(parcel, private, revision)
        return
    api = open_hub(repo)
    published = publish_folder(
        api, packed, repo, private, revision, as_json, stated, allow_local_paths
    )
    if as_json:
        print_json(asdict(published))
    else:
        render_published.published(published)
