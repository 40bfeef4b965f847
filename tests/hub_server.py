"""A model hub on the loopback interface: the part of the Hub's protocol that downloads use.

Weights are answered with a redirect to a second port, as the Hub redirects to its content network.
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


class HubServer:
    """Serves folders as repositories until `stop`.

    Attributes:
        refusals: answers by prefix of the path, `/api/models/org/name` or `/org/name/resolve`.
        broken: names of files whose transfer breaks off half way, each time.
        ranges: whether a Range header is honoured.
    """

    def __init__(self) -> None:
        self.lock = RLock()  # held while a request is answered, so that its record is never late
        self.log: list[Request] = []
        self.refusals: dict[str, Refusal] = {}
        self.broken: set[str] = set()
        self.ranges = True
        self._commits: dict[tuple[str, str], Path] = {}
        self._refs: dict[tuple[str, str], str] = {}
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
        commit = hashlib.sha1(f"{repo} {revision} {folder}".encode()).hexdigest()
        self._commits[repo, commit] = folder
        self._refs[repo, revision] = commit
        return commit

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

    def find(self, repo: str, revision: str | None) -> tuple[str, Path] | Refusal:
        """Commit and folder of a revision, or what the Hub says where there is none."""
        if not any(name == repo for name, _ in self._commits):
            return Refusal(404, "RepoNotFound", "Repository not found")
        revision = unquote(revision or "main")
        commit = self._refs.get((repo, revision), revision)
        folder = self._commits.get((repo, commit))
        if folder is None:
            return Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, folder


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer

    def do_GET(self) -> None:
        with self.server_state.lock:
            self._answer()

    def do_HEAD(self) -> None:
        with self.server_state.lock:
            self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        for prefix, refusal in self.server_state.refusals.items():
            if path.startswith(prefix):
                return self._refuse(refusal)
        for pattern in (RESOLVE, TREE, INFO):
            match = pattern.fullmatch(path)
            if match:
                found = self.server_state.find(match["repo"], match["revision"])
                if isinstance(found, Refusal):
                    return self._refuse(found)
                commit, folder = found
                if pattern is RESOLVE:
                    return self._resolve(commit, folder, unquote(match["file"]))
                if pattern is TREE:
                    return self._json(_tree(folder))
                return self._json(_info(match["repo"], commit, folder))
        return self._refuse(Refusal(404, message="no such page"))

    def _resolve(self, commit: str, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            return self._refuse(
                Refusal(404, "EntryNotFound", "Entry not found"), {"X-Repo-Commit": commit}
            )
        size, etag = path.stat().st_size, _sha1(path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        on_hub = self.headers["Host"] in self.server_state.endpoint
        if on_hub and name.endswith(".safetensors"):
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

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

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


def _sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _files(folder: Path) -> list[tuple[str, int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def _info(repo: str, commit: str, folder: Path) -> dict[str, object]:
    siblings = [{"rfilename": name, "size": size} for name, size in _files(folder)]
    return {"id": repo, "sha": commit, "siblings": siblings, "tags": [], "private": False}


def _tree(folder: Path) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": size, "oid": _sha1(folder / name)}
        for name, size in _files(folder)
    ]
