"""Hub ids of the form `org/name@revision`, and hashes of fetched files."""

from pathlib import Path

import pytest

from lowbit.formats.errors import CheckpointError
from lowbit.formats.hub.ids import hub_id, without_address
from lowbit.formats.hub.locate import locate
from tests.hub_server import HubServer

REPO = "org/tiny"
MODELS = Path(__file__).parents[2] / "examples" / "models"
TINY, HYBRID = MODELS / "tiny-qwen3", MODELS / "tiny-qwen3.5"


@pytest.mark.parametrize(
    ("source", "revision", "expected"),
    [
        ("org/name", None, ("org/name", None)),
        ("org/name", "v1", ("org/name", "v1")),
        ("org/name@v1", None, ("org/name", "v1")),
        ("org/name@refs/pr/1", "refs/pr/1", ("org/name", "refs/pr/1")),
        ("org/name@", None, None),
        ("@v1", None, None),
        ("name@v1", None, None),
        ("org@v1/name", None, None),
        ("./org/name@v1", None, None),
    ],
)
def test_hub_ids(
    source: str, revision: str | None, expected: tuple[str, str | None] | None
) -> None:
    assert hub_id(source, revision) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("http://huggingface.co/org/name/", "org/name"),
        ("HTTPS://HuggingFace.co/org/name", "org/name"),
        ("huggingface.co/org/name", "org/name"),
        ("https://hf.co/org/name", "org/name"),
        ("https://www.huggingface.co/org/name?library=transformers#usage", "org/name"),
        ("https://huggingface.co/org/name/tree/main", "org/name@main"),
        ("https://huggingface.co/org/name/tree/main/", "org/name@main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "org/name@refs/pr/1"),
        ("https://huggingface.co/org/name/blob/v1.0/config.json", "org/name@v1.0"),
        ("https://huggingface.co/org/name/resolve/main/config.json", "org/name@main"),
        ("https://huggingface.co/org/name/discussions/3", "org/name"),
        ("https://huggingface.co/org/name@v1", "org/name@v1"),
        ("https://mirror.example:8080/org/name/tree/v1", "org/name@v1"),
        ("org/name@v1", "org/name@v1"),
        ("./models/name", "./models/name"),
        ("https://example.org/org/name", "https://example.org/org/name"),
        ("ftp://huggingface.co/org/name", "ftp://huggingface.co/org/name"),
        ("https://", "https://"),
        ("", ""),
    ],
)
def test_addresses_of_the_hub(monkeypatch: pytest.MonkeyPatch, address: str, expected: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8080")
    assert without_address(address) == expected
    if expected.startswith("org/name"):
        assert hub_id(address) == hub_id(expected) is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("datasets/org/name", "is a data set, expected a model"),
        ("spaces/org/name", "is a space, expected a model"),
        ("org", "names no model"),
        ("", "names no model"),
        ("org/name/tree/main/sub", "is a folder inside a repository"),
    ],
)
def test_addresses_of_no_model(path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hub_id(f"https://huggingface.co/{path}")


def test_an_address_and_another_revision() -> None:
    address = "https://huggingface.co/org/name/tree/v1"
    assert hub_id(address, "v1") == ("org/name", "v1")
    with pytest.raises(CheckpointError, match="names a revision, and `main` is another"):
        hub_id(address, "main")


@pytest.mark.parametrize("revision", ["refs/pr/1", "v1.0"])
def test_a_revision_in_the_id(hub: HubServer, revision: str) -> None:
    hub.add(REPO, TINY)
    commit = hub.add(REPO, HYBRID, revision)
    for source in (f"{REPO}@{revision}", f"{REPO}@{commit}"):
        assert locate(source) == locate(REPO, revision)
    assert locate(f"{REPO}@{revision}").repo == REPO
    assert locate(f"{REPO}@{revision}").commit == commit
    with pytest.raises(CheckpointError, match="names a revision, and `main` is another"):
        locate(f"{REPO}@{revision}", "main")
    with pytest.raises(CheckpointError, match="has no revision `v2`"):
        locate(f"{REPO}@v2")


def test_a_folder_with_an_at_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name@v1").repo is None


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_wrong_bytes_are_refused_and_removed(hub: HubServer, name: str) -> None:
    hub.add(REPO, TINY)
    hub.garbled.add(name)
    with pytest.raises(CheckpointError, match=f"`{name}` of `{REPO}` has arrived with other"):
        locate(REPO)
    hub.garbled.clear()
    hub.forget()
    assert (locate(REPO).folder / name).read_bytes() == (TINY / name).read_bytes()
    assert hub.files() == [name]  # nothing else travels again
