"""A model hub on the loopback interface, speaking the Hub's HTTP protocol.

Weights are answered with a redirect to a second port, as the Hub redirects to its content network.
Uploads are in hub_writes.py. The Xet transport, which the real Hub prefers, is not spoken.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from tests import hub_writes
from tests.hub_store import Files, Repository, describe, is_large, object_id

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")


@dataclass(frozen=True, slots=True)
class Request:
    """One answered request: `file` is set where the body of a file was asked for."""

    method: str
    path: str
    file: str | None
    sent: int
    token: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to every request whose path starts with a given prefix."""

    status: int
    code: str = ""
    message: str = ""


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests whose `METHOD /path` matches.

    Attributes:
        pattern: searched for in the method and the path.
        refusal: the answer; None drops the connection without one.
        times: requests still to be met.
        after: requests let through before.
        late: the request is carried out first, and only its answer is lost.
    """

    pattern: str
    refusal: Refusal | None = None
    times: int = 1
    after: int = 0
    late: bool = False


class HubServer:
    """Serves folders as repositories, and takes uploads, until `stop`.

    Attributes:
        refusals: answers by prefix of the path, `/api/models/org/name` or `/org/name/resolve`.
        faults: for requests of any kind, the first that matches.
        broken: names of files whose transfer breaks off half way, each time.
        garbled: names of files that arrive with a bit flipped, each time.
        damaged: names of files of which a commit stores other bytes.
        ranges: whether a Range header is honoured.
        tokens: role by token, `write` or `read`.
        owner: the account that the tokens belong to.
        repositories: by `owner/name`.
        objects: uploaded large files by SHA-256.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = RLock()  # held while a request is answered, so that its record is never late
        self.log: list[Request] = []
        self.refusals: dict[str, Refusal] = {}
        self.faults: list[Fault] = []
        self.broken: set[str] = set()
        self.garbled: set[str] = set()
        self.damaged: set[str] = set()
        self.ranges = True
        self.tokens = {"hf_write": "write", "hf_read": "read"}
        self.owner = "org"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, Path] = {}
        self._folder = folder
        hub = self

        class Handler(_Handler):
            server_state = hub
            timeout = 10  # for a client that connects and stays silent

        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        self.endpoint, self.cdn = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )
        self._threads = [
            Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            for server in self._servers
        ]
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.daemon_threads = False  # `stop` waits for the answers in progress
            thread.start()

    def add(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision of `org/name`; returns its commit."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path for path in paths}
        repository = self.repositories.setdefault(repo, Repository())
        return repository.commit(revision, files, f"{repo} {revision} {folder}")

    def store(self, content: bytes) -> Path:
        """Keep uploaded bytes."""
        path = self._folder / hashlib.sha256(content).hexdigest()
        self._folder.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    def content(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a revision."""
        found = self.repositories[repo].find(revision)
        return {} if found is None else {name: path.read_bytes() for name, path in found[1].items()}

    def calls(self) -> list[str]:
        """Method and path of every request, in order."""
        return [f"{request.method} {request.path}" for request in self.requests()]

    def requests(self) -> list[Request]:
        """Everything answered since the start or the last `forget`, in order."""
        with self.lock:
            return list(self.log)

    def forget(self) -> None:
        """Start the record anew."""
        with self.lock:
            self.log.clear()

    def files(self) -> list[str]:
        """Names of the files whose bodies went out, sorted, once per transfer."""
        return sorted(request.file for request in self.requests() if request.file is not None)

    def sent(self) -> int:
        """Bytes of all bodies so far."""
        return sum(request.sent for request in self.requests())

    def stop(self) -> None:
        """Close both ports; may be called twice."""
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
        self._servers, self._threads = [], []

    def find(self, repo: str, revision: str | None) -> tuple[str, Files] | Refusal:
        """Commit and files of a revision, or what the Hub says where there is none."""
        if repo not in self.repositories:
            return Refusal(404, "RepoNotFound", "Repository not found")
        revision = unquote(revision or "main")
        found = self.repositories[repo].find(revision)
        return found or Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server_state.lock:
            self._serve(body)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _serve(self, body: bytes) -> None:
        hub, path = self.server_state, urlsplit(self.path).path
        for fault in hub.faults:
            if fault.times and re.search(fault.pattern, f"{self.command} {path}"):
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.late:
                    hub_writes.answer(hub, self.command, path, body, self._token())
                return self._drop() if fault.refusal is None else self._refuse(fault.refusal)
        for prefix, refusal in hub.refusals.items():
            if path.startswith(prefix):
                return self._refuse(refusal)
        for pattern in (RESOLVE, TREE, INFO):
            match = pattern.fullmatch(path)
            if match and self.command in ("GET", "HEAD"):
                return self._read(pattern, match)
        answer = hub_writes.answer(hub, self.command, path, body, self._token())
        if answer is None:
            return self._refuse(Refusal(404, message="no such page"))
        if isinstance(answer, Refusal):
            return self._refuse(answer)
        return self._json(answer[1], answer[0])

    def _token(self) -> str | None:
        header = self.headers.get("Authorization")
        return None if header is None else header.removeprefix("Bearer ")

    def _drop(self) -> None:
        """Hang up without an answer."""
        token = self.headers.get("Authorization")
        self.server_state.log.append(Request(self.command, self.path, None, 0, token))
        self.close_connection = True

    def _read(self, pattern: re.Pattern[str], match: re.Match[str]) -> None:
        hub, repo = self.server_state, match["repo"]
        found = hub.find(repo, match["revision"])
        hidden = repo in hub.repositories and hub.repositories[repo].private
        on_hub = self.headers["Host"] in hub.endpoint
        if hidden and on_hub and self._token() not in hub.tokens:
            found = Refusal(404, "RepoNotFound", "Repository not found")
        if isinstance(found, Refusal):
            return self._refuse(found)
        commit, files = found
        if pattern is RESOLVE:
            return self._resolve(commit, files, unquote(match["file"]))
        if pattern is TREE:
            return self._json(_tree(files))
        return self._json(_info(repo, commit, hub.repositories[repo].private, files))

    def _resolve(self, commit: str, files: Files, name: str) -> None:
        path = files.get(name)
        if path is None or not path.is_file():
            return self._refuse(
                Refusal(404, "EntryNotFound", "Entry not found"), {"X-Repo-Commit": commit}
            )
        size, etag = path.stat().st_size, object_id(name, path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        on_hub = self.headers["Host"] in self.server_state.endpoint
        if on_hub and is_large(name, size):
            headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{etag}"'}
            headers["Location"] = self.server_state.cdn + self.path
            return self._send(302, b"", headers)
        start, stop = self._range(size)
        status = 206 if "Range" in self.headers and self.server_state.ranges else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(stop - start)
        if name in self.server_state.garbled:
            body = body[:-1] + bytes([body[-1] ^ 1])
        return self._send(status, body, headers, name)

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or not self.server_state.ranges:
            return 0, size
        return int(match[1]), min(size, int(match[2] or size) + 1)

    def _refuse(self, refusal: Refusal, headers: Mapping[str, str] | None = None) -> None:
        said = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        extra = {name: value for name, value in said.items() if value}
        self._send(refusal.status, b"{}", extra | dict(headers or {}))

    def _json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], file: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            body, file = b"", None
        elif file in self.server_state.broken:
            body = body[: len(body) // 2]
        sent = self._write(body)
        token = self.headers.get("Authorization")
        self.server_state.log.append(Request(self.command, self.path, file, sent, token))

    def _write(self, body: bytes) -> int:
        """Bytes that went out before the other side had enough."""
        sent = 0
        try:
            for start in range(0, len(body), 1 << 16):
                sent += self.wfile.write(body[start : start + (1 << 16)])
        except ConnectionError:
            self.close_connection = True
        return sent


def _info(repo: str, commit: str, private: bool, files: Files) -> dict[str, object]:
    siblings = [{"rfilename": name, **describe(name, path)} for name, path in files.items()]
    return {"id": repo, "sha": commit, "siblings": siblings, "tags": [], "private": private}


def _tree(files: Files) -> list[dict[str, object]]:
    rows = []
    for name, path in files.items():
        size, oid = path.stat().st_size, object_id(name, path)
        lfs = {"oid": oid, "size": size, "pointerSize": 130}
        large = {"lfs": lfs} if is_large(name, size) else {}
        rows.append({"type": "file", "path": name, "size": size, "oid": oid, **large})
    return rows
