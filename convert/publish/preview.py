"""Dry run of a push, which needs neither a token nor the network."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.publish.access import check_name
from lowbit.convert.publish.parcel import Parcel, Statement, make_parcel


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of a push.

    Attributes:
        parcel: files to send where the Hub lacks them.
        url: address of the repository.
        private: visibility of a repository that does not exist yet, the account's default when
            None.
        revision: branch, created where it does not exist; the default one when None.
    """

    parcel: Parcel
    url: str
    private: bool | None
    revision: str | None


def dry_run(
    folder: Path,
    repo: str,
    private: bool | None,
    revision: str | None = None,
    stated: Statement | None = None,
    *,
    progress: Callable[[str, int, int], None],
) -> DryRun:
    """Verify a packed folder and plan its push.

    Args:
        folder: made by lowbit-convert.
        repo: `owner/name`; the Hub is not asked whether it exists.
        private: as in `publish`.
        revision: as in `publish`.
        stated: as in `make_parcel`.
        progress: called with (phase, done, in all).

    Raises:
        LowbitError: a name the Hub does not take, or as `make_parcel`.
    """
    from huggingface_hub import constants

    check_name(repo)
    parcel = make_parcel(folder, repo, progress, stated)
    return DryRun(parcel, f"{constants.ENDPOINT}/{repo}", private, revision)
