"""Publishing to a loopback Hub: content, order of commits, and state after faults."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi, ModelCard

from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.hub.locate import locate
from lowbit.formats.layout.manifest import read_manifest
from tests.hub_server import Fault, HubServer, Refusal

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

pytestmark = [
    pytest.mark.commands,
    pytest.mark.usefixtures("writer"),
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),  # the library's PUT
]

REPO = "org/small-int4"
WEIGHTS = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
Pack = Callable[..., Path]


def push(cli: "Cli", folder: Path, *options: str) -> dict[str, Any]:
    result = cli("push", folder, REPO, "--json", *options)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def local(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_published(hub: HubServer, folder: Path) -> bool:
    """Tell if the repository holds the folder's bytes and a card, and nothing else."""
    found = hub.content(REPO)
    return found.pop("README.md", b"").startswith(b"---\n") and local(folder) == {
        name: content for name, content in found.items() if name != ".gitattributes"
    }


def puts(hub: HubServer) -> int:
    return sum(call.startswith("PUT") for call in hub.calls())


def commits(hub: HubServer) -> list[set[str]]:
    """Names of the files at each commit, oldest first."""
    return [set(files) for files in hub.repositories[REPO].commits.values()]


def test_everything_arrives_weights_first(cli: "Cli", hub: HubServer, pristine: Path) -> None:
    said = push(cli, pristine)
    assert is_published(hub, pristine)
    assert said["url"] == f"{hub.endpoint}/{REPO}"
    assert said["sent"][:3] == WEIGHTS
    assert set(said["sent"]) == set(local(pristine)) | {"README.md"}
    assert (said["present"], said["private"]) == ([], False)
    assert said["commit"] == hub.repositories[REPO].branches["main"]
    created, *filling, last = commits(hub)
    assert created == {".gitattributes"}
    assert [names - created for names in filling] == [set(WEIGHTS[:n]) for n in (1, 2, 3)]
    assert last == {".gitattributes", "README.md", *local(pristine)}
    content = hub.content(REPO)
    card = ModelCard(content["README.md"].decode())
    data = card.data.to_dict()  # type: ignore[no-untyped-call]
    assert (data["license"], data["language"]) == ("apache-2.0", ["en", "de"])
    assert f"lowbit-run {REPO}" in card.text
    assert content["SOURCE_README.md"].decode().endswith("# Big\n")
    assert verify_folder(locate(REPO).folder, None, lambda *_: None).unlisted == ("README.md",)


def test_a_second_push_sends_nothing(cli: "Cli", hub: HubServer, pristine: Path) -> None:
    first = push(cli, pristine)
    hub.forget()
    second = push(cli, pristine)
    assert second["sent"] == []
    assert second["commit"] == first["commit"]
    assert not any("commit/" in call or call.startswith("PUT") for call in hub.calls())


def test_a_complete_repository_changes_at_once(
    cli: "Cli", hub: HubServer, pristine: Path, pack: Pack
) -> None:
    push(cli, pristine)
    before = len(commits(hub))
    other = pack(Recipe(base="int8"), max_shard_bytes=10**9)
    said = push(cli, other)
    assert is_published(hub, other)  # the three old shards and their index are gone
    assert said["sent"][0] == "model.safetensors"
    assert len(commits(hub)) == before + 1


def test_a_replacement_that_failed_is_not_sent_twice(
    cli: "Cli", hub: HubServer, pristine: Path, pack: Pack
) -> None:
    push(cli, pristine)
    before, sent = hub.content(REPO), puts(hub)
    other = pack(Recipe(base="int8"), max_shard_bytes=10**9)
    hub.faults = [Fault("/commit/", Refusal(500), times=10**6)]
    assert cli("push", other, REPO).exit_code == 1
    assert hub.content(REPO) == before
    hub.faults.clear()
    push(cli, other)
    assert is_published(hub, other)
    assert puts(hub) == sent + 1


def test_two_versions_at_two_branches(
    cli: "Cli", hub: HubServer, pristine: Path, pack: Pack
) -> None:
    push(cli, pristine)
    other = pack(Recipe(head="bf16"))
    said = push(cli, other, "--revision", "bf16-head")
    assert said["url"].endswith("/tree/bf16-head")
    assert is_published(hub, pristine)
    assert read_manifest(locate(f"{REPO}@bf16-head").folder) == read_manifest(other)


PASSING = {
    "whoami": Fault("whoami", Refusal(503)),
    "create": Fault("repos/create"),
    "created, but nobody heard": Fault("repos/create", late=True),
    "info": Fault("GET /api/models", Refusal(502)),
    "card": Fault("validate-yaml"),
    "preupload": Fault("preupload", Refusal(500)),
    "batch": Fault("objects/batch"),
    "put": Fault("PUT", Refusal(500)),
    "put dropped": Fault("PUT", times=2),
    "put arrived, but nobody heard": Fault("PUT", late=True),
    "object": Fault("POST /verify", Refusal(504)),
    "commit": Fault("POST .*/commit/", Refusal(500), times=2),
    "committed, but nobody heard": Fault("POST .*/commit/", late=True),
    "somebody else committed": Fault("POST .*/commit/", Refusal(412)),
}


@pytest.mark.parametrize("case", PASSING)
def test_passing_failures_are_retried(
    cli: "Cli", hub: HubServer, pristine: Path, case: str
) -> None:
    fault = PASSING[case]
    hub.faults.append(replace(fault))
    push(cli, pristine)
    assert hub.faults[0].times == 0
    assert is_published(hub, pristine)
    assert puts(hub) <= 3 + fault.times


QUOTA = "Private repository storage limit reached, please upgrade your plan"
LASTING = {
    "down": (Fault("PUT", Refusal(503)), "HTTP 503", "lowbit-convert push"),
    "gone": (Fault("PUT"), "cannot be reached", "check the network"),
    "commits fail": (Fault("/commit/", Refusal(500)), "HTTP 500", "lowbit-convert push"),
    "quota": (Fault("objects/batch", Refusal(403, message=QUOTA)), QUOTA, "settings/billing"),
    "pay": (Fault("preupload", Refusal(402, message="Payment required")), "no room", "billing"),
    "too large": (Fault("PUT", Refusal(413)), "no room", "billing"),
    "no permission": (
        Fault("/commit/", Refusal(403, message="Forbidden")),
        "this token may not write",
        "hf auth login",
    ),
    "token revoked": (Fault("preupload", Refusal(401)), "this token may not write", "HF_TOKEN"),
    "repository deleted": (Fault("preupload", Refusal(404, "RepoNotFound")), "HTTP 404", "hf auth"),
    "refused": (Fault("/commit/", Refusal(400, message="odd name")), "odd name", ""),
}


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("case", LASTING)
def test_lasting_failures_are_explained_and_the_push_continues_later(
    cli: "Cli", hub: HubServer, pristine: Path, case: str, after: int
) -> None:
    fault, message, hint = LASTING[case]
    hub.faults = [replace(fault, times=10**6, after=after)]
    result = cli("push", pristine, REPO)
    assert result.exit_code == 1
    assert message in result.stderr
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert all("config.json" not in names for names in commits(hub))
    hub.faults.clear()
    said = push(cli, pristine)
    assert is_published(hub, pristine)
    if after:
        assert len(said["present"]) >= (1 if "commit" in fault.pattern else 2)


@pytest.mark.parametrize("case", ["quota", "pay", "too large", "no permission", "token revoked"])
def test_lasting_failures_are_not_retried(
    cli: "Cli", hub: HubServer, pristine: Path, case: str
) -> None:
    fault, _, _ = LASTING[case]
    hub.faults = [replace(fault, times=10**6)]
    cli("push", pristine, REPO)
    assert 10**6 - hub.faults[0].times == 1


@pytest.mark.parametrize("when", range(1, 5))  # before each commit
def test_an_interrupted_push_continues(
    cli: "Cli", hub: HubServer, pristine: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    calls = []
    upload = HfApi.preupload_lfs_files

    def interrupted(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == when:
            raise KeyboardInterrupt
        upload(*args, **options)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", interrupted)
    options = ([], ["--private"], ["--public"])[when % 3]
    result = cli("push", pristine, REPO, *options)
    assert result.exit_code == 130
    again = " ".join(["lowbit-convert push", str(pristine), REPO, *options])
    assert f"interrupted; `{again}` continues" in result.stderr
    assert puts(hub) == when - 1
    assert all("config.json" not in names for names in commits(hub))
    monkeypatch.setattr(HfApi, "preupload_lfs_files", upload)
    said = push(cli, pristine)
    assert said["present"] == WEIGHTS[: when - 1]
    assert puts(hub) == 3
    assert is_published(hub, pristine)


@pytest.mark.parametrize("name", [WEIGHTS[1], "config.json", "README.md"])
def test_other_bytes_on_the_hub_are_found_and_replaced(
    cli: "Cli", hub: HubServer, pristine: Path, name: str
) -> None:
    hub.damaged.add(name)
    result = cli("push", pristine, REPO)
    assert result.exit_code == 1
    assert f"`{name}` in `{REPO}` is not what was sent" in result.stderr
    if name in WEIGHTS:  # found out before the repository is complete
        assert all("config.json" not in names for names in commits(hub))
    hub.damaged.clear()
    assert push(cli, pristine)["sent"][0] == name
    assert is_published(hub, pristine)


def test_a_bit_that_flipped_on_the_hub_later(cli: "Cli", hub: HubServer, packed: Path) -> None:
    push(cli, packed)
    files = hub.repositories[REPO].find("main")
    assert files is not None
    content = bytearray(files[1][WEIGHTS[0]].read_bytes())
    content[-1] ^= 1
    damaged = dict(files[1]) | {WEIGHTS[0]: hub.store(bytes(content))}
    hub.repositories[REPO].commit("main", damaged, "damage")
    assert push(cli, packed)["sent"] == [WEIGHTS[0]]
    assert is_published(hub, packed)


def test_visibility(cli: "Cli", hub: HubServer, pristine: Path, tmp_path: Path) -> None:
    assert push(cli, pristine, "--private")["private"] is True
    assert hub.repositories[REPO].private
    result = cli("push", pristine, REPO, "--public")
    assert result.exit_code == 1
    assert "exists and is private, not public" in result.stderr
    assert push(cli, pristine)["sent"] == []


def test_somebody_elses_model_is_not_replaced(
    cli: "Cli", hub: HubServer, pristine: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    (tmp_path / "theirs" / "model.safetensors").write_bytes(b"theirs")
    hub.add(REPO, tmp_path / "theirs")
    before = hub.content(REPO)
    result = cli("push", pristine, REPO)
    assert result.exit_code == 1
    assert "holds a model that lowbit-convert did not make" in result.stderr
    assert hub.content(REPO) == before


def test_an_edited_card_and_unlisted_files(cli: "Cli", hub: HubServer, packed: Path) -> None:
    (packed / "README.md").write_text("---\nlicense: mit\n---\nMine\n")
    (packed / "notes.txt").write_text("private")
    (packed / "MODEL_CARD.md").write_text("draft")
    result = cli("push", packed, REPO)
    assert result.exit_code == 0, result.output
    assert "not published: notes.txt" in result.stdout
    content = hub.content(REPO)
    assert content["README.md"].endswith(b"Mine\n")
    assert {"notes.txt", "MODEL_CARD.md"}.isdisjoint(content)


def test_a_card_the_hub_cannot_read(cli: "Cli", hub: HubServer, packed: Path) -> None:
    (packed / "README.md").write_text("---\nlicense: [\n---\nMine\n")
    result = cli("push", packed, REPO)
    assert result.exit_code == 1
    assert "README.md" in result.stderr
    assert all("config.json" not in names for names in commits(hub))


def test_stale_reports_are_removed(
    cli: "Cli", hub: HubServer, packed: Path, pristine: Path
) -> None:
    push(cli, packed)
    files = hub.repositories[REPO].find("main")
    assert files is not None
    extra = {"quality.html": hub.store(b"old"), "sub/model.safetensors": hub.store(b"kept")}
    hub.repositories[REPO].commit("main", {**files[1], **extra}, "extra")
    shutil.rmtree(packed)
    shutil.copytree(pristine, packed)
    assert push(cli, packed)["sent"] == []
    names = commits(hub)[-1]
    assert "quality.html" not in names
    assert "sub/model.safetensors" in names
