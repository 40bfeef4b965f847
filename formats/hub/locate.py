"""Location of a model: a local folder, or a Hub id that is fetched into huggingface_hub's cache.

Only the small files of the top level and the shards that the index names are fetched. Their bytes
are compared with the hashes of the Hub. Headers are read by range requests. huggingface_hub is
imported when needed.
"""

import fnmatch
import glob
import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.files.user_folders import user_folder
from lowbit.formats.hub.errors import explained, not_cached, not_found
from lowbit.formats.hub.ids import HUB_ID, hub_id
from lowbit.formats.safetensors.checkpoint import (
    CONFIG_FILE,
    SINGLE_FILE,
    TensorInfo,
    join_headers,
    read_headers,
    read_json,
    weight_map,
)
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.safetensors.header import header_length, parse_header
from lowbit.formats.safetensors.normalize import normalize
from lowbit.formats.safetensors.other_engines import refuse_gguf_file

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

SHARDS = "*.safetensors"
SUBFOLDERS = "*/*"
OTHER_WEIGHTS = (
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx"),
    *("*.onnx_data", "*.msgpack", "*.h5", "*.npz", "*.ot", "*.tflite"),
)
ARCHIVES = ("*.zip", "*.tar", "*.gz")
UNWANTED = [SHARDS, SUBFOLDERS, ".*", *OTHER_WEIGHTS, *ARCHIVES]  # all but small files
FIRST_READ_BYTES = 65_536  # most shards' headers fit, so that one request is enough
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Location:
    """A model folder on this machine."""

    folder: Path  # holds config, tokenizer and shards
    repo: str | None  # the Hub id it came from, or None for a folder that was given as such
    commit: str | None  # sha of the snapshot, or None for a folder


class RemoteHeaders(NamedTuple):
    """Config and headers of a Hub model, without its weights."""

    config: Mapping[str, Any]  # content of config.json
    # every tensor by name, in shards that need not be on this machine
    tensors: dict[str, TensorInfo]
    commit: str  # sha of the revision that was read
    other_files: dict[str, int]  # size in bytes of every other file that `locate` would fetch
    folder: Path  # holds config.json and the other files that were asked for
    notes: tuple[str, ...]  # sentences on what is read in another way than the repository says


def locate(source: str, revision: str | None = None) -> Location:
    """The folder of a model; a Hub id is fetched first, into the cache of huggingface_hub.

    Without a network, or with HF_HUB_OFFLINE set, a cached snapshot serves.

    Args:
        source: a folder, a Hub id of the form `org/name` or `org/name@revision`, or the address of
            a model's page.
        revision: branch, tag or commit of a Hub id; the default branch when None.

    Raises:
        CheckpointError: neither a folder nor a Hub id, a repository, revision or file that is
            missing or refused, or a download that does not succeed.
        ResourceError: the disk is full.
    """
    if not source:  # Path("") would be the current folder
        raise not_found(source)
    path = Path(source)
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except OSError as error:  # too long, or in a folder without permission
        raise CheckpointError(f"`{source}` cannot be opened: {error.strerror}") from None
    if is_folder:
        if revision is not None:
            raise CheckpointError(
                f"`{source}` is a folder, a revision (`{revision}`) needs a Hub id",
                hint="leave the revision out, or give the Hub id",
            )
        return Location(folder=path, repo=None, commit=None)
    if exists:
        refuse_gguf_file(path)
        raise CheckpointError(f"`{source}` is not a folder", hint="give the folder of the model")
    found = hub_id(source, revision)
    if found is None:
        raise not_found(source)
    with _unchecked(found[0]) as before:
        location = _fetch(*found)
        _check_arrived(found[0], location.folder, before)
    return location


def remote_headers(
    repo: str, revision: str | None = None, also: Collection[str] = ()
) -> RemoteHeaders:
    """Read config and headers of a Hub model by range requests; no weights are fetched.

    Where the Hub cannot be reached, a complete cached snapshot is read instead.

    Args:
        repo: a Hub id of the form `org/name`.
        revision: branch, tag or commit; the default branch when None.
        also: names of small files to fetch into the folder, where the repository has them.

    Raises:
        CheckpointError: as `locate` and `open_checkpoint`.
    """
    if not HUB_ID.fullmatch(repo):
        raise not_found(repo)
    listing = _list_files(repo, revision)
    if listing is None:
        return _cached_headers(_fetch(repo, revision, local_only=True))
    commit, sizes = listing
    small = [
        name
        for name in sizes
        if _is_wanted(name)
        and (name == CONFIG_FILE or name in also or name.endswith(".index.json"))
    ]
    with _unchecked(repo) as before:
        folder = _download(repo, commit, allow=small)
        _require_config(repo, folder)
        _check_arrived(repo, folder, before)
    index = weight_map(folder)
    if index is not None and SINGLE_FILE in sizes and not sizes.keys() >= set(index.values()):
        named: Iterable[str] = [SINGLE_FILE]  # as `read_headers` takes it
        index = None
    else:
        named = fnmatch.filter(sizes, SHARDS) if index is None else index.values()
    shards = sorted(set(named))
    _require_shards(repo, shards, sizes)
    with explained(repo, revision), ThreadPoolExecutor(max_workers=8) as pool:
        headers = list(pool.map(lambda file: _read_header(repo, commit, file, sizes[file]), shards))
    found = normalize(read_json(folder / CONFIG_FILE), join_headers(headers, index), None)
    return RemoteHeaders(
        config=found.config,
        tensors=dict(found.tensors),
        commit=commit,
        other_files={name: size for name, size in sizes.items() if _is_wanted(name)},
        folder=folder,
        notes=found.notes,
    )


def _fetch(repo: str, revision: str | None, local_only: bool = False) -> Location:
    """Fetch the snapshot of a revision, small files first, so that bad ones fail early."""
    folder = _download(repo, revision, ignore=UNWANTED, local_only=local_only)
    _require_config(repo, folder)
    location = Location(folder=folder, repo=repo, commit=folder.name)
    index = weight_map(folder)
    if index is None:
        _download(repo, folder.name, [SHARDS], [SUBFOLDERS], local_only)
        present = [path.name for path in folder.glob(SHARDS)]
        _require_shards(repo, present, present)
        return location
    shards = sorted(set(index.values()))
    missing = [file for file in shards if not (folder / file).is_file()]
    if missing and not (folder / SINGLE_FILE).is_file():
        listing = None if local_only else _list_files(repo, folder.name)
        if listing is None:
            raise not_cached(repo, f"`{missing[0]}` is missing")
        if SINGLE_FILE in listing[1] and SINGLE_FILE not in shards:  # transformers reads it
            missing = [file for file in missing if file in listing[1]] + [SINGLE_FILE]
        else:
            _require_shards(repo, shards, listing[1])
        _download(repo, folder.name, allow=[glob.escape(file) for file in missing])
    return location


def _download(
    repo: str,
    revision: str | None,
    allow: list[str] | None = None,
    ignore: list[str] | None = None,
    local_only: bool = False,
) -> Path:
    """Fetch the files that the patterns select; the snapshot folder."""
    from huggingface_hub import snapshot_download

    with explained(repo, revision):
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=allow,
            ignore_patterns=ignore,
            tqdm_class=None if sys.stderr.isatty() else _silent_bar(),
            local_files_only=local_only,
        )
    return Path(folder)


@contextmanager
def _unchecked(repo: str) -> Iterator[Collection[str]]:
    """Names of the blobs that a repository has in the cache before the block fetches and checks.

    They are noted in the user's state folder until the block is done: after a run that was killed
    in between, the next one checks what that one had fetched.
    """
    blobs = _blob_folder(repo)
    name = hashlib.sha256(os.fsencode(blobs)).hexdigest()[:32]
    note: Path | None = None
    before = {path.name for path in blobs.iterdir()} if blobs.is_dir() else set()
    with suppress(OSError, RuntimeError, ResourceError):  # none can be kept
        note = user_folder("XDG_STATE_HOME", ".local/state") / "fetching" / name
        if note.exists():
            before &= set(note.read_text(errors="replace").split())
        else:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(note, "\n".join(sorted(before)).encode())
    yield before
    if note is not None:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _blob_folder(repo: str) -> Path:
    """The folder of a repository's blobs in the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"


def _check_arrived(repo: str, folder: Path, before: Collection[str]) -> None:
    """Compare new blobs of the cache with their names, which are their hashes.

    The library names a blob by the hash that the Hub states, SHA-256 or git's blob id, and compares
    sizes only.

    Raises:
        CheckpointError: a blob has other bytes; it is removed.
    """
    paths = [path for path in folder.iterdir() if path.is_symlink()]
    fresh = [path for path in paths if path.resolve().name not in before]
    with ThreadPoolExecutor(max_workers=8) as pool:
        for path, right in zip(fresh, pool.map(_is_named_right, fresh), strict=True):
            if not right:
                path.resolve().unlink(missing_ok=True)
                raise CheckpointError(
                    f"`{path.name}` of `{repo}` has arrived with other bytes than the Hub holds",
                    hint="run the command again: it is fetched anew",
                )


def _is_named_right(path: Path) -> bool:
    """Tell if a blob has the hash that is its name; a name that is no hash is accepted."""
    blob = path.resolve()
    if len(blob.name) == 64:
        return hash_file(blob) == blob.name
    if len(blob.name) == 40:
        content = blob.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == blob.name
    return True


def _silent_bar() -> "type[tqdm]":
    """A progress bar that shows nothing; the library's own bar writes into files and pipes."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Silent


def _list_files(repo: str, revision: str | None) -> tuple[str, dict[str, int]] | None:
    """Commit and top-level file sizes of a revision, or None where the Hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    with explained(repo, revision):
        try:
            info = HfApi().model_info(
                repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
            )
        except HfHubHTTPError:  # the Hub was reached
            raise
        except (HTTPError, OfflineModeIsEnabled):
            return None
    if info.sha is None:
        raise CheckpointError(f"the Hub names no commit of `{repo}`")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return info.sha, {name: size for name, size in sizes.items() if "/" not in name}


def _cached_headers(location: Location) -> RemoteHeaders:
    folder = location.folder
    found = normalize(read_json(folder / CONFIG_FILE), read_headers(folder), None)
    return RemoteHeaders(
        config=found.config,
        tensors=dict(found.tensors),
        commit=folder.name,
        other_files={
            path.name: path.stat().st_size
            for path in sorted(folder.iterdir())
            if path.is_file() and _is_wanted(path.name)
        },
        folder=folder,
        notes=found.notes,
    )


def _read_header(repo: str, commit: str, file: str, size: int) -> dict[str, TensorInfo]:
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, file, revision=commit)
    head = _read_range(url, 0, min(size, FIRST_READ_BYTES))
    end = 8 + header_length(head[:8], file, size)
    if end > len(head):
        head += _read_range(url, len(head), end)
    return parse_header(head[8:end], file, size)


def _read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file on the Hub; a server that ignores ranges is cut off early."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    headers = build_hf_headers(
        headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    )
    data = bytearray()
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        first = start if response.status_code == 206 else 0
        for chunk in response.iter_bytes(FIRST_READ_BYTES):
            data += chunk
            if first + len(data) >= stop:
                break
    return bytes(data[start - first : stop - first])


def _is_wanted(name: str) -> bool:
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in UNWANTED)


def _require_config(repo: str, folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"`{repo}` is not a checkpoint: it has no {CONFIG_FILE}",
            hint=f"llama.cpp runs GGUF: llama-cli -hf {repo}" if "gguf" in repo.lower() else None,
        )


def _require_shards(repo: str, shards: Collection[str], present: Collection[str]) -> None:
    if not shards:
        raise CheckpointError(
            f"`{repo}` is not a checkpoint: no .safetensors file of it was found",
            hint="only safetensors checkpoints are read",
        )
    for file in shards:
        if file not in present:
            raise CheckpointError(
                f"the index names shard `{file}`, which `{repo}` lacks",
                hint="the repository is incomplete; try another revision",
            )
