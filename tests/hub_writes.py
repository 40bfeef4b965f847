"""The part of the Hub's protocol that uploads use, for the loopback hub.

Create a repository or a branch; ask which files are large (preupload); upload those (LFS batch,
PUT, verify); commit everything as lines of JSON.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import yaml

from tests.hub_store import Repository, is_large, object_id

if TYPE_CHECKING:
    from tests.hub_server import HubServer, Refusal

Answer = tuple[int, dict[str, object]]
Match = re.Match[str]

REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"


def answer(
    hub: "HubServer", method: str, path: str, body: bytes, token: str | None
) -> "Answer | Refusal | None":
    """Status and JSON of a request that is not a download; None where there is no such page."""
    for wanted, pattern, act in ROUTES:
        match = re.fullmatch(pattern, path)
        if match and method == wanted:
            return _forbidden(hub, match, token) or act(hub, match, body, token)
    return None


def _forbidden(hub: "HubServer", match: Match, token: str | None) -> "Refusal | None":
    """What a token is refused with; uploads to the content network are signed by their address."""
    from tests.hub_server import Refusal

    found = match.groupdict()
    if "oid" in found:
        return None
    if token is None or token not in hub.tokens:
        return Refusal(401, message="Invalid credentials in Authorization header")
    repo = found.get("repo")
    if repo is None:
        return None
    if repo not in hub.repositories:
        return Refusal(404, "RepoNotFound", "Repository not found")
    return _not_allowed(hub, repo, token)


def _not_allowed(hub: "HubServer", repo: str, token: str) -> "Refusal | None":
    from tests.hub_server import Refusal

    if hub.tokens[token] != "write" or repo.partition("/")[0] != hub.owner:
        return Refusal(403, message=f"You don't have the rights to write to {repo}")
    return None


def _whoami(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    role = hub.tokens[token or ""]
    return 200, {"name": hub.owner, "orgs": [], "auth": {"accessToken": {"role": role}}}


def _create(hub: "HubServer", match: Match, body: bytes, token: str | None) -> "Answer | Refusal":
    wish = json.loads(body)
    repo = f"{wish['organization']}/{wish['name']}"
    refused = _not_allowed(hub, repo, token or "")
    if refused:
        return refused
    url: dict[str, object] = {"url": f"{hub.endpoint}/{repo}"}
    if repo in hub.repositories:
        return 409, {"error": "You already created this model repo", **url}
    private = wish.get("visibility") == "private" or bool(wish.get("private"))
    hub.repositories[repo] = Repository(private)
    attributes = hub.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    hub.repositories[repo].commit("main", {".gitattributes": attributes}, repo)
    return 200, url


def _branch(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    repository, branch = hub.repositories[match["repo"]], unquote(match["revision"])
    if branch in repository.branches:
        return 409, {"error": "Reference already exists"}
    repository.branches[branch] = repository.branches["main"]
    return 201, {}


def _validate_yaml(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    """Only what cannot be read is refused; the real page knows every key."""
    parts = json.loads(body)["content"].split("---\n", 2)
    try:
        found = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        return 400, {"errors": [{"message": "no metadata"}], "warnings": []}
    return 200, {"errors": [], "warnings": []}


def _preupload(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    found = hub.repositories[match["repo"]].find(unquote(match["revision"]))
    files = {} if found is None else found[1]
    return 200, {
        "files": [
            {
                "path": name,
                "uploadMode": "lfs" if is_large(name, wish["size"]) else "regular",
                "shouldIgnore": False,
                "oid": object_id(name, files[name]) if name in files else None,
            }
            for wish in json.loads(body)["files"]
            for name in (wish["path"],)
        ]
    }


def _lfs_batch(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    objects: list[dict[str, object]] = []
    for wish in json.loads(body)["objects"]:
        found: dict[str, object] = {"oid": wish["oid"], "size": wish["size"]}
        if wish["oid"] not in hub.objects:
            found["actions"] = {
                "upload": {"href": f"{hub.cdn}/objects/{wish['oid']}"},
                "verify": {"href": f"{hub.endpoint}/verify/{wish['oid']}"},
            }
        objects.append(found)
    return 200, {"transfer": "basic", "objects": objects}


def _put(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    if hashlib.sha256(body).hexdigest() != match["oid"]:
        return 400, {"error": "the content does not match its checksum"}
    hub.objects[match["oid"]] = hub.store(body)
    return 200, {}


def _verify(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    return (200, {}) if match["oid"] in hub.objects else (404, {"error": "no such object"})


def _commit(hub: "HubServer", match: Match, body: bytes, token: str | None) -> Answer:
    repository, branch = hub.repositories[match["repo"]], unquote(match["revision"])
    sha = repository.branches[branch]
    files = dict(repository.commits[sha])
    lines: list[dict[str, Any]] = [json.loads(line) for line in body.splitlines()]
    for line in lines:
        value = line["value"]
        match line["key"]:
            case "header":
                if value.get("parentCommit", sha) != sha:
                    return 412, {"error": "A commit has happened since. Please refresh"}
            case "file":
                files[value["path"]] = hub.store(base64.b64decode(value["content"]))
            case "lfsFile":
                if value["oid"] not in hub.objects:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                files[value["path"]] = hub.objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
    for name in hub.damaged & {line["value"].get("path") for line in lines}:
        files[name] = hub.store(_damage(files[name]))
    new = repository.commit(branch, files, f"{sha} {len(repository.commits)}")
    return 200, {"commitOid": new, "commitUrl": f"{hub.endpoint}/{match['repo']}/commit/{new}"}


def _damage(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    return bytes(content)


ROUTES: tuple[tuple[str, str, Callable[..., "Answer | Refusal"]], ...] = (
    ("GET", "/api/whoami-v2", _whoami),
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/{REVISION}", _branch),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", _preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _lfs_batch),
    ("PUT", "/objects/(?P<oid>[0-9a-f]{64})", _put),
    ("POST", "/verify/(?P<oid>[0-9a-f]{64})", _verify),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", _commit),
)
