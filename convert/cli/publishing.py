"""Publishing as the commands do it: verify under our bar, send under the library's."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.publish.parcel import NOTHING, Statement, make_parcel
from lowbit.convert.publish.push import Published, publish
from lowbit.formats.errors import PublishError
from lowbit.formats.packed import PackedCheckpoint
from lowbit.formats.shell.output import note

ALLOW_LOCAL_PATHS = "--allow-local-paths"

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def publish_folder(
    api: "HfApi",
    packed: PackedCheckpoint,
    repo: str,
    private: bool | None,
    revision: str | None = None,
    quiet: bool = False,
    stated: Statement = NOTHING,
    allow_local_paths: bool = False,
) -> Published:
    """Verify a packed folder and send it, showing how far it is where somebody watches.

    Args:
        api: of `open_hub`.
        packed: the folder, made by lowbit-convert.
        repo: `owner/name`.
        private: as in `publish`.
        revision: as in `publish`.
        quiet: show nothing.
        stated: as in `make_parcel`.
        allow_local_paths: publish files that name a folder of this machine, too.

    Raises:
        PublishError: a file names a folder of this machine, and may not.
        LowbitError: as `make_parcel` and `publish`.
    """
    command = _command(packed.checkpoint.folder, repo, private, revision, stated)
    with progress_bars(quiet) as progress:
        parcel = make_parcel(packed, repo, progress, stated)
    if parcel.local_paths and not allow_local_paths:
        raise PublishError(
            f"nothing was sent: {'; '.join(parcel.local_paths)}",
            hint=f"`{command} {ALLOW_LOCAL_PATHS}` publishes it all the same",
        )
    if allow_local_paths:
        command = f"{command} {ALLOW_LOCAL_PATHS}"
    if not quiet:
        for text in parcel.notes:
            note(f"! {text}")
    try:
        bars = sys.stderr.isatty() and not quiet
        return publish(api, parcel, private, revision, bars)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"`{command}` continues") from None


def _command(
    folder: Path, repo: str, private: bool | None, revision: str | None, stated: Statement
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
