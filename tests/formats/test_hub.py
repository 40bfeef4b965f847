"""Fetching models: needed files only, from the cache when offline, one line for each failure."""

import errno
import json
import os
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.hub.locate import FIRST_READ_BYTES, locate, remote_headers
from lowbit.formats.safetensors.checkpoint import open_checkpoint, read_headers
from tests.hub_server import HubServer, Refusal

REPO = "org/tiny"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL = ["README.md", "config.json", "model.safetensors.index.json", "tokenizer.json"]


def write_model(folder: Path, rows: int = 256) -> Path:
    """Write two shards of `rows` x 256 F32 with an index, and the other files of a repository."""
    folder.mkdir()
    tensors = {f"layer.{n}": torch.full((rows, 256), float(n)) for n in range(2)}
    for shard, (name, tensor) in zip(SHARDS, tensors.items(), strict=True):
        save_file({name: tensor}, folder / shard)
    index = {"metadata": {}, "weight_map": dict(zip(tensors, SHARDS, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# tiny")
    for extra in ("pytorch_model.bin", "model.gguf", ".gitattributes", "consolidated.safetensors"):
        (folder / extra).write_bytes(b"not needed")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    (folder / "onnx" / "model.safetensors").write_bytes(b"not needed")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library retry without waiting."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def weight_bytes(folder: Path) -> int:
    return sum((folder / shard).stat().st_size for shard in SHARDS)


def test_a_local_folder(tmp_path: Path) -> None:
    location = locate(str(tmp_path))
    assert (location.folder, location.repo, location.commit) == (tmp_path, None, None)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder, a revision"):
        locate(str(tmp_path), "main")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        locate(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "source",
    [
        *("./missing", "../a/b", "a/b/c", "/abs/path", "missing", "org/", "/name", "", "~/m"),
        *("org/na--me", "org/name.git", "org/a..b", "org/name-", "org/é", "org/name\n", "a\0b"),
        *("org/name@", "@v1", "name@v1", "org@v1/name"),
    ],
)
def test_neither_a_folder_nor_a_hub_id(hub: HubServer, source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a model on the Hub") as error:
        locate(source)
    assert error.value.hint is not None
    assert "org/name" in error.value.hint
    assert not hub.requests()


def test_a_source_too_long_for_a_path() -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: File name too long"):
        locate("tell me a story " * 100)


def test_only_needed_files_are_fetched(hub: HubServer, model: Path) -> None:
    commit = hub.add(REPO, model)
    location = locate(REPO)
    assert hub.files() == sorted(SMALL + SHARDS)
    assert (location.repo, location.commit) == (REPO, commit)
    assert sorted(path.name for path in location.folder.iterdir()) == sorted(SMALL + SHARDS)
    for name in SMALL + SHARDS:
        assert (location.folder / name).read_bytes() == (model / name).read_bytes()
    assert open_checkpoint(location.folder).tensors == open_checkpoint(model).tensors


def test_one_file_without_an_index(hub: HubServer) -> None:
    source = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3"
    hub.add(REPO, source)
    location = locate(REPO)
    assert hub.files() == sorted(path.name for path in source.iterdir())
    assert open_checkpoint(location.folder).tensors == open_checkpoint(source).tensors


def test_nothing_is_fetched_twice(hub: HubServer, model: Path) -> None:
    hub.add(REPO, model)
    first = locate(REPO)
    hub.forget()
    assert locate(REPO) == first
    assert hub.files() == []


class Killed(BaseException):
    """A process that ends."""


def flip(folder: Path, name: str) -> None:
    path = (folder / name).resolve()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_a_killed_run_fetched_is_checked_by_the_next(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, model)
    fetched: list[Path] = []

    def die(repo: str, folder: Path, before: object) -> None:
        fetched.append(folder)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("lowbit.formats.hub.locate._check_arrived", die)
        with pytest.raises(Killed):
            locate(REPO)
    flip(fetched[0], SHARDS[1])
    hub.forget()
    with pytest.raises(CheckpointError, match=f"`{SHARDS[1]}` of .* has arrived with other bytes"):
        locate(REPO)
    location = locate(REPO)
    assert hub.files() == [SHARDS[1]]
    assert (location.folder / SHARDS[1]).read_bytes() == (model / SHARDS[1]).read_bytes()


def test_small_files_of_headers_are_checked(hub: HubServer, model: Path) -> None:
    hub.add(REPO, model)
    hub.garbled.add("config.json")
    with pytest.raises(CheckpointError, match=r"`config\.json` of .* has arrived with other bytes"):
        remote_headers(REPO)
    hub.garbled.clear()
    assert remote_headers(REPO).config == {"model_type": "qwen3"}


def test_nothing_is_left_of_a_checked_fetch(hub: HubServer, model: Path) -> None:
    hub.add(REPO, model)
    locate(REPO)
    state = Path(os.environ["XDG_STATE_HOME"])
    assert [path for path in state.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("by", ["name", "commit"])
def test_revision(hub: HubServer, model: Path, tmp_path: Path, by: str) -> None:
    hub.add(REPO, model)
    other = write_model(tmp_path / "other", rows=8)
    commit = hub.add(REPO, other, revision="refs/pr/1")
    location = locate(REPO, "refs/pr/1" if by == "name" else commit)
    assert location.commit == commit
    assert open_checkpoint(location.folder).tensors["layer.0"].shape == (8, 256)


@pytest.mark.parametrize("how", ["gone", "offline"])
@pytest.mark.parametrize("with_index", [True, False])
def test_the_cache_serves_without_a_network(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch, how: str, with_index: bool
) -> None:
    if not with_index:
        (model / "model.safetensors.index.json").unlink()
        (model / "consolidated.safetensors").unlink()
    hub.add(REPO, model)
    online = locate(REPO)
    headers = remote_headers(REPO)
    disconnect(hub, monkeypatch, how)
    assert locate(REPO) == online
    assert locate(REPO, online.commit) == online
    assert remote_headers(REPO) == headers


def disconnect(hub: HubServer, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "gone":
        hub.stop()
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("how", ["gone", "offline"])
@pytest.mark.parametrize("what", [locate, remote_headers])
def test_not_in_the_cache(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, no_waiting: None, how: str, what: object
) -> None:
    disconnect(hub, monkeypatch, how)
    assert callable(what)
    with pytest.raises(CheckpointError, match=f"`{REPO}` is not .* the local cache") as error:
        what(REPO)
    assert error.value.hint is not None


@pytest.mark.parametrize("how", ["gone", "offline"])
def test_a_part_in_the_cache_is_not_enough(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch, no_waiting: None, how: str
) -> None:
    hub.add(REPO, model)
    (locate(REPO).folder / SHARDS[1]).unlink()
    disconnect(hub, monkeypatch, how)
    with pytest.raises(CheckpointError, match=r"is not .* in the local cache"):
        locate(REPO)
    with pytest.raises(CheckpointError, match=r"is not .* in the local cache"):
        remote_headers(REPO)


def test_a_deleted_shard_is_fetched_again(hub: HubServer, model: Path) -> None:
    hub.add(REPO, model)
    shard = locate(REPO).folder / SHARDS[1]
    shard.resolve().unlink()
    hub.forget()
    assert (locate(REPO).folder / SHARDS[1]).read_bytes() == (model / SHARDS[1]).read_bytes()
    assert hub.files() == [SHARDS[1]]


@pytest.mark.parametrize("what", [locate, remote_headers])
def test_an_index_that_names_a_missing_shard(hub: HubServer, model: Path, what: object) -> None:
    (model / SHARDS[1]).unlink()
    hub.add(REPO, model)
    assert callable(what)
    with pytest.raises(CheckpointError, match=f"names shard `{SHARDS[1]}`, which `{REPO}` lacks"):
        what(REPO)
    assert SHARDS[0] not in hub.files()  # found out before the long download


@pytest.mark.parametrize("what", [locate, remote_headers])
@pytest.mark.parametrize(
    ("file", "message"),
    [("config.json", "has no config.json"), (None, "no .safetensors file")],
)
def test_not_a_checkpoint(
    hub: HubServer, tmp_path: Path, what: object, file: str | None, message: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    (folder / ("README.md" if file else "config.json")).write_text("{}")
    hub.add(REPO, folder)
    assert callable(what)
    with pytest.raises(CheckpointError, match=message):
        what(REPO)


REFUSALS = {
    "missing": (Refusal(404, "RepoNotFound"), "neither a folder nor a model on the Hub", "hf auth"),
    "unnamed": (Refusal(401, message="Invalid username or password."), "HTTP 401", "hf auth login"),
    "token": (
        Refusal(401, message="Invalid credentials in Authorization header"),
        "HTTP 401 .*Invalid credentials",
        "hf auth login",
    ),
    "forbidden": (Refusal(403, message="Token lacks a scope"), "HTTP 403.*lacks a scope", "token"),
    "gated": (Refusal(403, "GatedRepo", "Access is restricted"), "is gated", "accept its terms"),
    "revision": (Refusal(404, "RevisionNotFound"), "has no revision `", "branch"),
    "down": (Refusal(503, message="maintenance"), "HTTP 503.*maintenance", "later"),
    "moved": (Refusal(418), "HTTP 418", "later"),
}


@pytest.mark.parametrize(
    ("case", "prefix"),
    [(case, "/api/models/org/tiny") for case in REFUSALS]
    + [(case, "/org/tiny/resolve") for case in ("gated", "token", "down")],
)
@pytest.mark.parametrize("what", [locate, remote_headers])
def test_refusals(
    hub: HubServer, model: Path, no_waiting: None, what: object, case: str, prefix: str
) -> None:
    refusal, message, hint = REFUSALS[case]
    hub.add(REPO, model, revision="v9")
    hub.refusals[prefix] = refusal
    assert callable(what)
    with pytest.raises(CheckpointError, match=message) as error:
        what(REPO, "v9")
    assert "\n" not in str(error.value)
    assert hint in (error.value.hint or "")


def test_unknown_repository_and_revision(hub: HubServer, model: Path) -> None:
    hub.add(REPO, model)
    with pytest.raises(CheckpointError, match="`org/typo` is neither"):
        locate("org/typo")
    with pytest.raises(CheckpointError, match="`org/tiny` has no revision `v2`"):
        locate(REPO, "v2")
    with pytest.raises(CheckpointError, match="`org/tiny` has no revision `v2`"):
        remote_headers(REPO, "v2")


def test_a_transfer_that_keeps_breaking(hub: HubServer, model: Path, no_waiting: None) -> None:
    hub.add(REPO, model)
    hub.broken.add(SHARDS[1])
    hub.ranges = False  # so that resuming does not help
    with pytest.raises(CheckpointError, match=f"fetching `{REPO}` failed") as error:
        locate(REPO)
    assert "\n" not in str(error.value)
    hub.broken.clear()
    assert read_headers(locate(REPO).folder)


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "disk is full"),
        (PermissionError(13, "Permission denied"), CheckpointError, "PermissionError.*denied"),
        (RuntimeError("transfer failed\nat length"), CheckpointError, "RuntimeError: .*failed$"),
    ],
)
def test_failures_of_the_machine(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    kind: type[Exception],
    message: str,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(kind, match=message):
        locate(REPO)


def test_remote_headers_fetch_no_weights(hub: HubServer, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", rows=4096)
    commit = hub.add(REPO, model)
    headers = remote_headers(REPO)
    assert headers.tensors == read_headers(model)
    assert headers.config == {"model_type": "qwen3"}
    assert headers.commit == commit
    assert headers.other_files == {name: (model / name).stat().st_size for name in SMALL}
    assert hub.sent() < weight_bytes(model) / 10
    assert all(request.sent <= FIRST_READ_BYTES for request in hub.requests())


def test_remote_headers_of_one_file(hub: HubServer) -> None:
    source = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3"
    hub.add(REPO, source)
    assert remote_headers(REPO).tensors == read_headers(source)
    assert hub.sent() < (source / "model.safetensors").stat().st_size / 100


def test_a_header_longer_than_the_first_read(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({f"tensor.{n}": torch.zeros(64) for n in range(2000)}, folder / "model.safetensors")
    hub.add(REPO, folder)
    assert remote_headers(REPO).tensors == read_headers(folder)
    assert hub.sent() < (folder / "model.safetensors").stat().st_size / 2


def test_a_server_that_ignores_ranges_is_cut_off(hub: HubServer, tmp_path: Path) -> None:
    rows = 1 << 18  # 64 MB, more than the sockets hold between them
    header = {"w": {"dtype": "BF16", "shape": [rows, 128], "data_offsets": [0, rows * 256]}}
    raw = json.dumps(header).encode()
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + rows * 256)  # sparse
    hub.add(REPO, folder)
    hub.ranges = False
    assert remote_headers(REPO).tensors["w"].shape == (rows, 128)
    assert hub.sent() < rows * 128


def test_a_truncated_shard_is_named(hub: HubServer, model: Path) -> None:
    with (model / SHARDS[1]).open("r+b") as file:
        file.truncate(1000)
    hub.add(REPO, model)
    with pytest.raises(CheckpointError, match=f"`{SHARDS[1]}` is cut short"):
        remote_headers(REPO)


def test_the_token_is_sent_to_the_hub_only(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add(REPO, model)
    remote_headers(REPO)
    bodies = {request.file: request.token for request in hub.requests() if request.file}
    assert bodies["config.json"] == "Bearer hf_secret"
    assert bodies[SHARDS[0]] is None


def test_nothing_is_printed_into_a_pipe(
    hub: HubServer, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, model)
    locate(REPO)
    remote_headers(REPO)
    assert capfd.readouterr() == ("", "")


def test_single_file_beside_other_shards_is_fetched_and_refused(
    hub: HubServer, model: Path
) -> None:
    save_file({f"layer.{n}": torch.zeros(256, 256) for n in range(2)}, model / "model.safetensors")
    hub.add(REPO, model)
    with pytest.raises(CheckpointError, match=r"holds two models: `model\.safetensors`"):
        open_checkpoint(locate(REPO).folder)


def test_single_file_beside_an_index_without_shards(hub: HubServer, model: Path) -> None:
    tensors = {f"layer.{n}": torch.zeros(256, 256) for n in range(2)}
    save_file(tensors, model / "model.safetensors")
    for shard in SHARDS:
        (model / shard).unlink()
    hub.add(REPO, model)
    assert set(remote_headers(REPO).tensors) == set(tensors)
    for _ in range(2):  # fetched, then from the cache
        found = open_checkpoint(locate(REPO).folder)
        assert torch.equal(found.read("layer.1"), tensors["layer.1"])
